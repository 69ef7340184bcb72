"""Charges volumes for their time, and looks after those whose accounts are empty: they are kept for a while, and then
deleted. Each step is a transaction of its own that looks again: it may be killed at any line and run again, and several
may run at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sqlalchemy import ColumnElement, and_, or_, select, update

from marketplace.accounts import service as accounts
from marketplace.events import service as events
from marketplace.events.transitions import SYSTEM, Scene
from marketplace.ledger import chain, rentals
from marketplace.ledger.rental_tables import rental_meter
from marketplace.ledger.tables import account
from marketplace.settings import service as settings
from marketplace.store.db import Clock, Database, ReadUnit, WriteUnit
from marketplace.store.ids import Random
from marketplace.volumes import keeping, rules
from marketplace.volumes.service import UnknownVolumeError
from marketplace.volumes.tables import volume, volume_type

SECOND = 1_000_000
TICK_US = 3600 * SECOND
"""How often a volume is charged; its price is that of a month, and what is left is carried."""
PASS = 200
"""Most volumes of one pass, of each sort."""
_KEPT = ("Creating", "Available", "Attached", "Error")


class VolumeKeeper:
    """Looks after the volumes of one database."""

    def __init__(self, database: Database, *, clock: Clock, random: Random) -> None:
        self._database = database
        self._clock = clock
        self._random = random

    def run(self, stopping: Callable[[], bool] = lambda: False) -> int:
        """Charge what is due and look after what nobody pays for; returns of how many something was done."""
        with self._database.read() as unit:
            charged = _to_charge(unit, self._clock())
        done = sum(self._step(partial(self._charge, volume_id=one), stopping) for one in charged)
        with self._database.read() as unit:
            judged = _to_judge(unit, self._clock())
        return done + sum(self._step(partial(self._judge, volume_id=one), stopping) for one in judged)

    def _step(self, work: Callable[[WriteUnit], bool], stopping: Callable[[], bool]) -> bool:
        return not stopping() and self._database.transact(work)

    def _charge(self, unit: WriteUnit, volume_id: str) -> bool:
        chain.lock(unit, chain.DIRECT)
        meter = rentals.running(unit, volume_id)
        now = self._clock()
        if meter is None or meter.metered_to > now - TICK_US:
            return False
        rentals.tick(unit, meter, now, random=self._random)
        return True

    def _judge(self, unit: WriteUnit, volume_id: str) -> bool:
        try:
            row = keeping.lock(unit, volume_id)
        except UnknownVolumeError:
            return False
        now = self._clock()
        accounts.lock(unit, [row.account_id])
        state = accounts.get(unit, row.account_id)
        price = unit.select(select(volume_type.c.cost_per_gb_month).where(volume_type.c.id == row.type_id)).scalar_one()
        poor = not row.billing_exempt and price > 0 and not state.unlimited and state.available <= 0
        due = rules.step(poor=poor, delete_after=row.delete_after, attached=row.status == "Attached", now=now)
        if due is None or row.status not in _KEPT:
            return False
        scene = Scene(SYSTEM, now, self._random)
        if due == "delete":
            keeping.delete(unit, row, scene)
            return True
        grace = settings.current(unit).volume_grace_period * SECOND
        until = now + grace if due == "warn" else None
        unit.execute(update(volume).where(volume.c.id == volume_id).values(delete_after=until))
        _tell(unit, keeping.owner_of(row), volume_id, due, until, scene)
        return True


def _to_charge(unit: ReadUnit, now: int) -> list[str]:
    wanted = select(rental_meter.c.resource_id).where(
        rental_meter.c.stopped_at.is_(None),
        rental_meter.c.resource_type == "Volume",
        rental_meter.c.metered_to <= now - TICK_US,
    )
    return list(unit.select(wanted.order_by(rental_meter.c.metered_to).limit(PASS)).scalars())


def _to_judge(unit: ReadUnit, now: int) -> list[str]:
    """Volumes about which something may be due."""
    empty: ColumnElement[bool] = account.c.posted - account.c.held + account.c.credit_limit <= 0
    poor = and_(empty, account.c.unlimited.is_(False), volume_type.c.cost_per_gb_month > 0)
    due = or_(volume.c.delete_after.is_(None), and_(volume.c.delete_after <= now, volume.c.status != "Attached"))
    wanted = (
        select(volume.c.id)
        .join(account, account.c.id == volume.c.account_id)
        .join(volume_type, volume_type.c.id == volume.c.type_id)
        .where(
            volume.c.status.in_(_KEPT),
            volume.c.billing_exempt.is_(False),
            or_(and_(poor, due), and_(~poor, volume.c.delete_after.is_not(None))),
        )
    )
    return list(unit.select(wanted.order_by(volume.c.id).limit(PASS)).scalars())


def _tell(unit: WriteUnit, owner_id: str, volume_id: str, due: str, until: int | None, scene: Scene) -> None:
    events.record(
        unit,
        action=f"volumes.{due}",
        actor_kind=scene.actor.kind,
        actor_id="",
        credential_id="",
        owner_id=owner_id,
        subject_id=volume_id,
        detail={"delete_after": until},
        request_id="",
        now=scene.now,
        random=scene.random,
    )
