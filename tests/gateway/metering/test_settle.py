from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from gateway.metering import failpoints
from gateway.metering.clerk import ThreadClerk
from gateway.metering.journal import Journal
from gateway.metering.purse import Purses
from gateway.metering.settle import BATCH_RECORDS, Settler
from marketplace.ledger.ledger import account_states
from marketplace.ledger.records import Hold, JournalRecord, Settle
from marketplace.ledger.tables import chain, usage_record


def request(first: int, name: str, account: str = "a") -> list[JournalRecord]:
    """A hold of 50,000 nano-units and a settlement of 10 prompt and 5 generated tokens (30,000)."""
    return [
        Hold(first, name, account, "k", "tiny", "price-1", 50_000, 10, 10, first),
        Settle(first + 1, name, 10, 0, 5, "finished", True, "completed", "engine", "e", first + 1),
    ]


@pytest.fixture
def run(tmp_path: Path, bank: Any, clocks: Any) -> Callable[..., Any]:
    """run(work) gives `work` a settler, its purses and its journal over a ledger with a customer of 10^9."""
    bank.customer("a", 10**9)

    def go(work: Callable[[Settler, Purses, Journal], Awaitable[Any]], **limits: int) -> Any:
        async def main() -> Any:
            journal = Journal.open(tmp_path / "journal.sqlite")
            journal.start(asyncio.get_running_loop())
            purses = Purses()
            with bank.database.read() as unit:
                purses.refresh(account_states(unit), 0)
            settler = Settler(journal, purses, ThreadClerk(bank.database, journal.node), clocks.monotonic, **limits)
            journal.on_commit = settler.receive
            try:
                return await work(settler, purses, journal)
            finally:
                await settler.close(1.0)
                await asyncio.to_thread(journal.close)

        return asyncio.run(main())

    return go


async def append(journal: Journal, purses: Purses, count: int) -> None:
    """Hold and settle `count` requests, with their effects on the purse."""
    purse = purses.get("a")
    assert purse is not None
    for _ in range(count):
        hold, settle = request(journal.next_seq, f"r{journal.next_seq}")
        assert purse.reserve(hold.seq, 50_000)
        journal.append_nowait(hold)
        purse.end_hold(settle.seq, 50_000, 30_000)
        journal.append_nowait(settle)
    await journal.flush()


def test_the_journal_arrives_in_the_ledger_and_leaves_the_journal(run: Any, bank: Any) -> None:
    async def work(settler: Settler, purses: Purses, journal: Journal) -> None:
        await settler.start()
        await append(journal, purses, 3)
        await settler.reached(6)
        purse = purses.get("a")
        assert purse is not None
        assert purse.standing.posted == purse.posted == 10**9 - 90_000
        assert (settler.stats.settled, settler.stats.records, settler.lag_records) == (3, 6, 0)
        await append(journal, purses, 1)
        await settler.reached(8)

    run(work)
    assert bank.state("a").posted == 10**9 - 120_000
    assert bank.state("a").held == 0


def test_batches_are_bounded(run: Any) -> None:
    async def work(settler: Settler, purses: Purses, journal: Journal) -> None:
        await append(journal, purses, 400)
        await settler.start()
        await settler.reached(800)
        assert settler.stats.batches == -(-800 // BATCH_RECORDS)

    run(work)


def test_a_batch_applied_twice_changes_nothing(run: Any, bank: Any) -> None:
    """The transaction committed, but the answer was lost."""

    async def work(settler: Settler, purses: Purses, journal: Journal) -> None:
        def lose_answer() -> None:
            failpoints.disarm()
            raise OperationalError("COMMIT", {}, ConnectionError("connection lost"))

        failpoints.arm("settler.after_apply", lose_answer)
        await settler.start()
        await append(journal, purses, 2)
        await settler.reached(4)
        purse = purses.get("a")
        assert purse is not None
        assert (purse.posted, purse.held) == (10**9 - 60_000, 0)
        assert settler.stats.failures == 1
        assert settler.failure is None

    run(work)
    assert bank.state("a").posted == 10**9 - 60_000


def test_an_unavailable_ledger_delays_and_is_reported_when_it_lasts(run: Any, bank: Any, clocks: Any) -> None:
    async def work(settler: Settler, purses: Purses, journal: Journal) -> None:
        tries = 0
        loop, tired = asyncio.get_running_loop(), asyncio.Event()

        def locked() -> None:
            nonlocal tries
            tries += 1
            clocks.pass_us(4_000_000)
            if tries == 3:  # the ones before have said why
                loop.call_soon_threadsafe(tired.set)
            raise OperationalError("BEGIN IMMEDIATE", {}, ConnectionError("database is locked"))

        failpoints.arm("settler.before_apply", locked)
        await settler.start()
        await append(journal, purses, 1)
        assert settler.trouble() is None
        await tired.wait()
        assert "database is locked" in str(settler.trouble())
        failpoints.disarm()
        await settler.reached(2)
        assert settler.trouble() is None

    run(work)
    assert bank.state("a").posted == 10**9 - 30_000


def test_a_ledger_too_many_records_behind_is_trouble(run: Any) -> None:
    async def work(settler: Settler, purses: Purses, journal: Journal) -> None:
        await append(journal, purses, 5)
        assert settler.lag_records == 10
        assert settler.trouble() is None
        await append(journal, purses, 1)
        assert "12 records behind" in str(settler.trouble())

    run(work, lag_limit_records=10)


def test_what_is_not_applied_at_the_end_is_left_for_the_next_start(run: Any, bank: Any) -> None:
    async def work(settler: Settler, purses: Purses, journal: Journal) -> bool:
        def locked() -> None:
            raise OperationalError("BEGIN IMMEDIATE", {}, ConnectionError("database is locked"))

        failpoints.arm("settler.before_apply", locked)
        await settler.start()
        await append(journal, purses, 2)
        return await settler.close(0.05)

    assert run(work) is False
    failpoints.disarm()
    assert bank.state("a").posted == 10**9

    async def next_start(settler: Settler, purses: Purses, journal: Journal) -> None:
        assert journal.next_seq == 5

    run(next_start)


def test_replaying_any_part_again_leaves_the_same_ledger(run: Any, bank: Any) -> None:
    records = [record for number in range(6) for record in request(2 * number + 1, f"r{number}")]

    async def work(settler: Settler, purses: Purses, journal: Journal) -> None:
        await settler.replay(records[:5])
        await settler.replay(records[2:9])
        await settler.replay(records)
        await settler.replay(records[4:])
        assert settler.applied_seq == 12

    run(work)
    assert bank.state("a").posted == 10**9 - 6 * 30_000
    with bank.database.read() as unit:
        assert len(unit.select(usage_record.select()).all()) == 6
        assert [row.applied_seq for row in unit.select(chain.select()) if row.node != "ledger"] == [12]


def test_a_record_that_contradicts_the_ledger_is_counted_and_stops_nobody(run: Any, bank: Any) -> None:
    async def work(settler: Settler, purses: Purses, journal: Journal) -> None:
        _, orphan = request(0, "never-held")
        await settler.replay([orphan, *request(2, "good")])
        assert settler.stats.quarantined == 1
        assert settler.stats.settled == 1

    run(work)
    assert bank.state("a").posted == 10**9 - 30_000
