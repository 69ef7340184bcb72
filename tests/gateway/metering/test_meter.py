from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from engine.wire import Counters
from gateway.metering import failpoints
from gateway.metering.charge import (
    Charge,
    InsufficientQuotaError,
    MeteringUnavailableError,
    Settlement,
    SettlementDelayedError,
    Stop,
    Timings,
)
from gateway.metering.journal import Journal, JournalUnavailableError
from gateway.metering.meter import Meter
from gateway.metering.purse import Purses
from marketplace.ledger.book import AccountState
from marketplace.ledger.money import Price, Tokens
from marketplace.ledger.records import Checkpoint, Extend, Hold, JournalRecord, Settle, Void
from marketplace.ledger.rules import PREFILL_ALLOWANCE

PRICE = Price(10**6, 10**5, 4 * 10**6)  # 1, 0.1 and 4 nano-units per token
FIRST = 10 + 4 * 1024


def used(completion: int, prompt: int = 10, cached: int = 0) -> Counters:
    return Counters(prompt, cached, completion, True)


class Bench:
    """A meter over a real journal and an account row held in memory."""

    def __init__(self, journal: Journal, clocks: Any, balance: int) -> None:
        self.journal = journal
        self.clocks = clocks
        self.purses = Purses()
        self.rows = {"a": AccountState(balance, 0, 0, False, 1)}
        self.purses.refresh(self.rows, 0)
        self.reloads: list[str] = []
        self.records: list[JournalRecord] = []
        self.trouble: str | None = None
        journal.on_commit = self.records.extend
        self.meter = Meter(
            journal,
            self.purses,
            clock=clocks.wall,
            monotonic=clocks.monotonic,
            reload=self._reload,
            trouble=lambda: self.trouble,
            settle_grace_s=0.05,
        )
        self.meter.closed_reason = None
        self._number = 0

    async def _reload(self, account_id: str) -> None:
        self.reloads.append(account_id)
        self.purses.refresh(self.rows, 0)

    async def open(self, **changes: Any) -> Charge:
        self._number += 1
        asked: dict[str, Any] = {
            "request_id": f"r{self._number}",
            "account_id": "a",
            "key_id": "k",
            "model": "tiny",
            "price_id": "p",
            "price": PRICE,
            "prompt_tokens": 10,
            "max_completion": 5000,
        }
        return await self.meter.open(**(asked | changes))

    @property
    def available(self) -> int:
        purse = self.purses.get("a")
        assert purse is not None
        return purse.available

    def of(self, kind: type[Any]) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(2_000):
            if condition():
                return
            await asyncio.sleep(0.005)
        raise AssertionError("it never came true")

    def break_disk(self) -> None:
        def fail() -> None:
            raise sqlite3.OperationalError("disk I/O error")

        failpoints.arm("journal.before_commit", fail)

    async def mend_disk(self) -> None:
        failpoints.disarm()
        await self.until(lambda: self.journal.failure is None)


@pytest.fixture
def bench(tmp_path: Path, clocks: Any) -> Callable[..., Any]:
    """bench(work, balance) runs the async function `work` with a Bench."""

    def run(work: Callable[[Bench], Awaitable[Any]], balance: int = 10**9) -> Any:
        async def main() -> Any:
            journal = Journal.open(tmp_path / "journal.sqlite")
            journal.start(asyncio.get_running_loop())
            try:
                return await work(Bench(journal, clocks, balance))
            finally:
                await asyncio.to_thread(journal.close)

        return asyncio.run(main())

    return run


