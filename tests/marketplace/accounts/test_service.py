"""Customer accounts: top-ups, credit, refunds, history."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy.exc import IntegrityError

from marketplace.accounts import service as accounts
from marketplace.accounts.service import RefundError
from marketplace.ledger.book import UnknownAccountError
from marketplace.ledger.ledger import CreditInUseError, IdempotencyConflictError, Posted
from marketplace.ledger.money import MoneyError

if TYPE_CHECKING:
    from tests.marketplace.conftest import Shop


def _refund(shop: Shop, request_id: str, amount: int, key: str) -> Posted:
    with shop.database.write() as unit:
        return accounts.refund(unit, request_id, amount, key=key, now=shop.tick(), random=shop.random)


def _charged(shop: Shop, account_id: str) -> str:
    record = shop.hold(account_id, 500)
    shop.apply(record, shop.settle(record.request_id, 100, 0, 50))
    return record.request_id


def test_topping_up_once_for_each_key(shop: Shop) -> None:
    a, b = shop.customer(), shop.customer()
    first = shop.top_up(a, 500, key="k")
    assert not first.replayed
    again = shop.top_up(a, 500, key="k")
    assert (again.replayed, again.tx_id) == (True, first.tx_id)
    for account_id, amount in ((a, 501), (b, 500)):
        with pytest.raises(IdempotencyConflictError):
            shop.top_up(account_id, amount, key="k")
    assert (shop.posted(a), shop.posted(b)) == (500, 0)
    assert shop.audit().clean


@pytest.mark.parametrize("amount", [0, -5, 10**18 + 1])
def test_amounts_that_are_no_top_up(shop: Shop, amount: int) -> None:
    a = shop.customer()
    with pytest.raises(MoneyError):
        shop.top_up(a, amount)
    assert shop.posted(a) == 0


@pytest.mark.parametrize("key", ["", "k" * 129])
def test_keys_that_are_none(shop: Shop, key: str) -> None:
    a = shop.customer()
    with pytest.raises(MoneyError), shop.database.write() as unit:
        accounts.top_up(unit, a, 5, key=key, now=1, random=shop.random)
    assert shop.posted(a) == 0


def test_only_customers_are_topped_up(shop: Shop) -> None:
    shop.customer(balance=5)
    for name in ("nobody", "platform:payments_clearing"):
        with pytest.raises(UnknownAccountError):
            shop.top_up(name, 5)
    assert shop.audit().clean


def test_an_owner_has_one_account(shop: Shop) -> None:
    with shop.database.write() as unit:
        account_id = accounts.open_account(unit, owner_kind="team", owner_id="t", now=1, random=shop.random)
        assert accounts.of_owner(unit, "team", "t") == account_id
        assert accounts.of_owner(unit, "user", "t") is None
    with pytest.raises(IntegrityError), shop.database.write() as unit:
        accounts.open_account(unit, owner_kind="team", owner_id="t", now=2, random=shop.random)


def test_credit(shop: Shop) -> None:
    a = shop.customer()
    with shop.database.write() as unit:
        assert accounts.set_credit_limit(unit, a, 700).available == 700
        assert accounts.set_unlimited(unit, a, True).unlimited
    shop.apply(shop.hold(a, 800))
    with shop.database.write() as unit, pytest.raises(CreditInUseError) as caught:
        accounts.set_unlimited(unit, a, False)
    assert caught.value.minimum == 800
    state = shop.state(a)
    assert (state.credit_limit, state.unlimited, state.held) == (700, True, 800)


def test_refunds_up_to_the_charge_and_no_further(shop: Shop) -> None:
    a = shop.customer(balance=1000)
    request = _charged(shop, a)
    assert shop.posted(a) == 800
    first = _refund(shop, request, 150, "r1")
    assert _refund(shop, request, 150, "r1") == Posted(first.tx_id, replayed=True)
    with pytest.raises(RefundError, match="150 given back"):
        _refund(shop, request, 51, "r2")
    with pytest.raises(IdempotencyConflictError):
        _refund(shop, request, 20, "r1")
    _refund(shop, request, 50, "r3")
    assert shop.posted(a) == 1000
    assert shop.audit().clean


def test_what_was_written_off_is_not_refunded(shop: Shop) -> None:
    a = shop.customer(balance=60)
    record = shop.hold(a, 10)
    shop.apply(record, shop.settle(record.request_id, 100, 0, 0))
    with pytest.raises(RefundError):
        _refund(shop, record.request_id, 61, "r")
    _refund(shop, record.request_id, 60, "r")
    assert shop.posted(a) == 60
    assert shop.audit().clean


def test_what_was_not_charged_is_not_refunded(shop: Shop) -> None:
    a = shop.customer(balance=1000)
    record = shop.hold(a, 10)
    shop.apply(record, shop.settle(record.request_id, 100, 0, 0, outcome="timeout"))
    for request_id in (record.request_id, "none"):
        with pytest.raises(RefundError, match="not charged"):
            _refund(shop, request_id, 1, "r")
    with pytest.raises(MoneyError):
        _refund(shop, record.request_id, 0, "r")
    assert shop.posted(a) == 1000


def test_history_page_by_page(shop: Shop) -> None:
    a, b = shop.customer(), shop.customer()
    for number in range(1, 8):
        shop.top_up(a, number)
        shop.top_up(b, 100)
    with shop.database.read() as unit:
        first = accounts.history(unit, a, limit=3)
        second = accounts.history(unit, a, limit=3, before=first[-1].ordinal)
        third = accounts.history(unit, a, limit=3, before=second[-1].ordinal)
    assert [line.amount for line in (*first, *second, *third)] == [7, 6, 5, 4, 3, 2, 1]
    assert first[0].balance_after == 28
    assert {line.kind for line in first} == {"topup"}
