"""The audit of payments can fail: damage that only raw SQL can do, and the checks that it must trip."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from marketplace.ledger import ledger
from marketplace.payments import refunds, service
from marketplace.payments.money import CENT
from marketplace.payments.port import Intent
from marketplace.payments.records import Payment
from marketplace.store.db import WriteUnit
from tests.marketplace.ledger.damage import damage
from tests.marketplace.shop import Shop


@dataclass
class Till:
    """An account with payments of every kind, and their names."""

    shop: Shop
    account: str
    paid: str
    credit: str
    other: str
    pending: str
    given: str
    failed: str


@pytest.fixture
def till(shop: Shop) -> Till:
    account = shop.customer(balance=10 * CENT)
    with shop.database.write() as unit:
        paid, other = _paid(shop, unit, account, 2000), _paid(shop, unit, account, 900)
        pending = _begun(shop, unit, account, 700)
        given = refunds.begin(unit, paid, 500, reason="", now=shop.tick(), random=shop.random)
        refunds.succeed(unit, paid, given.id, "re_1", now=shop.tick(), random=shop.random)
        failed = refunds.begin(unit, paid, 100, reason="", now=shop.tick(), random=shop.random)
        assert refunds.fail(unit, paid, failed.id, now=shop.tick(), random=shop.random)
        assert refunds.take_over(unit, paid, 2000, now=shop.tick(), random=shop.random)
    assert paid.tx_id is not None
    return Till(shop, account, paid.id, paid.tx_id, other.id, pending.id, given.id, failed.id)


def _begun(shop: Shop, unit: WriteUnit, account: str, cents: int) -> Payment:
    return service.begin(
        unit,
        payment_id=shop.new_id(),
        provider="stripe",
        payer_kind="user",
        payer_id="somebody",
        account_id=account,
        created_by=None,
        amount_cents=cents,
        currency="USD",
        save_card=False,
        now=shop.tick(),
    )


def _paid(shop: Shop, unit: WriteUnit, account: str, cents: int) -> Payment:
    begun = _begun(shop, unit, account, cents)
    made = Intent(
        reference=f"pi_{begun.id}", state="succeeded", amount_cents=cents, currency="USD", received_cents=cents
    )
    assert service.apply(unit, begun.id, made, now=shop.tick(), random=shop.random) == "credited"
    found = service.find(unit, begun.id)
    assert found is not None
    return found


def test_the_till_is_in_order(till: Till) -> None:
    report = till.shop.audit()
    assert report.clean, "\n".join(report.lines())
    assert {result.id: result.checked for result in report.results if result.id in ("P1", "P2")} == {"P1": 3, "P2": 1}


# What is done, which of the two checks must report it, and what the report must say.
DAMAGE = {
    "a payment that nobody credited": (
        ["UPDATE payment SET state = 'succeeded' WHERE id = :pending"],
        {"P1"},
        "is succeeded, credited by None",
    ),
    "a payment that was credited and is not made": (
        ["UPDATE payment SET state = 'pending', tx_id = NULL, paid_at = NULL WHERE id = :other"],
        {"P1"},
        "of 900 cents is pending",
    ),
    "a payment for less than was credited": (
        ["UPDATE payment SET amount_cents = 899 WHERE id = :other"],
        {"P1"},
        "posted 9000000000 to its account",
    ),
    "a payment credited by another's transaction": (
        ["UPDATE payment SET tx_id = 'elsewhere' WHERE id = :other"],
        {"P1"},
        "credited by elsewhere",
    ),
    "a payment for another account": (
        ["UPDATE payment SET account_id = 'elsewhere' WHERE id = :other"],
        {"P1"},
        "posted 0 to its account",
    ),
    "a credit of another kind": (["UPDATE ledger_tx SET kind = 'topup' WHERE id = :credit"], {"P1"}, "of kind topup"),
    "a payment that vanished": (["DELETE FROM payment WHERE id = :other"], {"P1"}, "that was not made"),
    "more given back than was paid": (
        ["UPDATE payment SET amount_cents = 1999 WHERE id = :paid"],
        {"P1", "P2"},
        "of 1999 cents is succeeded, 2000 were given back",
    ),
    "what failed counts again": (
        ["UPDATE payment_refund SET state = 'succeeded' WHERE id = :failed"],
        {"P2"},
        "2100 were given back",
    ),
    "what was given back counts as failed": (
        ["UPDATE payment_refund SET state = 'failed' WHERE id = :given"],
        {"P2"},
        "failed, is undone by None",
    ),
    "a refund of less than was taken": (
        ["UPDATE payment_refund SET amount_cents = 499 WHERE id = :given"],
        {"P2"},
        "of 499 cents: transaction",
    ),
    "a write-off that was none": (
        ["UPDATE payment_refund SET written_off = 1 WHERE id = :given"],
        {"P2"},
        "posted -5000000000",
    ),
    "a refund that vanished": (["DELETE FROM payment_refund WHERE id = :given"], {"P2"}, "belongs to no refund"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_reported_by_the_checks_it_concerns(till: Till, name: str) -> None:
    statements, expected, word = DAMAGE[name]
    names = {field: value for field, value in vars(till).items() if any(f":{field}" in part for part in statements)}
    damage(till.shop, *statements, **names)
    report = till.shop.audit()
    assert set(report.failed) & {"P1", "P2"} == expected, "\n".join(report.lines())
    assert word in "\n".join(report.lines())


def test_a_second_credit_of_a_payment_with_the_books_in_order(till: Till) -> None:
    with till.shop.database.write() as unit:
        ledger.post(
            unit,
            tx_id="twice",
            key="payment:twice",
            kind="payment",
            entries=[(till.account, 2000 * CENT), (ledger.CLEARING, -2000 * CENT)],
            now=till.shop.tick(),
        )
    report = till.shop.audit()
    assert report.failed == ("P1",), "\n".join(report.lines())
    assert "transaction payment:twice credits a payment that was not made" in "\n".join(report.lines())
