"""Accounts and transactions: double entry, exactly once, never beyond what an account may."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import func, select

from marketplace.ledger import ledger
from marketplace.ledger.book import AccountState, InsufficientFundsError, LedgerError, UnknownAccountError
from marketplace.ledger.ledger import CLEARING, WRITEOFF, CreditInUseError, IdempotencyConflictError, Posted
from marketplace.ledger.money import MAX_AMOUNT, MoneyError
from marketplace.ledger.tables import entry, ledger_tx

if TYPE_CHECKING:
    from tests.marketplace.conftest import Shop


def _post(shop: Shop, key: str, *entries: tuple[str, int], kind: str = "correction", memo: str = "") -> Posted:
    with shop.database.write() as unit:
        return ledger.post(unit, tx_id=shop.new_id(), key=key, kind=kind, entries=entries, now=shop.tick(), memo=memo)


def _counts(shop: Shop) -> tuple[int, int]:
    with shop.database.read() as unit:
        txs = unit.select(select(func.count()).select_from(ledger_tx)).scalar_one()
        entries = unit.select(select(func.count()).select_from(entry)).scalar_one()
    return txs, entries


def test_a_transaction_moves_money_and_says_the_balance_after_it(shop: Shop) -> None:
    a, b = shop.customer(balance=1000), shop.customer()
    _post(shop, "k", (a, -300), (b, 200), (WRITEOFF, 100))
    assert (shop.posted(a), shop.posted(b), shop.posted(WRITEOFF), shop.posted(CLEARING)) == (700, 200, 100, -1000)
    with shop.database.read() as unit:
        rows = unit.select(select(entry).where(entry.c.account_id == a).order_by(entry.c.ordinal)).all()
    assert [(row.ordinal, row.amount, row.balance_after) for row in rows] == [(1, 1000, 1000), (2, -300, 700)]
    assert shop.audit().clean


def test_the_same_key_posts_once(shop: Shop) -> None:
    a, b = shop.customer(balance=1000), shop.customer()
    first = _post(shop, "k", (a, -300), (b, 300), memo="rent")
    again = _post(shop, "k", (a, -300), (b, 300), memo="rent")
    assert (first.replayed, again.replayed) == (False, True)
    assert first.tx_id == again.tx_id
    assert shop.posted(b) == 300
    assert shop.audit().clean


@pytest.mark.parametrize("change", ["amount", "account", "kind", "memo", "order"])
def test_the_same_key_for_something_else_is_refused(shop: Shop, change: str) -> None:
    a, b, c = shop.customer(balance=1000), shop.customer(), shop.customer()
    _post(shop, "k", (a, -300), (b, 300))
    before = shop.dump()
    entries = {"amount": [(a, -301), (b, 301)], "account": [(a, -300), (c, 300)], "order": [(b, 300), (a, -300)]}
    with pytest.raises(IdempotencyConflictError, match="'k'"):
        _post(
            shop,
            "k",
            *entries.get(change, [(a, -300), (b, 300)]),
            kind="other" if change == "kind" else "correction",
            memo="other" if change == "memo" else "",
        )
    assert shop.dump() == before


@pytest.mark.parametrize("amounts", [(), (5,), (5, -4), (5, 0, -5)])
def test_what_does_not_balance_is_refused(shop: Shop, amounts: tuple[int, ...]) -> None:
    a = shop.customer(balance=1000)
    before = shop.dump()
    with pytest.raises(LedgerError):
        _post(shop, "k", *((a, amount) for amount in amounts))
    assert shop.dump() == before


def test_unknown_accounts_are_refused(shop: Shop) -> None:
    a = shop.customer(balance=1000)
    before = shop.dump()
    with pytest.raises(UnknownAccountError):
        _post(shop, "k", (a, -1), ("nobody", 1))
    with pytest.raises(LedgerError, match="not one of the platform's"):
        _post(shop, "k", (a, -1), ("platform:holiday", 1))
    assert shop.dump() == before


@pytest.mark.parametrize(
    ("limit", "unlimited", "amount", "allowed"),
    [
        (0, False, 1000, True),
        (0, False, 1001, False),
        (50, False, 1050, True),
        (50, False, 1051, False),
        (0, True, 10**9, True),
    ],
)
def test_an_account_spends_what_it_may(shop: Shop, limit: int, unlimited: bool, amount: int, allowed: bool) -> None:
    a, b = shop.customer(balance=1000, credit_limit=limit, unlimited=unlimited), shop.customer()
    if allowed:
        _post(shop, "k", (a, -amount), (b, amount))
        assert shop.posted(a) == 1000 - amount
    else:
        with pytest.raises(InsufficientFundsError) as caught:
            _post(shop, "k", (a, -amount), (b, amount))
        assert (caught.value.account_id, caught.value.needed, caught.value.available) == (a, amount, 1000 + limit)
        assert shop.posted(a) == 1000
    assert shop.audit().clean


def test_what_is_held_cannot_be_spent_elsewhere(shop: Shop) -> None:
    a, b = shop.customer(balance=1000), shop.customer()
    shop.apply(shop.hold(a, 600))
    with pytest.raises(InsufficientFundsError):
        _post(shop, "k", (a, -401), (b, 401))
    _post(shop, "k", (a, -400), (b, 400))
    assert shop.state(a).available == 0
    assert shop.audit().clean


def test_amounts_have_bounds(shop: Shop) -> None:
    a = shop.customer()
    with pytest.raises(MoneyError):
        shop.top_up(a, MAX_AMOUNT + 1)
    shop.top_up(a, MAX_AMOUNT)
    with pytest.raises(LedgerError, match="leave its range"):
        shop.top_up(a, 1)
    assert shop.posted(a) == MAX_AMOUNT


def test_credit_can_be_given_and_taken_back_while_it_is_not_used(shop: Shop) -> None:
    a, b = shop.customer(balance=1000), shop.customer()

    def set_credit(limit: int | None = None, unlimited: bool | None = None) -> None:
        with shop.database.write() as unit:
            ledger.set_credit(unit, a, credit_limit=limit, unlimited=unlimited)

    set_credit(limit=500)
    assert shop.state(a).available == 1500
    _post(shop, "k", (a, -1200), (b, 1200))
    with pytest.raises(CreditInUseError) as caught:
        set_credit(limit=199)
    assert caught.value.minimum == 200
    set_credit(limit=200)
    set_credit(unlimited=True)
    _post(shop, "k2", (a, -5000), (b, 5000))
    with pytest.raises(CreditInUseError):
        set_credit(unlimited=False)
    state = shop.state(a)
    assert (state.unlimited, state.credit_limit, state.posted) == (True, 200, -5200)
    for limit in (-1, MAX_AMOUNT + 1):
        with pytest.raises(MoneyError):
            set_credit(limit=limit)
    assert shop.audit().clean


def test_platform_accounts_have_no_credit(shop: Shop) -> None:
    shop.customer(balance=1)
    with pytest.raises(UnknownAccountError), shop.database.write() as unit:
        ledger.set_credit(unit, CLEARING, credit_limit=5)
    with pytest.raises(MoneyError), shop.database.write() as unit:
        ledger.open_account(unit, "x", owner_kind="user", owner_id="u", now=1, credit_limit=-1)
    with shop.database.read() as unit:
        assert CLEARING not in ledger.account_states(unit)


def test_changes_by_hand_are_announced_those_of_the_journal_are_not(shop: Shop) -> None:
    a, b = shop.customer(balance=1000), shop.customer()

    def changes(since: int) -> tuple[int, dict[str, AccountState]]:
        with shop.database.read() as unit:
            return ledger.changed_since(unit, since)

    shop.top_up(a, 1)
    epoch, all_of_them = changes(0)
    assert set(all_of_them) == {a, b}
    assert changes(epoch) == (epoch, {})
    shop.apply(shop.hold(a, 600))
    assert changes(epoch) == (epoch, {})
    shop.top_up(b, 70)
    later, changed = changes(epoch)
    assert later > epoch
    assert changed == {b: shop.state(b)}


def test_every_change_of_an_account_has_a_new_version(shop: Shop) -> None:
    a = shop.customer()
    versions = [shop.state(a).version]
    shop.top_up(a, 1000, key="k")
    versions.append(shop.state(a).version)
    hold = shop.hold(a, 10)
    shop.apply(hold)
    versions.append(shop.state(a).version)
    shop.apply(shop.void(hold.request_id))
    versions.append(shop.state(a).version)
    with shop.database.write() as unit:
        ledger.set_credit(unit, a, credit_limit=5)
    versions.append(shop.state(a).version)
    assert versions == sorted(set(versions))
    shop.top_up(a, 1000, key="k")
    assert shop.state(a).version == versions[-1]


def test_eight_threads_post_and_nothing_is_lost(shop: Shop) -> None:
    customers = [shop.customer(balance=10_000) for _ in range(4)]
    problems: list[Exception] = []
    ids = [[shop.new_id() for _ in range(10)] for _ in range(8)]

    def work(number: int) -> None:
        try:
            for turn, tx_id in enumerate(ids[number]):
                a, b = customers[(number + turn) % 4], customers[(number + turn + 1 + number % 2) % 4]
                # Two threads use each key: one of them posts, the other finds it posted.
                shop.database.transact(
                    lambda unit, a=a, b=b, turn=turn, tx_id=tx_id: ledger.post(  # type: ignore[misc]
                        unit,
                        tx_id=tx_id,
                        key=f"move:{number}:{turn}",
                        kind="correction",
                        entries=[(a, -7), (b, 7)],
                        now=turn,
                    )
                )
                shop.database.transact(
                    lambda unit, turn=turn, tx_id=tx_id: ledger.post(  # type: ignore[misc]
                        unit,
                        tx_id=tx_id + "x",
                        key=f"shared:{number // 2}:{turn}",
                        kind="correction",
                        entries=[(customers[0], -1), (customers[1], 1)],
                        now=turn,
                    )
                )
        except Exception as error:  # whatever it was, the main thread reports it
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert _counts(shop) == (4 + 80 + 40, 2 * (4 + 80 + 40))
    assert sum(shop.posted(customer) for customer in customers) == 40_000
    assert shop.audit().clean
