"""The process that writes the ledger: what it answers, and that it may be killed at any moment."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from sqlalchemy import func, select

from gateway.metering import clerk as clerks
from gateway.metering.clerk import ClerkError, ProcessClerk, ThreadClerk, serve
from marketplace.ledger.records import Hold, JournalRecord, Settle
from marketplace.ledger.tables import usage_record

BALANCE = 10**9
HELD = 50_000


def requests(first: int, count: int) -> list[JournalRecord]:
    """Holds and settlements of so many requests, numbered from `first`."""
    made: list[JournalRecord] = []
    for number in range(first, first + count):
        request_id, seq = f"r{number}", 2 * number + 1
        made.append(Hold(seq, request_id, "a", "key", "tiny", "price-1", HELD, 10, 1024, at=seq))
        made.append(Settle(seq + 1, request_id, 10, 0, 5, "finished", True, "finished", "engine", "epoch", at=seq + 1))
    return made


@pytest.fixture
def customer(bank: Any) -> Any:
    bank.customer("a", BALANCE)
    return bank


@pytest.fixture(params=[ThreadClerk, ProcessClerk])
def make(request: pytest.FixtureRequest, customer: Any) -> Callable[[], Any]:
    """Makes a clerk of either kind for the journal "n"."""
    if request.param is ThreadClerk:
        return lambda: ThreadClerk(customer.database, "n")
    return lambda: ProcessClerk(customer.database.url, "n")


def used(bank: Any) -> int:
    with bank.database.read() as unit:
        return int(unit.select(select(func.count()).select_from(usage_record)).scalar_one())


def test_batches_are_applied_once_each(make: Callable[[], Any], customer: Any) -> None:
    async def work() -> None:
        clerk = make()
        await clerk.start()
        first = await clerk.apply(requests(0, 3))
        assert (first.applied_seq, first.settled) == (6, 3)
        again = await clerk.apply(requests(0, 3))
        assert (again.applied_seq, again.settled, again.accounts) == (6, 0, {})
        last = await clerk.apply(requests(3, 1))
        assert last.accounts["a"] == customer.state("a")
        await clerk.close()

    asyncio.run(work())
    assert used(customer) == 4


def test_a_killed_process_loses_nothing_and_bills_nothing_twice(customer: Any) -> None:
    """It is killed with a batch in its hands, at other moments each time; every batch is given again until it took."""
    failures = 0

    async def work() -> None:
        nonlocal failures
        clerk = ProcessClerk(customer.database.url, "n")
        await clerk.start()
        for number in range(12):
            batch = requests(number * 20, 20)
            asking = asyncio.ensure_future(clerk.apply(batch))
            for _ in range(number * number):
                await asyncio.sleep(0)
            if number % 2 and clerk.pid is not None:
                os.kill(clerk.pid, signal.SIGKILL)
            while True:
                try:
                    done = await asking
                except ClerkError as error:
                    assert "has gone" in str(error)
                    failures += 1
                    asking = asyncio.ensure_future(clerk.apply(batch))
                else:
                    break
            assert done.applied_seq == 2 * (number * 20 + 20)
        await clerk.close()

    asyncio.run(work())
    assert failures > 0
    assert used(customer) == 240
    assert customer.state("a").held == 0


def test_a_batch_that_cannot_be_applied_is_an_error_and_the_process_goes_on(customer: Any) -> None:
    async def work() -> None:
        clerk = ProcessClerk(customer.database.url, "n")
        falling = list(reversed(requests(0, 1)))
        with pytest.raises(ClerkError, match="LedgerError: journal records must come with strictly rising numbers"):
            await clerk.apply(falling)
        pid = clerk.pid
        assert (await clerk.apply(requests(0, 1))).settled == 1
        assert clerk.pid == pid
        await clerk.close()

    asyncio.run(work())


def test_a_clerk_that_was_cancelled_does_not_take_an_old_answer_for_a_new_one(customer: Any) -> None:
    async def work() -> None:
        clerk = ProcessClerk(customer.database.url, "n")
        await clerk.start()
        asking = asyncio.ensure_future(clerk.apply(requests(0, 1)))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert (await clerk.apply(requests(1, 1))).applied_seq == 4
        await clerk.close()

    asyncio.run(work())


def test_a_process_that_cannot_be_started_is_an_error(customer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clerks, "COMMAND", ("/nonexistent/python",))

    async def work() -> None:
        with pytest.raises(ClerkError, match="cannot be started"):
            await ProcessClerk(customer.database.url, "n").start()

    asyncio.run(work())


def test_the_process_ends_with_its_gateway(customer: Any) -> None:
    """End of input, whole or in the middle of a frame, is the end of the work."""

    def frames() -> Iterator[bytes]:
        yield clerks._frame(msgspec.msgpack.encode(clerks.Post(customer.database.url, "n")))
        yield clerks._frame(msgspec.msgpack.encode(requests(0, 1)))

    whole = b"".join(frames())
    for cut in (0, 2, 20, len(whole) - 3, len(whole)):
        said = io.BytesIO()
        serve(io.BytesIO(whole[:cut]), said)
        assert bool(said.getvalue()) is (cut == len(whole))
    assert used(customer) == 1
