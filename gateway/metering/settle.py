"""Carries the journal into the ledger: batches of what is durable, each one SQL transaction, which a clerk makes.

Exactly once: the ledger raises this journal's `applied_seq` in the transaction that applies the records, and ignores
what it already has; so a batch whose outcome is unknown is simply applied again. A locked or unreachable database
delays settlements, never loses them: the journal keeps the records until the ledger has committed them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import msgspec

from gateway.metering import failpoints
from gateway.metering.clerk import Clerk
from gateway.metering.journal import Journal
from gateway.metering.purse import Purses
from marketplace.ledger.apply import AppliedBatch
from marketplace.ledger.records import JournalRecord

log = logging.getLogger(__name__)

BATCH_RECORDS = 256
BATCH_S = 0.2
"""Longest wait for a batch to fill; what is owed is durable in the journal before.

A transaction costs about as much for one record as for ten, so waiting for others spares the database, and the
processors that the process which writes the ledger shares with engines and gateway.
"""
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 2.0
LAG_LIMIT_US = 10_000_000
LAG_LIMIT_RECORDS = 50_000


class SettlerStats(msgspec.Struct):
    """Counts since the start, for the metrics page."""

    batches: int = 0
    records: int = 0
    settled: int = 0
    voided: int = 0
    overruns: int = 0
    written_off_nano: int = 0
    quarantined: int = 0
    failures: int = 0


class Settler:
    """One task that applies durable records in order. `receive` is the journal's commit listener."""

    def __init__(
        self,
        journal: Journal,
        purses: Purses,
        clerk: Clerk,
        monotonic: Callable[[], int],
        *,
        lag_limit_us: int = LAG_LIMIT_US,
        lag_limit_records: int = LAG_LIMIT_RECORDS,
    ) -> None:
        """`monotonic` gives microseconds that never jump."""
        self.stats = SettlerStats()
        self.failure: str | None = None
        """Why the last try failed, None when it did not."""
        self.applied_seq = 0
        self._journal = journal
        self._purses = purses
        self._clerk = clerk
        self._monotonic = monotonic
        self._lag_limit_us = lag_limit_us
        self._lag_limit_records = lag_limit_records
        self._waiting: deque[JournalRecord] = deque()
        self._behind_since = 0
        self._wake = asyncio.Event()
        self._full = asyncio.Event()
        self._expected: list[tuple[int, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    # -- health ------------------------------------------------------------------------------------

    @property
    def lag_records(self) -> int:
        """Durable records that the ledger does not have."""
        return len(self._waiting)

    @property
    def lag_us(self) -> int:
        """How long the ledger has been behind without a step forward."""
        return self._monotonic() - self._behind_since if self._waiting else 0

    def trouble(self) -> str | None:
        """Why the gateway should take no more requests: the ledger is too far behind. None when it is not."""
        if not self._waiting:
            return None
        if len(self._waiting) > self._lag_limit_records or self.lag_us > self._lag_limit_us:
            return f"the ledger is {len(self._waiting)} records behind: {self.failure or 'too slow'}"
        return None

    # -- life --------------------------------------------------------------------------------------

    async def replay(self, records: Sequence[JournalRecord]) -> None:
        """Apply the durable tail that an earlier process left, before `start`. Raises what the database raises."""
        failpoints.hit("recovery.before_replay")
        for begin in range(0, len(records), BATCH_RECORDS):
            batch = records[begin : begin + BATCH_RECORDS]
            self._took(await self._clerk.apply(batch), len(batch))
        failpoints.hit("recovery.after_replay")

    def receive(self, records: list[JournalRecord]) -> None:
        """Take records that are durable, in order."""
        if not self._waiting:
            self._behind_since = self._monotonic()
            self._wake.set()
        self._waiting.extend(records)
        if len(self._waiting) >= BATCH_RECORDS:
            self._full.set()

    async def start(self) -> None:
        """Begin to apply what is received. Raises ClerkError."""
        await self._clerk.start()
        self._task = asyncio.get_running_loop().create_task(self._forever())

    async def reached(self, seq: int) -> None:
        """Return when the ledger has every record up to seq."""
        if self.applied_seq >= seq:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._expected.append((seq, future))
        self._full.set()
        await future

    async def close(self, timeout_s: float) -> bool:
        """Try for timeout_s to apply the rest, then stop; False when something is left for the next start."""
        done = True
        if self._task is not None:
            try:
                await asyncio.wait_for(self.reached(self._waiting[-1].seq if self._waiting else 0), timeout_s)
            except TimeoutError:
                done = False
            self._task.cancel()
            await asyncio.wait([self._task])
        # The clerk may be in the middle of a transaction: it ends before the journal is closed.
        await self._clerk.close()
        return done

    # -- the work ----------------------------------------------------------------------------------

    async def _forever(self) -> None:
        retry = FIRST_RETRY_S
        while True:
            await self._wake.wait()
            await self._gather()
            batch = list(islice(self._waiting, BATCH_RECORDS))
            try:
                applied = await self._clerk.apply(batch)
            except Exception as error:  # supervision boundary: a settler that died would leave the ledger behind
                self._failed(error)
                await asyncio.sleep(retry)
                retry = min(LAST_RETRY_S, retry * 2)
                continue
            retry = FIRST_RETRY_S
            self.failure = None
            for _ in batch:
                self._waiting.popleft()
            self._took(applied, len(batch))
            if self._waiting:
                self._behind_since = self._monotonic()
            else:
                self._wake.clear()

    async def _gather(self) -> None:
        """Wait for a full batch, BATCH_S at most."""
        self._full.clear()
        if len(self._waiting) < BATCH_RECORDS:
            try:
                await asyncio.wait_for(self._full.wait(), BATCH_S)
            except TimeoutError:
                return

    def _took(self, applied: AppliedBatch, records: int) -> None:
        self._purses.refresh(applied.accounts, applied.applied_seq)
        failpoints.hit("settler.before_prune")
        self._journal.mark_applied(applied.applied_seq)
        stats = self.stats
        stats.batches += 1
        stats.records += records
        stats.settled += applied.settled
        stats.voided += applied.voided
        stats.overruns += applied.overruns
        stats.written_off_nano += applied.written_off
        stats.quarantined += applied.quarantined
        self.applied_seq = applied.applied_seq
        for seq, future in self._expected:
            if seq <= self.applied_seq and not future.done():
                future.set_result(None)
        self._expected = [item for item in self._expected if not item[1].done()]
        if applied.quarantined:
            log.error("%d journal records contradict the ledger and were set aside", applied.quarantined)

    def _failed(self, error: Exception) -> None:
        self.stats.failures += 1
        if self.failure is None:
            log.error("settlements wait: the ledger cannot be written: %s", error)
        self.failure = str(error)