def test_a_request_holds_a_slice_and_pays_what_it_used(bench: Any) -> None:
    async def work(b: Bench) -> None:
        charge = await b.open()
        assert b.available == 10**9 - FIRST == 10**9 - charge.held
        await charge.durable
        settlement = await charge.settle(
            "finished", used(50, cached=4), engine_epoch="e1", timings=Timings(delivered=50, queue_us=1, ttft_us=2)
        )
        assert settlement == Settlement(Tokens(10, 4, 50), "finished", True, "completed", 206)  # 6 + 0.4 + 200
        assert b.available == 10**9 - 206
        hold, settle = b.records
        assert isinstance(hold, Hold)
        assert (hold.amount, hold.prompt_tokens, hold.max_completion, hold.price_id) == (FIRST, 10, 1024, "p")
        assert isinstance(settle, Settle)
        assert (settle.source, settle.engine_epoch, settle.delivered, settle.ttft_us) == ("engine", "e1", 50, 2)
        assert (b.meter.stats.opened, b.meter.stats.settled, b.meter.stats.charged_nano) == (1, 1, 206)
        assert not b.meter.open_charges

    bench(work)


def test_money_for_m_requests_admits_m_of_fifty_at_once(bench: Any) -> None:
    async def work(b: Bench) -> None:
        results = await asyncio.gather(*(b.open() for _ in range(50)), return_exceptions=True)
        admitted = [r for r in results if isinstance(r, Charge)]
        refused = [r for r in results if isinstance(r, InsufficientQuotaError)]
        assert (len(admitted), len(refused)) == (7, 43)
        assert (refused[0].needed, refused[0].available) == (FIRST, 5)
        await admitted[0].settle("finished", used(1024))  # spent to the last unit
        with pytest.raises(InsufficientQuotaError):
            await b.open()
        await admitted[1].settle("engine_error", used(1000))  # free: its money is back
        again = await b.open()
        assert again.held == FIRST

    bench(work, balance=7 * FIRST + 5)


def test_a_top_up_made_a_moment_ago_counts(bench: Any) -> None:
    async def work(b: Bench) -> None:
        with pytest.raises(InsufficientQuotaError):
            await b.open()
        b.rows = {"a": AccountState(FIRST, 0, 0, False, 2)}
        charge = await b.open()
        assert charge.held == FIRST
        assert b.reloads == ["a", "a"]

    bench(work, balance=0)


def test_an_account_that_nobody_knows_has_no_money(bench: Any) -> None:
    async def work(b: Bench) -> None:
        with pytest.raises(InsufficientQuotaError) as refusal:
            await b.open(account_id="nobody")
        assert refusal.value.available == 0
        assert b.reloads == ["nobody"]
        assert b.journal.next_seq == 1

    bench(work)


def test_nothing_opens_while_closed_behind_or_twice(bench: Any) -> None:
    async def work(b: Bench) -> None:
        b.trouble = "the ledger is behind"
        with pytest.raises(MeteringUnavailableError, match="behind"):
            await b.open()
        b.trouble = None
        b.meter.closed_reason = "starting"
        with pytest.raises(MeteringUnavailableError, match="starting"):
            await b.open()
        b.meter.closed_reason = None
        await b.open(request_id="same")
        with pytest.raises(ValueError, match="already open"):
            await b.open(request_id="same")
        with pytest.raises(ValueError, match="choices"):
            await b.open(n=0)
        assert b.available == 10**9 - FIRST

    bench(work)


def test_unlimited_accounts_and_free_models_are_metered_all_the_same(bench: Any) -> None:
    async def work(b: Bench) -> None:
        b.purses.refresh({"house": AccountState(0, 0, 0, True, 1)}, 0)
        charge = await b.open(account_id="house")
        assert charge.progress(used(2000)) is None
        settlement = await charge.settle("finished", used(3000))
        assert settlement.cost == 12_010
        free = await b.open(price=Price(0, 0, 0))
        assert free.progress(used(900)) is None
        assert free.progress(used(2500)) is None
        assert (await free.settle("finished", used(2600))).tokens == Tokens(10, 0, 2600)
        assert b.available == 10**9

    bench(work)


