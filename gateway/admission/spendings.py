"""Reads from the ledger what keys spent, once each, when it is first needed; afterwards memory keeps up by itself.

Exactly once, although requests run while it is read: those that run already are followed from this moment on; the
ledger is given time to take what ended before; then everything is summed that ended before and is not followed. After a
restart, recovery has brought all of it into the ledger before the first request comes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping

from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError

from gateway.admission.budgets import Spending
from gateway.admission.tab import BudgetShare, Tab
from gateway.metering.charge import Charge
from marketplace.keys.budgets import BudgetPeriod, window
from marketplace.keys.tables import api_key
from marketplace.ledger.tables import usage_record
from marketplace.store.db import Database, ReadUnit

log = logging.getLogger(__name__)

LEDGER_S = 5.0
"""How long the ledger may take to have what ended before."""


class SpendingUnreadError(Exception):
    """What was spent could not be read, so nothing more may be spent: try again."""


class Spendings:
    """One per gateway, on its event loop."""

    def __init__(
        self,
        database: Database,
        running: Mapping[str, Charge],
        caught_up: Callable[[], Awaitable[None]],
        clock: Callable[[], int],
    ) -> None:
        """`running` are the open charges by request; `caught_up` returns when the ledger has every end that was
        recorded until now; `clock` gives µs UTC."""
        self.clock = clock
        self._database = database
        self._running = running
        self._caught_up = caught_up
        self._reading: dict[Spending, asyncio.Task[None]] = {}

    async def read(self, spending: Spending) -> None:
        """Make a spending known. SpendingUnreadError when the ledger does not answer; the next request tries again."""
        task = self._reading.get(spending)
        if task is None:
            task = self._reading[spending] = asyncio.get_running_loop().create_task(self._read(spending))
            task.add_done_callback(lambda _: self._reading.pop(spending, None))
        await asyncio.shield(task)
        if not spending.known:
            raise SpendingUnreadError

    async def _read(self, spending: Spending) -> None:
        try:
            key_ids = await asyncio.to_thread(self._keys_of, spending.spender)
            at = self.clock()
            followed = self._adopt(spending, key_ids)
            await asyncio.wait_for(self._caught_up(), LEDGER_S)
            spent = await asyncio.to_thread(self._sum, key_ids, spending.period, at, followed)
        except (SQLAlchemyError, OSError, TimeoutError) as error:
            log.warning("what key %s spent cannot be read: %s", spending.spender, error or "the ledger is behind")
            return
        spending.begin(at, spent, self.clock())

    def _adopt(self, spending: Spending, key_ids: Collection[str]) -> list[str]:
        """Follow what runs; the ids of all requests that are followed."""
        spending.forget()
        followed = []
        for charge in self._running.values():
            if charge.key_id not in key_ids:
                continue
            followed.append(charge.request_id)
            owner = charge.owner
            if isinstance(owner, Tab) and owner.follows(spending):
                continue
            spending.held += charge.held
            Tab(BudgetShare(spending, None, charge.cover, self.clock)).follow(charge)
        return followed

    def _keys_of(self, spender: str) -> set[str]:
        with self._database.read() as unit:
            return key_ids(unit, spender)

    def _sum(self, key_ids: Collection[str], period: BudgetPeriod, at: int, without: Collection[str]) -> int:
        with self._database.read() as unit:
            return spent(unit, key_ids, window(period, at)[0], at, without)


def key_ids(unit: ReadUnit, spender: str) -> set[str]:
    """The first key of a lineage and those that replaced it."""
    found = unit.select(select(api_key.c.id).where(api_key.c.lineage == spender))
    return {spender, *found.scalars()}


def spent(unit: ReadUnit, key_ids: Collection[str], since: int, until: int, without: Collection[str] = ()) -> int:
    """What keys were charged with since ≤ time ≤ until (µs UTC), but for some requests; nano-units."""
    wanted = select(func.coalesce(func.sum(usage_record.c.cost), 0)).where(
        usage_record.c.key_id.in_(key_ids), usage_record.c.at >= since, usage_record.c.at <= until
    )
    if without:
        wanted = wanted.where(usage_record.c.request_id.not_in(without))
    return int(unit.select(wanted).scalar_one())
