"""Pages of transactions while the ledger writes: what was there is on them once, whatever comes meanwhile."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from marketplace.accounts import statement

if TYPE_CHECKING:
    from marketplace.accounts.statement import Line
    from marketplace.http.pagination import Position
    from tests.marketplace.shop import Shop

SECOND = 1_000_000


def lines(shop: Shop, account_id: str) -> list[Line]:
    """Everything on one page."""
    with shop.database.read() as unit:
        return statement.page(unit, account_id, since=None, until=None, position=None, limit=1000)[0]


def settle(shop: Shop, account_id: str, requests: int) -> None:
    """One batch of one key and model."""
    held = [shop.hold(account_id, 10**6) for _ in range(requests)]
    ends = [shop.settle(hold.request_id, 7, 0, 3) for hold in held]
    shop.apply(*held, *ends)


def test_pages_lose_nothing_and_repeat_nothing_while_others_write(shop: Shop) -> None:
    mine = shop.customer(balance=10**12)
    for number in range(30):
        settle(shop, mine, 1 + number % 3)
        shop.top_up(mine, 1 + number)
    there = lines(shop, mine)
    assert len(there) == 61
    turned, stop = threading.Semaphore(0), threading.Event()

    def write() -> None:
        while not stop.is_set():
            settle(shop, mine, 2)
            shop.top_up(mine, 5)
            turned.release()

    writer = threading.Thread(target=write)
    writer.start()
    found: list[Line] = []
    position: Position | None = None
    try:
        while True:
            assert turned.acquire(timeout=20), "the writer stopped"
            with shop.database.read() as unit:
                some, position = statement.page(unit, mine, since=None, until=None, position=position, limit=4)
            found += some
            if position is None:
                break
    finally:
        stop.set()
        writer.join(20)
    numbers = [line.tx_id for line in found]
    assert len(set(numbers)) == len(numbers)
    assert [line for line in found if line in there] == there
    assert shop.audit().clean


def test_what_is_entered_late_takes_its_place_and_disturbs_no_page(shop: Shop) -> None:
    mine = shop.customer(balance=10**12)
    start = shop.now
    for number in range(1, 9):
        shop.now = start + number * SECOND
        settle(shop, mine, 1)
    there = lines(shop, mine)
    with shop.database.read() as unit:
        first, position = statement.page(unit, mine, since=None, until=None, position=None, limit=4)
    for late in (7, 2):  # before and behind where the next page begins
        shop.now = start + late * SECOND + SECOND // 2
        settle(shop, mine, 3)
    with shop.database.read() as unit:
        rest, end = statement.page(unit, mine, since=None, until=None, position=position, limit=100)
    assert end is None
    both = first + rest
    assert [line for line in both if line in there] == there
    (entered,) = [line for line in both if line not in there]
    assert entered.usage is not None and entered.usage.requests == 3
    assert [line.at for line in both] == sorted((line.at for line in both), reverse=True)
    now = lines(shop, mine)
    assert len(now) == len(there) + 2 and [line.at for line in now] == sorted((line.at for line in now), reverse=True)
    assert shop.audit().clean


def test_ranges_that_touch_share_no_line_and_lose_none(shop: Shop) -> None:
    mine = shop.customer(balance=10**12)
    for number in range(12):
        settle(shop, mine, 1 + number % 4)
    whole = lines(shop, mine)
    with shop.database.read() as unit:
        for middle in range(whole[-1].at - 1, whole[0].at + 2):
            older, _ = statement.page(unit, mine, since=None, until=middle, position=None, limit=100)
            newer, _ = statement.page(unit, mine, since=middle, until=None, position=None, limit=100)
            assert newer + older == whole