def test_extends_at_three_quarters_by_a_slice_for_each_choice(bench: Any) -> None:
    async def work(b: Bench) -> None:
        charge = await b.open(n=2)
        assert charge.held == 10 + 4 * 2048
        assert charge.progress(used(1535)) is None
        assert charge.held == 10 + 4 * 2048
        assert charge.progress(used(1536)) is None
        assert charge.held == 10 + 4 * 4096
        await b.journal.flush()
        (extend,) = b.of(Extend)
        assert extend.amount == charge.held - (10 + 4 * 2048)
        assert b.available == 10**9 - charge.held

    bench(work)


def test_without_money_the_request_runs_to_the_margin_and_is_then_stopped(bench: Any) -> None:
    async def work(b: Bench) -> None:
        charge = await b.open()
        assert charge.progress(used(800)) is None
        assert charge.progress(used(959)) is None
        assert charge.progress(used(960)) is Stop.INSUFFICIENT_QUOTA
        assert b.meter.stats.stopped == 1
        settlement = await charge.settle("out_of_funds", used(990))
        assert (settlement.billable, settlement.cost) == (True, 10 + 4 * 990)
        assert b.of(Extend) == []

    bench(work, balance=FIRST + 1000)


def test_a_top_up_in_the_middle_lets_the_request_go_on(bench: Any) -> None:
    async def work(b: Bench) -> None:
        charge = await b.open()
        assert charge.progress(used(900)) is None
        b.purses.refresh({"a": AccountState(10**6, 0, 0, False, 2)}, 0)
        assert charge.progress(used(961)) is None
        assert charge.held > FIRST

    bench(work, balance=FIRST)


def test_what_the_engine_made_beyond_the_hold_is_covered_in_the_same_breath(bench: Any) -> None:
    async def work(b: Bench) -> None:
        charge = await b.open()
        settlement = await charge.settle("finished", used(1100))
        assert settlement.cost == 10 + 4 * 1100
        assert b.available == 10**9 - settlement.cost
        assert [type(record) for record in b.records] == [Hold, Extend, Settle]
        assert b.of(Extend)[0].amount == settlement.cost - FIRST

    bench(work)


def test_checkpoints_come_every_256_tokens_or_every_second(bench: Any) -> None:
    async def work(b: Bench) -> None:
        charge = await b.open()
        for completion in (100, 255, 256, 300, 511, 512):
            charge.progress(used(completion))
        await b.journal.flush()
        assert [record.completion for record in b.of(Checkpoint)] == [256, 512]
        charge.progress(used(513))
        b.clocks.pass_us(999_999)
        charge.progress(used(514))
        b.clocks.pass_us(1)
        charge.progress(used(515))
        await b.journal.flush()
        assert [record.completion for record in b.of(Checkpoint)] == [256, 512, 515]

    bench(work)


def test_counters_do_not_go_back(bench: Any) -> None:
    async def work(b: Bench) -> None:
        charge = await b.open()
        charge.progress(used(300))
        assert charge.progress(used(200)) is None
        assert charge.counters == Tokens(10, 0, 300)

    bench(work)


def test_a_request_ends_exactly_once(bench: Any) -> None:
    async def work(b: Bench) -> None:
        charge = await b.open()
        first = charge.settle("finished", used(50))
        second = charge.settle("disconnected", used(60))
        third = charge.void("never mind")
        assert await first == await second == await third
        assert charge.progress(used(2000)) is None
        await charge.settle_when("disconnected", asyncio.sleep(0, used(70)))
        assert len(b.of(Settle)) == 1
        assert b.of(Void) == []
        assert b.of(Settle)[0].completion == 50

    bench(work)


def test_void_gives_everything_back(bench: Any) -> None:
    async def work(b: Bench) -> None:
        charge = await b.open()
        assert await charge.void("queue_full") is None
        assert b.available == 10**9
        assert (b.of(Void)[0].reason, b.meter.stats.voided) == ("queue_full", 1)

    bench(work)


def test_cancelling_the_response_does_not_cancel_the_settlement(bench: Any) -> None:
    async def work(b: Bench) -> None:
        charge = await b.open()

        async def response() -> None:
            await charge.settle("finished", used(50))

        task = asyncio.create_task(response())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        settlement = await charge.settle("disconnected", used(60))
        assert settlement.outcome == "finished"
        assert len(b.of(Settle)) == 1

    bench(work)


