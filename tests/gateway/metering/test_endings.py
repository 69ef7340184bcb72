"""How a request ends: exactly once, with the last counters there are, and at whose cost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.wire import Counters
from gateway.metering.charge import (
    MeteringUnavailableError,
    Settlement,
)
from marketplace.ledger.money import Tokens
from marketplace.ledger.records import Settle, Void
from marketplace.ledger.rules import PREFILL_ALLOWANCE
from tests.gateway.metering.bench import Bench, used


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
