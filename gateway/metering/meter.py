"""Holds money before a request runs, watches it while it runs, settles it once when it ends.

    charge = await meter.open(request_id=…, account_id=…, …)    # InsufficientQuotaError, MeteringUnavailableError
    … send the request to the engine …
    await charge.durable                      # before the first byte to the client; JournalUnavailableError: abort, 503
    stop = charge.progress(counters)          # at every flush; a Stop says why the engine must be told to stop
    await charge.settle("finished", counters) # before [DONE]

The settlement belongs to the meter: `settle` queues it during the call, so a cancelled response cannot take it back.
When final counters are still to come (a client hung up, the engine was told to abort), `settle_when` waits for them
in a task of the meter.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from gateway.metering import failpoints
from gateway.metering.allowance import Allowances
from gateway.metering.charge import (
    ABORT_TIMEOUT_S,
    NO_TIMINGS,
    Charge,
    InsufficientQuotaError,
    MeteringUnavailableError,
    Settlement,
    SettlementDelayedError,
    Stop,
    Timings,
)
from gateway.metering.cover import CHECKPOINT_TOKENS, CHECKPOINT_US, SLICE, Cover
from gateway.metering.journal import Journal, JournalUnavailableError
from gateway.metering.purse import Purse, Purses
from marketplace.ledger.money import MoneyError, Price, Tokens
from marketplace.ledger.records import Checkpoint, Extend, Hold, JournalRecord, Settle, Source, Void
from marketplace.ledger.rules import Outcome, charge_nano, judge

__all__ = [
    "NO_TIMINGS",
    "Charge",
    "InsufficientQuotaError",
    "JournalUnavailableError",
    "Meter",
    "MeterStats",
    "MeteringUnavailableError",
    "Settlement",
    "SettlementDelayedError",
    "Stop",
    "Timings",
]

log = logging.getLogger(__name__)

SETTLE_GRACE_S = 2.0
"""How long a settlement waits for a broken journal before the client is told of an error (and pays nothing)."""
IDLE_LIMIT_US = 15 * 60 * 1_000_000
"""A hold whose request shows no sign of life for this long is ended, at our cost."""


class MeterStats(msgspec.Struct):
    """Counts since the start, for the metrics page."""

    opened: int = 0
    settled: int = 0
    voided: int = 0
    refused: int = 0
    extended: int = 0
    stopped: int = 0
    abandoned: int = 0
    lost_holds: int = 0
    charged_nano: int = 0
    free_tokens: int = 0
    """metered and not charged"""


class _Ending(msgspec.Struct):
    """A settlement or void that is on its way to the disk."""

    charge: Charge
    record: Settle | Void
    settlement: Settlement | None


class Meter:
    """Holds, extensions and settlements of every request of this gateway. One event loop, no locks.

    `clock` gives microseconds UTC for the records; `monotonic` microseconds that never jump, for every interval.
    `reload(account_id)` reads an account's row from the ledger into the purses (rate-limited by its owner); `trouble`
    says why the ledger cannot take more, None while it can.
    """

    def __init__(
        self,
        journal: Journal,
        purses: Purses,
        *,
        clock: Callable[[], int],
        monotonic: Callable[[], int],
        reload: Callable[[str], Awaitable[None]],
        trouble: Callable[[], str | None] = lambda: None,
        idle_limit_us: int = IDLE_LIMIT_US,
        settle_grace_s: float = SETTLE_GRACE_S,
    ) -> None:
        self.stats = MeterStats()
        self.closed_reason: str | None = "the gateway is starting: earlier requests are being accounted for"
        """Why no request may be opened at all: until recovery is done, and from shutdown on. None while open."""
        self.on_abandoned: Callable[[Charge], None] = lambda charge: None
        """Called when the watchdog ends a hold, so that the engine's work can be aborted."""
        self.open_charges: dict[str, Charge] = {}
        self.allowances = Allowances()
        self._journal = journal
        self._purses = purses
        self._clock = clock
        self._monotonic = monotonic
        self._reload = reload
        self._trouble = trouble
        self._idle_limit_us = idle_limit_us
        self._settle_grace_s = settle_grace_s
        self._endings: dict[str, _Ending] = {}
        self._retry: list[_Ending] = []
        self._tasks: set[asyncio.Task[None]] = set()
        journal.on_lost = self._lost
        journal.on_recovered = self._recovered

    # -- opening -----------------------------------------------------------------------------------

    async def open(
        self,
        *,
        request_id: str,
        account_id: str,
        key_id: str,
        model: str,
        price_id: str,
        price: Price,
        prompt_tokens: int,
        max_completion: int,
        n: int = 1,
        client_call_id: str = "",
    ) -> Charge:
        """Hold the first slice: prompt_tokens and min(max_completion, 1,024) generated tokens for each of n choices,
        at `price`.

        Raises InsufficientQuotaError when the account cannot cover it, MeteringUnavailableError when nothing can be
        metered now; ValueError for impossible counts or a request_id that is already open. Without money in the purse
        the account's row is read once more, so that a top-up made a moment ago counts.
        """
        cover = Cover.first(price, prompt_tokens, max_completion, n)
        hold = Hold(
            seq=self._journal.next_seq,
            request_id=request_id,
            account_id=account_id,
            key_id=key_id,
            model=model,
            price_id=price_id,
            amount=cover.amount,
            prompt_tokens=prompt_tokens,
            max_completion=cover.completion,
            at=self._clock(),
            client_call_id=client_call_id,
        )
        charge = self._try_open(hold, cover)
        if charge is None:
            await self._reload(account_id)
            charge = self._try_open(hold, cover)
        if charge is None:
            self.stats.refused += 1
            purse = self._purses.get(account_id)
            raise InsufficientQuotaError(account_id, cover.amount, 0 if purse is None else purse.available)
        return charge

    async def penniless(self, account_id: str) -> bool:
        """Whether an account has nothing at all that could be held, as its row is now."""
        if self._has_money(account_id):
            return False
        await self._reload(account_id)
        return not self._has_money(account_id)

    def _has_money(self, account_id: str) -> bool:
        purse = self._purses.get(account_id)
        return purse is not None and (purse.available > 0 or purse.standing.unlimited)

    def _try_open(self, hold: Hold, cover: Cover) -> Charge | None:
        journal, purse = self._journal, self._purses.get(hold.account_id)
        if (reason := self.closed_reason or journal.failure or self._trouble()) is not None:
            raise MeteringUnavailableError(reason)
        if hold.request_id in self.open_charges or hold.request_id in self._endings:
            raise ValueError(f"request {hold.request_id} is already open")
        seq = journal.next_seq
        if purse is None or not purse.reserve(seq, cover.amount):
            return None
        try:
            failpoints.hit("meter.open.reserved")
            if hold.seq != seq:  # others came first while the account's row was read
                hold = msgspec.structs.replace(hold, seq=seq)
            durable = journal.append(hold)
        except BaseException:  # whatever ends it: money that no record holds would be lost until a restart
            purse.lost(seq)
            raise
        charge = Charge(self, hold, cover, durable, self._monotonic())
        self.open_charges[hold.request_id] = charge
        self.stats.opened += 1
        failpoints.hit("meter.open.appended")
        return charge

    # -- running -----------------------------------------------------------------------------------

    def note(self, charge: Charge, tokens: Tokens) -> Stop | None:
        """Behind `Charge.progress`: extend what runs low, checkpoint what is due."""
        now = self._monotonic()
        charge.counters = tokens
        charge.seen_at = now
        stop = self._extend(charge, tokens) if charge.cover.low(tokens) else None
        if (
            tokens.completion - charge.checkpoint_tokens >= CHECKPOINT_TOKENS
            or now - charge.checkpoint_at >= CHECKPOINT_US
        ):
            charge.checkpoint_tokens = tokens.completion
            charge.checkpoint_at = now
            # A checkpoint only narrows what a crash leaves unmetered: when it cannot be written, the request goes on.
            with contextlib.suppress(JournalUnavailableError):
                self._journal.append_nowait(
                    Checkpoint(
                        self._journal.next_seq,
                        charge.request_id,
                        tokens.prompt,
                        tokens.cached,
                        tokens.completion,
                        self._clock(),
                    )
                )
        return stop

    def _extend(self, charge: Charge, tokens: Tokens) -> Stop | None:
        """Hold one more slice. Without money the request goes on until only the stop margin is left: a top-up may
        come.
        """
        cover, journal = charge.cover, self._journal
        if journal.failure is not None:
            return Stop.UNAVAILABLE if cover.spent(tokens) else None
        wider = cover.next(tokens)
        more = wider.amount - cover.amount
        if more:
            if not self._purse(charge).reserve(journal.next_seq, more):
                if not cover.spent(tokens):
                    return None
                self.stats.stopped += 1
                return Stop.INSUFFICIENT_QUOTA
            journal.append_nowait(Extend(journal.next_seq, charge.request_id, more, self._clock()))
            self.stats.extended += 1
        charge.cover = wider
        return None

    def sweep(self) -> None:
        """End the holds whose requests show no sign of life any more; called every few seconds."""
        limit = self._monotonic() - self._idle_limit_us
        for charge in [charge for charge in self.open_charges.values() if charge.seen_at < limit]:
            log.error("request %s: no sign of life, its hold is ended", charge.request_id)
            self.stats.abandoned += 1
            self.on_abandoned(charge)
            self.finish(charge, "timeout", charge.counters, "checkpoint", "", NO_TIMINGS)

    # -- ending ------------------------------------------------------------------------------------

    def finish(
        self, charge: Charge, outcome: Outcome, tokens: Tokens, source: Source, engine_epoch: str, timings: Timings
    ) -> None:
        """Behind `Charge.settle`: judge, price and queue the settlement."""
        now = self._clock()
        if engine_epoch:
            self._journal.note_engine_epoch(charge.model, engine_epoch)
        left = self.allowances.left(charge.key_id, now)
        try:
            verdict = judge(outcome, tokens, left)
        except MoneyError:
            log.exception("request %s: impossible counters, nothing is charged", charge.request_id)
            tokens, outcome = Tokens(), "server_fault"
            verdict = judge(outcome, tokens, left)
        cost = charge_nano(outcome, tokens, verdict.billable, charge.cover.price)
        self.allowances.use(charge.key_id, verdict.allowance_used, now)
        record = Settle(
            seq=0,
            request_id=charge.request_id,
            prompt=tokens.prompt,
            cached=tokens.cached,
            completion=tokens.completion,
            outcome=outcome,
            billable=verdict.billable,
            reason=verdict.reason,
            source=source,
            engine_epoch=engine_epoch,
            at=now,
            delivered=timings.delivered,
            queue_us=timings.queue_us,
            ttft_us=timings.ttft_us,
            duration_us=timings.duration_us,
        )
        self._end(charge, record, Settlement(tokens, outcome, verdict.billable, verdict.reason, cost))

    def give_back(self, charge: Charge, reason: str) -> None:
        """Behind `Charge.void`: queue the release of the hold."""
        self._end(charge, Void(0, charge.request_id, reason, self._clock()), None)

    def _end(self, charge: Charge, record: Settle | Void, settlement: Settlement | None) -> None:
        failpoints.hit("meter.settle.before_append")
        charge.end = asyncio.get_running_loop().create_future()
        ending = _Ending(charge, record, settlement)
        del self.open_charges[charge.request_id]
        self._endings[charge.request_id] = ending
        if self._journal.failure is None:
            self._append(ending)
        else:
            self._wait_for_journal(ending)

    def _append(self, ending: _Ending) -> None:
        charge, journal, purse = ending.charge, self._journal, self._purse(ending.charge)
        cost = 0 if ending.settlement is None else ending.settlement.cost
        more = cost - charge.cover.amount
        if more > 0 and purse.reserve(journal.next_seq, more):
            # What the engine made past the last slice: covered in the same breath when the account can, written off
            # otherwise.
            journal.append_nowait(Extend(journal.next_seq, charge.request_id, more, ending.record.at))
            charge.cover = msgspec.structs.replace(charge.cover, amount=charge.cover.amount + more)
        seq = journal.next_seq
        future = journal.append(msgspec.structs.replace(ending.record, seq=seq))
        purse.end_hold(seq, charge.cover.amount, cost)
        future.add_done_callback(lambda done: self._written(ending, done))
        failpoints.hit("meter.settle.appended")

    def _written(self, ending: _Ending, done: asyncio.Future[None]) -> None:
        charge = ending.charge
        if self._endings.get(charge.request_id) is not ending:
            return  # its hold was lost: there is nothing to end
        if done.exception() is not None:
            self._wait_for_journal(ending)
            return
        failpoints.hit("meter.settle.durable")
        del self._endings[charge.request_id]
        settlement = ending.settlement
        if settlement is None:
            self.stats.voided += 1
        else:
            self.stats.settled += 1
            self.stats.charged_nano += settlement.cost
            if not settlement.billable:
                self.stats.free_tokens += settlement.tokens.prompt + settlement.tokens.completion
        assert charge.end is not None
        if not charge.end.done():
            charge.end.set_result(settlement)

    def _wait_for_journal(self, ending: _Ending) -> None:
        self._retry.append(ending)
        asyncio.get_running_loop().call_later(self._settle_grace_s, self._overdue, ending)

    def _overdue(self, ending: _Ending) -> None:
        """The client has waited long enough: it gets an error, and what it got was our fault, so it is free."""
        ended = ending.charge.end
        if ending not in self._retry or ended is None or ended.done():
            return
        if isinstance(ending.record, Settle) and ending.settlement is not None:
            verdict = judge("server_fault", ending.settlement.tokens)
            ending.record = msgspec.structs.replace(
                ending.record, outcome="server_fault", billable=verdict.billable, reason=verdict.reason
            )
            ending.settlement = Settlement(
                ending.settlement.tokens, "server_fault", verdict.billable, verdict.reason, 0
            )
        ended.set_exception(SettlementDelayedError(self._journal.failure or "the journal was not written in time"))
        ended.exception()  # seen: whoever waits gets it, and nobody may be waiting

    def _recovered(self) -> None:
        waiting, self._retry = self._retry, []
        for ending in waiting:
            self._append(ending)

    def _lost(self, records: list[JournalRecord]) -> None:
        """These records will never be written: undo what they did to memory."""
        self._purses.lost(records[0].seq)
        for record in records:
            charge = self.open_charges.get(record.request_id)
            if charge is None and (ending := self._endings.get(record.request_id)) is not None:
                charge = ending.charge
            if charge is None:
                continue
            if isinstance(record, Hold):
                self._lose(charge)
            elif isinstance(record, Extend):
                cover = charge.cover
                charge.cover = msgspec.structs.replace(
                    cover,
                    amount=cover.amount - record.amount,
                    completion=max(0, cover.completion - SLICE * cover.choices),
                )

    def _lose(self, charge: Charge) -> None:
        """The hold was never written: the request must not go on, and owes nothing."""
        self.stats.lost_holds += 1
        self.open_charges.pop(charge.request_id, None)
        self._endings.pop(charge.request_id, None)
        if charge.end is None:
            charge.end = asyncio.get_running_loop().create_future()
        if not charge.end.done():
            charge.end.set_exception(JournalUnavailableError(self._journal.failure or "the hold was not written"))
            charge.end.exception()

    # -- life of the meter -------------------------------------------------------------------------

    async def close(self) -> None:
        """Open nothing more, end what is open (at our cost: the service stops), wait until it is on disk."""
        self.closed_reason = "the gateway is shutting down"
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=ABORT_TIMEOUT_S)
        for charge in list(self.open_charges.values()):
            self.on_abandoned(charge)
            self.finish(charge, "server_fault", charge.counters, "checkpoint", "", NO_TIMINGS)
        endings = [ending.charge.end for ending in self._endings.values() if ending.charge.end is not None]
        if endings:
            await asyncio.wait(endings, timeout=self._settle_grace_s + 1.0)

    def own(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run the work in a task that no response owns; `close` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _purse(self, charge: Charge) -> Purse:
        purse = self._purses.get(charge.account_id)
        assert purse is not None, "a charge is only opened on a known purse, and purses are never forgotten"
        return purse