def test_final_counters_are_awaited_by_the_meter_not_the_response(bench: Any) -> None:
    async def work(b: Bench) -> None:
        charge = await b.open()
        charge.progress(used(40))
        final: asyncio.Future[Counters] = asyncio.get_running_loop().create_future()
        task = charge.settle_when("disconnected", final, engine_epoch="e")
        closing = asyncio.create_task(b.meter.close())
        await asyncio.sleep(0)
        final.set_result(used(48))
        await closing
        assert task.done()
        (settle,) = b.of(Settle)
        assert (settle.completion, settle.source, settle.reason) == (48, "engine", "partial_output")

    bench(work)


@pytest.mark.parametrize("kind", ["silence", "error"])
def test_without_final_counters_the_last_known_ones_are_settled(bench: Any, kind: str) -> None:
    async def work(b: Bench) -> None:
        charge = await b.open()
        charge.progress(used(40))
        final: asyncio.Future[Counters] = asyncio.get_running_loop().create_future()
        if kind == "error":
            final.set_exception(RuntimeError("the engine is down"))
        await charge.settle_when("disconnected", final, timeout_s=0.01)
        (settle,) = b.of(Settle)
        assert (settle.completion, settle.source) == (40, "checkpoint")

    bench(work)


def test_abandoned_prefill_is_free_until_the_daily_allowance_is_used(bench: Any) -> None:
    async def work(b: Bench) -> None:
        b.meter.allowances.restore({"k": PREFILL_ALLOWANCE - 150}, b.clocks.wall())
        results = []
        for _ in range(3):
            charge = await b.open(prompt_tokens=100)
            results.append(await charge.settle("disconnected", used(0, prompt=100)))
        assert [(r.reason, r.cost) for r in results] == [
            ("prefill_allowance", 0),
            ("prefill_over_allowance", 100),
            ("prefill_over_allowance", 100),
        ]
        other = await b.open(key_id="other", prompt_tokens=100)
        assert (await other.settle("disconnected", used(0, prompt=100))).cost == 0
        b.clocks.pass_us(86_400_000_000)
        tomorrow = await b.open(prompt_tokens=100)
        assert (await tomorrow.settle("disconnected", used(0, prompt=100))).cost == 0

    bench(work)


def test_a_request_that_only_waited_costs_nothing(bench: Any) -> None:
    async def work(b: Bench) -> None:
        charge = await b.open()
        settlement = await charge.settle("disconnected", Counters(prompt=10, started=False))
        assert (settlement.tokens, settlement.cost, settlement.reason) == (Tokens(), 0, "not_started")

    bench(work)


def test_impossible_counters_end_the_hold_and_charge_nothing(bench: Any) -> None:
    async def work(b: Bench) -> None:
        charge = await b.open()
        settlement = await charge.settle("finished", used(-5))
        assert (settlement.outcome, settlement.cost, settlement.tokens) == ("server_fault", 0, Tokens())
        assert b.available == 10**9

    bench(work)


def test_the_watchdog_ends_holds_without_a_sign_of_life_at_our_cost(bench: Any) -> None:
    async def work(b: Bench) -> None:
        abandoned: list[str] = []
        b.meter.on_abandoned = lambda charge: abandoned.append(charge.request_id)
        lively, dead = await b.open(), await b.open()
        dead.progress(used(7))
        b.clocks.pass_us(14 * 60 * 1_000_000)
        lively.progress(used(9))
        b.meter.sweep()
        assert abandoned == []
        b.clocks.wall_us += 3_600_000_000  # a jump of the wall clock ends nothing
        b.meter.sweep()
        assert abandoned == []
        b.clocks.pass_us(60 * 1_000_000 + 1)
        b.meter.sweep()
        assert abandoned == [dead.request_id]
        assert await dead.settle("finished", used(8)) == Settlement(Tokens(10, 0, 7), "timeout", False, "timeout", 0)
        assert list(b.meter.open_charges) == [lively.request_id]

    bench(work)


