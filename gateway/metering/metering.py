"""Everything about money in a running gateway, wired together: journal, purses, meter, settler, standings, recovery.

metering = await Metering.start(data / "journal.sqlite", database, clock=…, monotonic=…)
await metering.recover(engines)          # ends what a crash left open; until then the meter refuses
… metering.meter.open(…) …
await metering.close()
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from gateway.metering.clerk import Clerk, ThreadClerk
from gateway.metering.journal import Journal
from gateway.metering.meter import Meter
from gateway.metering.purse import Purses
from gateway.metering.recovery import Engines, RecoveryReport, end_open_holds
from gateway.metering.settle import Settler
from gateway.metering.standings import Standings, applied_seq
from gateway.metering.usage import allowance_used
from marketplace.ledger.holds import OpenHold, open_holds
from marketplace.store.db import Database

log = logging.getLogger(__name__)

SWITCH_S = 0.0005
"""How long a thread may keep the interpreter while others wait. With Python's own 5 ms, a settler in the middle of a
batch delays the event loop, and a busy event loop the journal, by several times that."""
SWEEP_S = 5.0
CLOSE_S = 10.0


class Metering:
    """Made by `start`; one per process, for one event loop."""

    def __init__(
        self,
        journal: Journal,
        database: Database,
        clock: Callable[[], int],
        monotonic: Callable[[], int],
        clerk: Clerk,
    ) -> None:
        self.journal = journal
        self.purses = Purses()
        self.settler = Settler(journal, self.purses, clerk, monotonic)
        self.standings = Standings(database, journal.node, self.purses, monotonic)
        self.meter = Meter(
            journal,
            self.purses,
            clock=clock,
            monotonic=monotonic,
            reload=self.standings.reload,
            trouble=self.settler.trouble,
        )
        self.report = RecoveryReport()
        """What recovery did at this start."""
        self._database = database
        self._clock = clock
        self._sweeper: asyncio.Task[None] | None = None
        # As the earlier process left them: `note_engine` may overwrite the journal's before recovery compares.
        self._earlier_epochs = dict(journal.engine_epochs)
        journal.on_commit = self.settler.receive

    @classmethod
    async def start(
        cls,
        path: Path,
        database: Database,
        *,
        clock: Callable[[], int],
        monotonic: Callable[[], int],
        clerk: Callable[[str, str], Clerk] | None = None,
    ) -> Metering:
        """Open the journal, bring its tail into the ledger, read the accounts, start the threads and tasks.

        `clock` gives µs UTC, `monotonic` µs that never jump; `clerk` makes who writes the ledger, from the database's
        address and the journal's name: a thread when it is not given. Raises JournalInUseError, JournalDamagedError,
        ClerkError, OSError, SQLAlchemyError; nothing is left running then.
        """
        sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
        journal = await asyncio.to_thread(Journal.open, path)
        made = ThreadClerk(database, journal.node) if clerk is None else clerk(database.url, journal.node)
        metering = cls(journal, database, clock, monotonic, made)
        try:
            await metering._begin()
        except BaseException:  # a start that was cancelled, too, leaves nothing running
            await metering.standings.close()
            await metering.settler.close(0.0)
            journal.close()
            raise
        return metering

    async def _begin(self) -> None:
        journal = self.journal
        applied, used = await asyncio.to_thread(self._read_start)
        tail = await asyncio.to_thread(lambda: list(journal.replay(applied)))
        journal.resume_after(applied)
        self.settler.applied_seq = applied
        await self.settler.replay(tail)
        self.report = RecoveryReport(replayed=len(tail))
        await self.standings.load()
        self.meter.allowances.restore(used, self._clock())
        journal.start(asyncio.get_running_loop())
        await self.settler.start()
        self.standings.start()
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    async def recover(self, engines: Engines) -> RecoveryReport:
        """End what an earlier process left open, then let the meter open. Raises JournalUnavailableError.

        Call it when the engines can be asked, or are known not to come.
        """
        holds = await asyncio.to_thread(self._read_open_holds)
        ended = await end_open_holds(
            holds, engines, self._earlier_epochs, self.journal, self.purses, self.settler, self._clock
        )
        self.report = msgspec.structs.replace(ended, replayed=self.report.replayed)
        if holds or self.report.replayed:
            log.warning("recovered after a crash: %s", self.report)
        self.meter.closed_reason = None
        return self.report

    def note_engine(self, model: str, epoch: str) -> None:
        """An engine process began to serve a model: call it at every connect, before requests go there."""
        self.journal.note_engine_epoch(model, epoch)

    @property
    def trouble(self) -> str | None:
        """Why no request can be metered now; None when all is well. Part of readiness."""
        return self.meter.closed_reason or self.journal.failure or self.settler.trouble()

    async def close(self, timeout_s: float = CLOSE_S) -> bool:
        """End open holds, flush the journal, give the ledger timeout_s to take the rest; True when it has everything.

        What it does not have is in the journal and is applied at the next start.
        """
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait([self._sweeper])
        await self.meter.close()
        done = await self.settler.close(timeout_s)
        await self.standings.close()
        await asyncio.to_thread(self.journal.close)
        return done and self.journal.next_seq - 1 == self.settler.applied_seq

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.meter.sweep()

    def _read_start(self) -> tuple[int, dict[str, int]]:
        with self._database.read() as unit:
            return applied_seq(unit, self.journal.node), allowance_used(unit, self._clock())

    def _read_open_holds(self) -> list[OpenHold]:
        with self._database.read() as unit:
            return open_holds(unit, self.journal.node)
