"""Meter and purse against an oracle, through any order of requests, commits, disk failures, ledger batches and top-ups.

The journal and the ledger are doubles here, so that every step happens when the machine says so; the oracle adds up the
truth from the list of records that were written or may still be, with nothing kept in between.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.wire import Counters
from gateway.metering.charge import Charge, InsufficientQuotaError, MeteringUnavailableError
from gateway.metering.cover import worst_cost
from gateway.metering.journal import JournalUnavailableError
from gateway.metering.meter import Meter
from gateway.metering.purse import Purses
from marketplace.ledger.book import AccountState
from marketplace.ledger.money import Price, Tokens
from marketplace.ledger.records import Extend, Hold, JournalRecord, Settle, Void
from marketplace.ledger.rules import charge_nano

PRICE = Price(10**6, 10**5, 4 * 10**6)


class JournalDouble:
    """A journal whose commits and failures are decided by the test."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.next_seq = 1
        self.failure: str | None = None
        self.queued: list[tuple[JournalRecord, asyncio.Future[None] | None]] = []
        self.on_lost: Any = None
        self.on_recovered: Any = None
        self._loop = loop

    def append(self, record: JournalRecord) -> asyncio.Future[None]:
        future = self._loop.create_future()
        self._put(record, future)
        return future

    def append_nowait(self, record: JournalRecord) -> None:
        self._put(record, None)

    def _put(self, record: JournalRecord, future: asyncio.Future[None] | None) -> None:
        if self.failure is not None:
            raise JournalUnavailableError(self.failure)
        assert record.seq == self.next_seq
        self.next_seq += 1
        self.queued.append((record, future))

    def note_engine_epoch(self, model: str, epoch: str) -> None:
        return None

    def commit(self) -> list[JournalRecord]:
        done, self.queued = self.queued, []
        for _, future in done:
            if future is not None:
                future.set_result(None)
        return [record for record, _ in done]

    def fail(self) -> None:
        lost, self.queued = self.queued, []
        self.failure = "disk full"
        if lost:
            self.next_seq = lost[0][0].seq
            self.on_lost([record for record, _ in lost])
        for _, future in lost:
            if future is not None:
                future.set_exception(JournalUnavailableError("disk full"))
                future.exception()

    def recover(self) -> None:
        self.failure = None
        self.on_recovered()


@dataclass
class Books:
    """What records say, added up from scratch."""

    posted: int
    open_holds: dict[str, int] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)

    def take(self, record: JournalRecord) -> None:
        if isinstance(record, Hold):
            assert record.request_id not in self.open_holds
            assert record.request_id not in self.ended
            self.open_holds[record.request_id] = record.amount
        elif isinstance(record, Extend):
            self.open_holds[record.request_id] += record.amount
        elif isinstance(record, Settle):
            held = self.open_holds.pop(record.request_id)
            tokens = Tokens(record.prompt, record.cached, record.completion)
            cost = charge_nano(record.outcome, tokens, record.billable, PRICE)
            assert cost <= held, "a settlement never costs more than is held"
            self.posted -= cost
            self.ended[record.request_id] = record.outcome
        elif isinstance(record, Void):
            self.open_holds.pop(record.request_id)
            self.ended[record.request_id] = "void"
        assert self.posted - self.held >= 0, "promised more than there is"

    @property
    def held(self) -> int:
        return sum(self.open_holds.values())


