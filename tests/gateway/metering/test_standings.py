from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.metering.purse import Purses
from gateway.metering.standings import Standings, applied_seq
from marketplace.ledger.apply import apply_batch
from marketplace.ledger.records import Hold

NODE = "gateway-test"


@pytest.mark.parametrize("how", ["refresh", "reload", "load"])
def test_a_reading_that_overtakes_the_settler_counts_nothing_twice(bank: Any, clocks: Any, how: str) -> None:
    """Our hold is applied and money is paid in, and the settler has not said so yet: the reading contains both."""
    bank.customer("a", 100)

    async def main() -> tuple[int, int]:
        purses = Purses()
        standings = Standings(bank.database, NODE, purses, clocks.monotonic)
        await standings.load()
        purse = purses.get("a")
        assert purse is not None
        assert purse.reserve(1, 40)
        assert purse.reserve(2, 10)
        with bank.database.write() as unit:
            apply_batch(unit, NODE, [Hold(1, "r", "a", "k", "tiny", "price-1", 40, 0, 0, clocks.wall())])
        await asyncio.to_thread(bank.top_up, "a", 1_000)
        if how == "reload":
            await standings.reload("a")
        else:
            await getattr(standings, how)()
        await standings.close()
        return purse.posted, purse.held

    assert asyncio.run(main()) == (1_100, 50)
    with bank.database.read() as unit:
        assert applied_seq(unit, NODE) == 1
        assert applied_seq(unit, "another") == 0


def test_one_account_is_not_read_more_often_than_four_times_a_second(bank: Any, clocks: Any) -> None:
    bank.customer("a", 100)

    async def main() -> list[int]:
        purses = Purses()
        standings = Standings(bank.database, NODE, purses, clocks.monotonic)
        seen = []
        for pause in (0, 249_999, 1, 0):
            clocks.pass_us(pause)
            await asyncio.to_thread(bank.top_up, "a", 1)
            await standings.reload("a")
            purse = purses.get("a")
            assert purse is not None
            seen.append(purse.available)
        await standings.close()
        return seen

    assert asyncio.run(main()) == [101, 101, 103, 103]
