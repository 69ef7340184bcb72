"""Prices and what was metered under them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy.exc import IntegrityError

from marketplace.ledger import meters
from marketplace.ledger.money import MoneyError, Price
from marketplace.ledger.rules import DAY_US, Outcome

if TYPE_CHECKING:
    from tests.marketplace.conftest import Shop


def test_a_new_price_is_a_new_version(shop: Shop) -> None:
    first = shop.price_id
    second = shop.price(5, 6, 7)
    with shop.database.read() as unit:
        current = meters.current_price(unit, "tiny")
        assert current is not None
        assert (current.id, current.number, current.price) == (second, 2, Price(5, 6, 7))
        assert [version.id for version in meters.price_history(unit, "tiny")] == [second, first]
        assert set(meters.prices(unit, [first, second, "none"])) == {first, second}
        assert meters.prices(unit, [first])[first].price == Price(1_000_000, 500_000, 2_000_000)
        assert meters.current_price(unit, "unknown") is None


def test_saying_the_same_price_again_makes_no_version(shop: Shop) -> None:
    assert shop.price(1_000_000, 500_000, 2_000_000) == shop.price_id
    other = shop.price(1_000_000, 500_000, 2_000_001)
    assert shop.price(1_000_000, 500_000, 2_000_000) not in (other, shop.price_id)


def test_models_are_priced_apart(shop: Shop) -> None:
    other = shop.price(1, 1, 1, model="large")
    with shop.database.read() as unit:
        large, tiny = meters.current_price(unit, "large"), meters.current_price(unit, "tiny")
    assert large is not None and tiny is not None
    assert (large.id, large.number, tiny.id) == (other, 1, shop.price_id)


def test_impossible_prices(shop: Shop) -> None:
    with pytest.raises(MoneyError):
        shop.price(-1, 0, 0)
    with shop.database.read() as unit:
        assert len(meters.price_history(unit, "tiny")) == 1


def test_two_versions_cannot_share_a_number(shop: Shop) -> None:
    with pytest.raises(IntegrityError), shop.database.write() as unit:
        meters.set_price(unit, "tiny", 1, 1, 1, version_id=shop.price_id, now=1)
    with shop.database.read() as unit:
        assert len(meters.price_history(unit, "tiny")) == 1


def test_abandoned_prefill_is_counted_by_day(shop: Shop) -> None:
    a = shop.customer(balance=10_000)
    shop.now = 20_000 * DAY_US + 100
    for prompt in (10, 20):
        record = shop.hold(a, 100)
        shop.apply(record, shop.settle(record.request_id, prompt, 0, 0, outcome="disconnected"))
    paid = shop.hold(a, 100)
    shop.apply(paid, shop.settle(paid.request_id, 7, 0, 1, outcome="disconnected"))

    def used(key_id: str, now: int) -> int:
        with shop.database.read() as unit:
            return meters.prefill_allowance_used(unit, key_id, now)

    assert used("key", shop.now) == 30
    assert used("another", shop.now) == 0
    assert used("key", shop.now + DAY_US) == 0


def test_totals(shop: Shop) -> None:
    a = shop.customer(balance=10_000)
    outcomes: tuple[Outcome, ...] = ("finished", "engine_error")
    for outcome in outcomes:
        record = shop.hold(a, 500)
        shop.apply(record, shop.settle(record.request_id, 100, 40, 50, outcome=outcome))
    with shop.database.read() as unit:
        everything = meters.token_totals(unit)
        assert everything == meters.TokenTotals(requests=2, prompt=200, cached=80, completion=100, cost=180)
        assert meters.token_totals(unit, engine_epoch="epoch", model="tiny") == everything
        nothing = meters.TokenTotals(0, 0, 0, 0, 0)
        assert meters.token_totals(unit, engine_epoch="other") == meters.token_totals(unit, model="other") == nothing
