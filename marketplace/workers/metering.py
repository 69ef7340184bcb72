"""Charges what runs, about once a minute, and ends what was not paid for too long.

A tick is one transaction for one meter, known by the time that it reached: killed at any line and run again, or run by
two at once, it charges the same time once. No rental is charged beyond its node's last sign of life.
"""

from __future__ import annotations

from functools import partial

from sqlalchemy import or_, select

from marketplace.events.transitions import SYSTEM, Scene
from marketplace.instances import life
from marketplace.instances.tables import instance
from marketplace.ledger import chain, ledger, rentals
from marketplace.ledger.rental_tables import rental_meter
from marketplace.nodes.tables import node
from marketplace.settings import service as settings
from marketplace.store.db import Clock, Database, WriteUnit
from marketplace.store.ids import Random

SECOND = 1_000_000
EVERY_US = 60 * SECOND
PASS = 500
"""Meters of one pass."""


class Metering:
    """Meters of one database."""

    def __init__(self, database: Database, *, clock: Clock, random: Random) -> None:
        self._database = database
        self._clock = clock
        self._random = random

    def run(self) -> int:
        """One pass; returns how many meters were moved."""
        moved = sum(self._database.transact(partial(self._tick, resource_id=name)) for name in self._due())
        for instance_id, node_id in self._unpaid():
            self._database.transact(partial(self._end, instance_id=instance_id, node_id=node_id))
        return moved

    def _due(self) -> list[str]:
        now = self._clock()
        c = rental_meter.c
        wanted = (
            select(c.resource_id)
            .join(instance, instance.c.id == c.resource_id, isouter=True)
            .join(node, node.c.id == instance.c.node_id, isouter=True)
            .where(
                c.stopped_at.is_(None),
                c.resource_type == "Compute",  # volumes cost little, and have a worker that charges them more rarely
                c.metered_to <= now - EVERY_US,
                or_(node.c.id.is_(None), node.c.last_seen > c.metered_to),
            )
            .order_by(c.metered_to)
            .limit(PASS)
        )
        with self._database.read() as unit:
            return list(unit.select(wanted).scalars())

    def _tick(self, unit: WriteUnit, resource_id: str) -> bool:
        now = self._clock()
        chain.lock(unit, chain.DIRECT)
        meter = rentals.running(unit, resource_id)
        if meter is None or meter.metered_to > now - EVERY_US:
            return False
        seen = (
            select(node.c.last_seen).join(instance, instance.c.node_id == node.c.id).where(instance.c.id == resource_id)
        )
        last = unit.select(seen).scalar_one_or_none()
        until = now if last is None else min(now, int(last))
        if until <= meter.metered_to:
            return False
        rentals.tick(unit, meter, until, random=self._random)
        return True

    def _unpaid(self) -> list[tuple[str, str]]:
        """Instances, with their nodes, whose account has not paid for longer than it may."""
        now = self._clock()
        with self._database.read() as unit:
            grace = settings.current(unit).balance_grace_period * SECOND
            wanted = (
                select(instance.c.id, instance.c.node_id)
                .join(rental_meter, rental_meter.c.resource_id == instance.c.id)
                .where(
                    rental_meter.c.stopped_at.is_(None),
                    rental_meter.c.unpaid_since <= now - grace,
                    instance.c.status == "Active",
                )
                .limit(PASS)
            )
            return [(row.id, row.node_id) for row in unit.select(wanted)]

    def _end(self, unit: WriteUnit, instance_id: str, node_id: str) -> None:
        for row in life.lock(unit, {instance_id: node_id}):
            if row.status == "Active" and self._owes(unit, instance_id):
                life.end(unit, row, "out_of_funds", Scene(SYSTEM, self._clock(), self._random))

    def _owes(self, unit: WriteUnit, resource_id: str) -> bool:
        """Whether it is unpaid still: money, or a reservation, may have come since it was charged last."""
        chain.lock(unit, chain.DIRECT)
        meter, now = rentals.running(unit, resource_id), self._clock()
        if meter is None or meter.unpaid_since is None or (meter.free_until or 0) > now:
            return False
        state = ledger.account_states(unit, [meter.account_id])[meter.account_id]
        grace = settings.current(unit).balance_grace_period * SECOND
        return not state.unlimited and state.available <= 0 and meter.unpaid_since <= now - grace
