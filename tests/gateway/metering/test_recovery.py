from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.wire import Counters, Usage, UsageReply
from gateway.metering.metering import Metering
from gateway.metering.recovery import RecoveryReport, combine, verdict
from marketplace.ledger.audit import audit
from marketplace.ledger.holds import OpenHold, open_holds
from marketplace.ledger.money import Tokens
from marketplace.ledger.records import Settle, Void
from marketplace.ledger.tables import usage_record
from marketplace.store.db import Database

COUNTED = Counters(20, 4, 30, True)


NOTHING = Tokens()


def hold(counters: Tokens = NOTHING) -> OpenHold:
    return OpenHold("r", "a", "k", "tiny", "p", 100, 100, 1_000, 2_000, counters)


def test_a_request_that_the_engine_counted_is_metered_exactly_and_free() -> None:
    settle = verdict(hold(Tokens(20, 4, 10)), Usage(COUNTED, "stop"), "e1", same_process=False, now=5_000)
    assert isinstance(settle, Settle)
    assert (settle.prompt, settle.cached, settle.completion) == (20, 4, 30)
    assert (settle.outcome, settle.billable, settle.source, settle.engine_epoch) == (
        "server_fault",
        False,
        "recovered",
        "e1",
    )


def test_a_request_that_only_queued_in_the_engine_is_metered_as_nothing() -> None:
    settle = verdict(hold(), Usage(Counters(20, 0, 0, False), "abort"), "e1", same_process=True, now=5_000)
    assert isinstance(settle, Settle)
    assert (settle.prompt, settle.completion) == (0, 0)


def test_a_request_that_its_own_engine_never_saw_was_never_dispatched() -> None:
    assert verdict(hold(), None, "e1", same_process=True, now=5_000) == Void(0, "r", "never_dispatched", 5_000)


@pytest.mark.parametrize(("epoch", "same"), [("e2", False), (None, False), ("e1", True)])
def test_a_request_that_is_forgotten_is_metered_by_its_last_checkpoint(epoch: str | None, same: bool) -> None:
    settle = verdict(hold(Tokens(20, 4, 10)), None, epoch, same_process=same, now=5_000)
    assert isinstance(settle, Settle)
    assert (settle.completion, settle.source, settle.billable, settle.engine_epoch) == (10, "checkpoint", False, "")


def test_impossible_counters_still_end_the_hold() -> None:
    settle = verdict(hold(), Usage(Counters(-1, 0, 5, True), "stop"), "e1", same_process=True, now=5_000)
    assert isinstance(settle, Settle)
    assert (settle.prompt, settle.completion, settle.billable) == (0, 0, False)


def test_a_clock_that_went_back_does_not_end_a_hold_before_it_began() -> None:
    settle = verdict(hold(), None, None, same_process=False, now=10)
    assert settle.at == 1_000


def test_choices_are_added_up_and_the_prompt_counts_once() -> None:
    known = {
        "r#0": Usage(Counters(20, 8, 5, True), "stop"),
        "r#1": Usage(Counters(20, 16, 7, True), None),
        "other": Usage(Counters(99, 0, 99, True), "stop"),
    }
    combined = combine("r", known)
    assert combined == Usage(Counters(20, 8, 12, True), None)
    assert combine("unknown", known) is None


class Engine:
    """An engine that remembers what the test says."""

    def __init__(self, epoch: str, known: dict[str, Usage], *, broken: bool = False) -> None:
        self.epoch = epoch
        self.known = known
        self.broken = broken
        self.aborted: list[str] = []
        self.asked: list[str] = []

    async def usage(self, model: str, request_ids: Sequence[str]) -> UsageReply | None:
        assert model == "tiny"
        self.asked.extend(request_ids)
        if self.broken:
            raise ConnectionError("no engine")
        return UsageReply(1, self.epoch, {name: self.known[name] for name in request_ids if name in self.known})

    async def abort(self, model: str, request_id: str) -> None:
        self.aborted.append(request_id)
        counters = self.known[request_id].counters
        self.known[request_id] = Usage(counters, "abort")