class MeterMachine(RuleBasedStateMachine):
    """One account, any traffic."""

    @initialize(balance=st.integers(0, 30_000))
    def begin(self, balance: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.journal = JournalDouble(self.loop)
        self.purses = Purses()
        self.top_ups = balance
        self.durable: list[JournalRecord] = []
        self.ledger = Books(balance)
        self.applied = 0
        self.version = 1
        self.number = 0
        self.charges: dict[str, Charge] = {}
        self.asked_to_end: set[str] = set()
        self.purses.refresh({"a": self.row()}, 0)
        self.now = 0
        self.meter = Meter(
            self.journal,  # type: ignore[arg-type]
            self.purses,
            clock=lambda: self.now,
            monotonic=lambda: self.now,
            reload=self.reload,
            settle_grace_s=1e6,
        )
        self.meter.closed_reason = None

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.close()

    async def reload(self, account_id: str) -> None:
        return None

    def row(self) -> AccountState:
        return AccountState(self.ledger.posted, self.ledger.held, 0, False, self.version)

    def truth(self) -> Books:
        """The books with everything that was written or still may be."""
        books = Books(self.top_ups)
        for record in [*self.durable, *(record for record, _ in self.journal.queued)]:
            books.take(record)
        return books

    def run(self, work: Any) -> Any:
        async def settled() -> Any:
            result = await work
            for _ in range(3):
                await asyncio.sleep(0)
            return result

        return self.loop.run_until_complete(settled())

    async def call(self, function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    @rule(prompt=st.integers(0, 300), most=st.integers(1, 3000), choices=st.integers(1, 2))
    def open(self, prompt: int, most: int, choices: int) -> None:
        self.number += 1
        before = self.truth()
        needed = worst_cost(prompt, min(most, 1024) * choices, PRICE)
        try:
            charge = self.run(
                self.meter.open(
                    request_id=f"r{self.number}",
                    account_id="a",
                    key_id="k",
                    model="m",
                    price_id="p",
                    price=PRICE,
                    prompt_tokens=prompt,
                    max_completion=most,
                    n=choices,
                )
            )
        except InsufficientQuotaError:
            assert before.posted - before.held < needed
        except MeteringUnavailableError:
            assert self.journal.failure is not None
        else:
            assert before.posted - before.held >= needed
            self.charges[charge.request_id] = charge

    @precondition(lambda self: self.charges)
    @rule(data=st.data(), more=st.integers(0, 900))
    def progress(self, data: st.DataObject, more: int) -> None:
        charge = self.charges[data.draw(st.sampled_from(sorted(self.charges)))]
        # The engine never makes more than the cover (it is told to stop in time) nor more than was asked for.
        done = min(charge.counters.completion + more, charge.cover.completion)
        self.now += 400_000
        self.run(self.call(charge.progress, Counters(charge.cover.prompt, 0, done, True)))

    @precondition(lambda self: self.charges)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(["finished", "disconnected", "engine_error", "out_of_funds", "cancelled"]),
        more=st.integers(0, 2000),
    )
    def settle(self, data: st.DataObject, outcome: Any, more: int) -> None:
        charge = self.charges[data.draw(st.sampled_from(sorted(self.charges)))]
        done = min(charge.counters.completion + more, charge.cover.completion)
        self.asked_to_end.add(charge.request_id)
        self.run(self.call(charge.settle, outcome, Counters(charge.cover.prompt, 0, done, True)))

    @precondition(lambda self: self.charges)
    @rule(data=st.data())
    def void(self, data: st.DataObject) -> None:
        charge = self.charges[data.draw(st.sampled_from(sorted(self.charges)))]
        self.asked_to_end.add(charge.request_id)
        self.run(self.call(charge.void, "test"))

    @rule()
    def commit(self) -> None:
        self.durable.extend(self.run(self.call(self.journal.commit)))

    @rule()
    def fail(self) -> None:
        if self.journal.failure is None:
            self.run(self.call(self.journal.fail))

    @rule()
    def recover(self) -> None:
        if self.journal.failure is not None:
            self.run(self.call(self.journal.recover))

    @rule(count=st.integers(1, 20))
    def apply(self, count: int) -> None:
        batch = self.durable[self.applied : self.applied + count]
        if batch:
            for record in batch:
                self.ledger.take(record)
            self.applied += len(batch)
            self.version += 1
            self.purses.refresh({"a": self.row()}, batch[-1].seq)

    @rule(amount=st.integers(1, 20_000))
    def top_up(self, amount: int) -> None:
        self.top_ups += amount
        self.ledger.posted += amount
        self.version += 1
        applied = self.durable[self.applied - 1].seq if self.applied else 0
        self.purses.refresh({"a": self.row()}, applied)

    @invariant()
    def the_purse_is_exact(self) -> None:
        if hasattr(self, "purses"):
            purse, truth = self.purses.get("a"), self.truth()
            assert purse is not None
            assert (purse.posted, purse.held) == (truth.posted, truth.held)
            assert purse.available >= 0

    @invariant()
    def every_request_is_accounted_for(self) -> None:
        if not hasattr(self, "purses"):
            return
        truth = self.truth()
        for request_id, charge in self.charges.items():
            lost = request_id not in truth.open_holds and request_id not in truth.ended
            if lost:
                assert charge.ended, "a hold that was never written cannot run on"
            elif request_id in truth.open_holds:
                assert charge.held == truth.open_holds[request_id]
                waits = self.journal.failure is not None and request_id in self.asked_to_end
                assert waits or request_id not in self.asked_to_end
            else:
                assert request_id in self.asked_to_end
        assert self.meter.stats.settled + self.meter.stats.voided <= len(truth.ended)


MeterMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMeterMachine = MeterMachine.TestCase
