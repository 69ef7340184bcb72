"""Brings account rows from the ledger into the purses: at the start, when somebody else changed them, and on demand."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from gateway.metering.purse import Purses
from marketplace.ledger.book import AccountState
from marketplace.ledger.ledger import account_states, changed_since
from marketplace.ledger.tables import chain
from marketplace.store.db import Database, ReadUnit
from marketplace.store.epochs import ACCOUNTS, current
from marketplace.store.watch import Watch

_T = TypeVar("_T")

log = logging.getLogger(__name__)

POLL_S = 0.2
RELOAD_US = 250_000
"""One account is not read on demand more often than this."""


def applied_seq(unit: ReadUnit, node: str) -> int:
    """The last journal record of `node` that this snapshot contains; 0 for a new journal."""
    return int(unit.select(select(chain.c.applied_seq).where(chain.c.node == node)).scalar() or 0)


class Standings:
    """Reads in one thread of its own, so that a long write to the ledger never delays a top-up."""

    def __init__(self, database: Database, node: str, purses: Purses, monotonic: Callable[[], int]) -> None:
        self._database = database
        self._node = node
        self._purses = purses
        self._monotonic = monotonic
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="standings")
        self._watch = Watch(database, ACCOUNTS)
        self._epoch = 0
        self._reloaded_at: dict[str, int] = {}
        self._reloading: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """Read every customer's account. Raises SQLAlchemyError."""
        epoch, seq, states = await self._run(self._read_all)
        self._epoch = epoch
        self._purses.refresh(states, seq)

    async def reload(self, account_id: str) -> None:
        """Read one account again, unless that was just done; a database that does not answer changes nothing."""
        task = self._reloading.get(account_id)
        if task is None:
            last = self._reloaded_at.get(account_id)
            if last is not None and self._monotonic() - last < RELOAD_US:
                return
            task = asyncio.get_running_loop().create_task(self._reload(account_id))
            self._reloading[account_id] = task
            task.add_done_callback(lambda _: self._reloading.pop(account_id, None))
        await asyncio.shield(task)

    async def refresh(self) -> None:
        """Take what others changed since the last look. Raises SQLAlchemyError."""
        found = await self._run(lambda: self._read_changed(self._epoch))
        if found is not None:
            epoch, seq, states = found
            self._purses.refresh(states, seq)
            self._epoch = epoch

    def start(self) -> None:
        """Look for changes every POLL_S until `close`."""
        self._task = asyncio.get_running_loop().create_task(self._poll())

    async def close(self) -> None:
        """Stop looking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await asyncio.to_thread(self._executor.shutdown)
        self._watch.close()

    async def _poll(self) -> None:
        failing = False
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.refresh()
                failing = False
            except (SQLAlchemyError, OSError) as error:
                if not failing:
                    log.warning("accounts cannot be read: %s", error)
                failing = True

    async def _reload(self, account_id: str) -> None:
        try:
            seq, states = await self._run(lambda: self._read_one(account_id))
        except (SQLAlchemyError, OSError) as error:
            log.warning("account %s cannot be read: %s", account_id, error)
            return
        self._reloaded_at[account_id] = self._monotonic()
        if len(self._reloaded_at) > 10_000:
            self._reloaded_at.clear()  # only a brake: forgetting it costs one more read per account
        self._purses.refresh(states, seq)

    async def _run(self, read: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, read)

    def _read_all(self) -> tuple[int, int, dict[str, AccountState]]:
        with self._database.read() as unit:
            return current(unit, ACCOUNTS), applied_seq(unit, self._node), account_states(unit)

    def _read_one(self, account_id: str) -> tuple[int, dict[str, AccountState]]:
        with self._database.read() as unit:
            return applied_seq(unit, self._node), account_states(unit, [account_id])

    def _read_changed(self, since: int) -> tuple[int, int, dict[str, AccountState]] | None:
        if self._watch.value() == since:
            return None
        with self._database.read() as unit:
            epoch, states = changed_since(unit, since)
            return epoch, applied_seq(unit, self._node) if states else 0, states