def test_closing_ends_what_is_open_at_our_cost(bench: Any) -> None:
    async def work(b: Bench) -> None:
        charge = await b.open()
        charge.progress(used(33))
        await b.meter.close()
        (settle,) = b.of(Settle)
        assert (settle.completion, settle.outcome, settle.billable) == (33, "server_fault", False)
        with pytest.raises(MeteringUnavailableError, match="shutting down"):
            await b.open()

    bench(work)


def test_a_hold_that_cannot_be_written_gives_the_money_back_and_ends_the_request(bench: Any) -> None:
    async def work(b: Bench) -> None:
        b.break_disk()
        charge = await b.open()
        with pytest.raises(JournalUnavailableError):
            await charge.durable
        assert b.available == 10**9
        assert charge.ended
        with pytest.raises(JournalUnavailableError):
            await charge.settle("finished", used(5))
        assert charge.progress(used(2000)) is None
        with pytest.raises(MeteringUnavailableError):
            await b.open()
        await b.mend_disk()
        assert (await (await b.open()).settle("finished", used(1))).cost == 14
        assert b.meter.stats.lost_holds == 1
        assert [record.seq for record in b.records] == [1, 2]

    bench(work)


def test_a_settlement_survives_a_short_failure_of_the_disk(bench: Any) -> None:
    async def work(b: Bench) -> None:
        charge = await b.open()
        await charge.durable
        b.meter._settle_grace_s = 10.0
        b.break_disk()
        waiting = charge.settle("finished", used(50))
        await b.until(lambda: b.journal.failure is not None)
        assert b.available == 10**9 - FIRST, "the hold stands while its end is not written"
        await b.mend_disk()
        assert (await waiting).cost == 210
        assert b.available == 10**9 - 210
        assert len(b.of(Settle)) == 1

    bench(work)


def test_a_settlement_that_comes_too_late_is_free(bench: Any) -> None:
    async def work(b: Bench) -> None:
        first, second = await b.open(), await b.open()
        await second.durable
        b.break_disk()
        waiting = first.settle("finished", used(50))
        with pytest.raises(SettlementDelayedError, match="disk I/O"):
            await waiting
        with pytest.raises(SettlementDelayedError):  # asked for while the journal is known to be broken
            await second.settle("finished", used(60))
        await b.mend_disk()
        await b.until(lambda: len(b.of(Settle)) == 2)
        assert [(s.outcome, s.billable, s.completion) for s in b.of(Settle)] == [
            ("server_fault", False, 50),
            ("server_fault", False, 60),
        ]
        assert b.available == 10**9
        await b.until(lambda: b.meter.stats.settled == 2)

    bench(work)


def test_a_lost_extension_is_asked_for_again(bench: Any) -> None:
    async def work(b: Bench) -> None:
        charge = await b.open()
        await charge.durable
        b.break_disk()
        assert charge.progress(used(800)) is None
        await b.until(lambda: b.journal.failure is not None)
        assert charge.held == FIRST
        assert charge.progress(used(850)) is None
        assert charge.progress(used(1000)) is Stop.UNAVAILABLE
        await b.mend_disk()
        assert charge.progress(used(1010)) is None
        assert charge.held > FIRST
        await charge.settle("finished", used(1020))
        assert [type(record) for record in b.records if not isinstance(record, Checkpoint)] == [Hold, Extend, Settle]

    bench(work)


def test_a_failure_before_the_journal_gives_the_reservation_back(bench: Any) -> None:
    async def work(b: Bench) -> None:
        def fail() -> None:
            raise RuntimeError("armed")

        failpoints.arm("meter.open.reserved", fail)
        with pytest.raises(RuntimeError, match="armed"):
            await b.open()
        assert b.available == 10**9
        assert b.journal.next_seq == 1

    bench(work)
