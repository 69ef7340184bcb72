"""What a request holds before it runs and while it runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.metering.charge import (
    Charge,
    InsufficientQuotaError,
    MeteringUnavailableError,
    Settlement,
    Stop,
    Timings,
)
from marketplace.ledger.book import AccountState
from marketplace.ledger.money import Price, Tokens
from marketplace.ledger.records import Checkpoint, Extend, Hold, Settle
from tests.gateway.metering.bench import FIRST, Bench, used


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


def test_checkpoints_come_every_256_tokens_or_every_five_seconds(bench: Any) -> None:
    async def work(b: Bench) -> None:
        charge = await b.open()
        for completion in (100, 255, 256, 300, 511, 512):
            charge.progress(used(completion))
        await b.journal.flush()
        assert [record.completion for record in b.of(Checkpoint)] == [256, 512]
        charge.progress(used(513))
        b.clocks.pass_us(4_999_999)
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