def crash_and_recover(
    folder: Path, bank: Any, clocks: Any, engine: Engine, *, balance: int = 10**9
) -> tuple[Metering, dict[str, Any]]:
    """Three requests held and cut off by a crash (nothing is closed), then a new process's recovery."""
    database: Database = bank.database
    bank.customer("a", balance)

    async def before() -> None:
        metering = await Metering.start(
            folder / "journal.sqlite", database, clock=clocks.wall, monotonic=clocks.monotonic
        )
        metering.note_engine("tiny", "e1")
        await metering.recover(Engine("e1", {}))
        for name in ("counted", "many", "silent"):
            charge = await metering.meter.open(
                request_id=name,
                account_id="a",
                key_id="k",
                model="tiny",
                price_id=bank.price.id,
                price=bank.price.price,
                prompt_tokens=20,
                max_completion=500,
                n=2 if name == "many" else 1,
            )
            await charge.durable
            charge.progress(Counters(20, 0, 300, True)) if name == "silent" else None
        done = await metering.meter.open(
            request_id="done",
            account_id="a",
            key_id="k",
            model="tiny",
            price_id=bank.price.id,
            price=bank.price.price,
            prompt_tokens=20,
            max_completion=500,
        )
        await done.settle("finished", COUNTED)
        await metering.journal.flush()
        # The process "dies" here: nothing is ended, and the files are let go as a dead process lets them go.
        metering._sweeper.cancel()  # type: ignore[union-attr]
        await metering.settler.close(0.0)
        await metering.standings.close()
        await asyncio.to_thread(metering.journal.close)

    async def after() -> Metering:
        metering = await Metering.start(
            folder / "journal.sqlite", database, clock=clocks.wall, monotonic=clocks.monotonic
        )
        assert metering.trouble is not None
        assert "starting" in metering.trouble
        metering.note_engine("tiny", engine.epoch)  # the new engine may be there before recovery begins
        await metering.recover(engine)
        assert metering.trouble is None
        assert await metering.close()
        return metering

    asyncio.run(before())
    metering = asyncio.run(after())
    with database.read() as unit:
        report = audit(unit, now=clocks.wall())
        assert report.clean, report.lines()
        assert open_holds(unit) == []
        rows = {row.request_id: row for row in unit.select(usage_record.select())}
    return metering, rows


def test_after_a_crash_the_engine_is_asked_and_every_hold_ends(tmp_path: Path, bank: Any, clocks: Any) -> None:
    engine = Engine(
        "e1",
        {
            "counted": Usage(COUNTED, "stop"),
            "many#0": Usage(Counters(20, 0, 7, True), None),
            "many#1": Usage(Counters(20, 0, 8, True), "stop"),
        },
    )
    metering, rows = crash_and_recover(tmp_path, bank, clocks, engine)
    assert engine.aborted == ["many#0"]
    assert {name: (row.completion, row.source, row.billable) for name, row in rows.items()} == {
        "done": (30, "engine", True),
        "counted": (30, "recovered", False),
        "many": (15, "recovered", False),
        "silent": (300, "checkpoint", False),
    }
    cost = rows["done"].cost
    assert cost > 0
    assert bank.state("a").posted == 10**9 - cost
    assert bank.state("a").held == 0
    assert metering.report.settled == 3
    assert metering.report.voided == 0
    assert metering.report.unbilled_tokens == 50 + 35 + 320


def test_what_the_same_engine_never_saw_is_void(tmp_path: Path, bank: Any, clocks: Any) -> None:
    metering, rows = crash_and_recover(tmp_path, bank, clocks, Engine("e1", {}))
    assert set(rows) == {"done", "silent"}
    assert (metering.report.settled, metering.report.voided) == (1, 2)


@pytest.mark.parametrize("broken", [False, True])
def test_with_a_new_engine_or_none_the_checkpoints_are_settled(
    tmp_path: Path, bank: Any, clocks: Any, broken: bool
) -> None:
    metering, rows = crash_and_recover(tmp_path, bank, clocks, Engine("e2", {}, broken=broken))
    assert {name: row.completion for name, row in rows.items()} == {"done": 30, "counted": 0, "many": 0, "silent": 300}
    assert metering.report == RecoveryReport(metering.report.replayed, 3, 0, 320)
