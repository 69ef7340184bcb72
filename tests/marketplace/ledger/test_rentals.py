"""Meters charge time exactly, and deposits end once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from marketplace.ledger import deposits, rentals
from marketplace.ledger.book import InsufficientFundsError
from marketplace.ledger.ledger import RENTALS, WRITEOFF, payable_account
from marketplace.ledger.money import NANO, MoneyError, round_half_up
from marketplace.ledger.rentals import HOUR_US, Meter
from marketplace.providers import service as providers

if TYPE_CHECKING:
    from tests.marketplace.conftest import Shop

RATE = 7 * NANO + 3
ALONE = ("C3",)
"""These meters are of nothing that is in a table: all else is right."""


def provider(shop: Shop) -> str:
    with shop.database.write() as unit:
        return providers.create(unit, name="acme", now=shop.tick(), random=shop.random).id


def begin(shop: Shop, account: str, owner: str | None, *, exempt: bool = False, free_until: int | None = None) -> int:
    now = shop.tick()
    with shop.database.write() as unit:
        rentals.start(
            unit,
            resource_type="Compute",
            resource_id="i",
            resource_name="trainer",
            account_id=account,
            provider_id=owner,
            share=8000,
            rate=RATE,
            exempt=exempt,
            free_until=free_until,
            now=now,
            random=shop.random,
        )
    return now


def tick(shop: Shop, until: int) -> int:
    with shop.database.write() as unit:
        meter = rentals.running(unit, "i")
        assert meter is not None
        return rentals.tick(unit, meter, until, random=shop.random)


def stop(shop: Shop, until: int) -> int | None:
    with shop.database.write() as unit:
        return rentals.stop(unit, "i", until, random=shop.random)


def _meter(rate: int, per_us: int) -> Meter:
    return Meter(
        id="m",
        resource_type="Compute",
        resource_id="i",
        resource_name="",
        account_id="a",
        provider_id=None,
        share=0,
        rate=rate,
        per_us=per_us,
        exempt=False,
        free_until=None,
        started_at=0,
        metered_to=0,
        stopped_at=None,
        remainder=0,
        charged_us=0,
        charged=0,
        unpaid_since=None,
    )


@settings(max_examples=50)
@given(
    st.integers(0, 10**12),
    st.sampled_from([1, 3, HOUR_US, 30 * 24 * HOUR_US]),
    st.lists(st.integers(0, 10**10), min_size=1, max_size=8),
)
def test_however_often_it_is_ticked_it_charges_its_time_rounded_once(rate: int, per_us: int, steps: list[int]) -> None:
    meter, charged = _meter(rate, per_us), 0
    for number, step in enumerate(steps):
        last = number == len(steps) - 1
        read = rentals.reading(meter, meter.metered_to + step, last=last)
        charged += read.amount
        meter = msgspec.structs.replace(meter, metered_to=meter.metered_to + step, remainder=read.remainder)
    assert charged == round_half_up(rate * sum(steps), per_us)


def test_a_rental_is_paid_to_its_provider_and_the_platform(shop: Shop) -> None:
    account, owner = shop.customer(balance=100 * NANO), provider(shop)
    begun = begin(shop, account, owner)
    assert tick(shop, begun + 61_000_000) == RATE * 61_000_000 // HOUR_US
    assert tick(shop, begun + 61_000_000) == 0, "the same tick again is nothing"
    stop(shop, begun + 3 * HOUR_US // 2)
    assert stop(shop, begun + 2 * HOUR_US) is None
    cost = round_half_up(RATE * 3, 2)
    assert 100 * NANO - shop.posted(account) == cost
    assert shop.posted(payable_account(owner)) + shop.posted(RENTALS) == cost
    assert abs(shop.posted(payable_account(owner)) - cost * 8 // 10) <= 2
    assert shop.audit().failed == ALONE


def test_exempt_and_covered_time_is_counted_and_costs_nothing(shop: Shop) -> None:
    account = shop.customer(balance=NANO)
    begun = begin(shop, account, None, exempt=True)
    stop(shop, begun + HOUR_US)
    assert shop.posted(account) == NANO
    begun = begin(shop, account, None, free_until=begun + 10 * HOUR_US)
    assert tick(shop, begun + HOUR_US) == 0
    with shop.database.write() as unit:
        rentals.cover(unit, "i", begun + HOUR_US)
    stop(shop, begun + HOUR_US + 3_600_000)
    assert NANO - shop.posted(account) == round_half_up(RATE * 3_600_000, HOUR_US)
    assert shop.audit().failed == ALONE


def test_what_an_account_cannot_pay_is_written_off_and_remembered(shop: Shop) -> None:
    account, owner = shop.customer(balance=NANO), provider(shop)
    begun = begin(shop, account, owner)
    tick(shop, begun + HOUR_US)
    assert shop.posted(account) == 0 and shop.posted(WRITEOFF) == -(RATE - NANO)
    with shop.database.read() as unit:
        meter = rentals.running(unit, "i")
        assert meter is not None and meter.unpaid_since == begun + HOUR_US
        assert rentals.rate_of(unit, account, begun) == RATE
    tick(shop, begun + 2 * HOUR_US)
    shop.top_up(account, 100 * NANO)
    tick(shop, begun + 3 * HOUR_US)
    with shop.database.read() as unit:
        meter = rentals.running(unit, "i")
        assert meter is not None and meter.unpaid_since is None
    assert shop.posted(payable_account(owner)) > 2 * RATE
    assert shop.audit().failed == ALONE


def test_a_deposit_is_captured_or_released_once(shop: Shop) -> None:
    account, owner = shop.customer(balance=5 * NANO), provider(shop)
    with shop.database.write() as unit:
        deposits.hold(unit, account, "r1", 3 * NANO, now=shop.tick(), random=shop.random)
        deposits.hold(unit, account, "r2", 2 * NANO, now=shop.tick(), random=shop.random)
    assert shop.state(account).available == 0 and shop.audit().clean
    with pytest.raises(InsufficientFundsError), shop.database.write() as unit:
        deposits.hold(unit, account, "r3", 1, now=shop.tick(), random=shop.random)
    with pytest.raises(MoneyError), shop.database.write() as unit:
        deposits.hold(unit, account, "r3", 0, now=shop.tick(), random=shop.random)
    taken = []
    for _ in range(2):
        with shop.database.write() as unit:
            taken.append(deposits.release(unit, "r2", shop.tick()))
        with shop.database.write() as unit:
            taken.append(
                deposits.capture(
                    unit, "r1", provider_id=owner, share=5000, memo="r", now=shop.tick(), random=shop.random
                )
            )
    assert taken == [2 * NANO, 3 * NANO, 0, 0]
    assert shop.posted(account) == 2 * NANO and shop.posted(payable_account(owner)) == 3 * NANO // 2
    assert shop.audit().clean


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        ("UPDATE rental_meter SET charged = charged + 1", "R1"),
        ("UPDATE rental_meter SET rate = rate + 1", "R1"),
        ("UPDATE rental_meter SET exempt = TRUE", "R1"),
        ("UPDATE deposit SET amount = amount + 1", "R2"),
        ("UPDATE deposit SET state = 'released', tx_id = NULL", "R2"),
    ],
)
def test_the_audit_sees_meters_and_deposits_that_were_altered(shop: Shop, damage: str, found: str) -> None:
    account = shop.customer(balance=100 * NANO)
    begun = begin(shop, account, None)
    stop(shop, begun + HOUR_US)
    with shop.database.write() as unit:
        deposits.hold(unit, account, "r", NANO, now=shop.tick(), random=shop.random)
        deposits.capture(unit, "r", provider_id=None, share=0, memo="", now=shop.tick(), random=shop.random)
    assert shop.audit().failed == ALONE
    with shop.database._writer.begin() as connection:
        connection.execute(text(damage))
    assert shop.audit().failed == (found, *ALONE)
