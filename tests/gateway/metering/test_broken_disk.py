"""What a meter does while its journal cannot be written, and afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.metering import failpoints
from gateway.metering.charge import (
    MeteringUnavailableError,
    SettlementDelayedError,
    Stop,
)
from gateway.metering.journal import JournalUnavailableError
from marketplace.ledger.records import Checkpoint, Extend, Hold, Settle
from tests.gateway.metering.bench import FIRST, Bench, used


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
        await b.broken()
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
        await b.journal.flush()
        assert [(s.outcome, s.billable, s.completion) for s in b.of(Settle)] == [
            ("server_fault", False, 50),
            ("server_fault", False, 60),
        ]
        assert b.available == 10**9
        assert b.meter.stats.settled == 2

    bench(work)


def test_a_lost_extension_is_asked_for_again(bench: Any) -> None:
    async def work(b: Bench) -> None:
        charge = await b.open()
        await charge.durable
        b.break_disk()
        assert charge.progress(used(800)) is None
        await b.broken()
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
