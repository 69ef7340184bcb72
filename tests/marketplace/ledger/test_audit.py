"""The audit can fail: for every check, damage that only raw SQL can do, and exactly the checks that it must trip.

Guards are taken away for the damage and put back after it, so that only the damage itself is there to be found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text

from marketplace.accounts import service as accounts
from marketplace.ledger import ledger
from marketplace.ledger.audit import CHECKS, audit
from marketplace.ledger.audit_books import refunds_within_charge
from marketplace.ledger.ledger import CLEARING, REFUNDS, revenue_account
from tests.marketplace.ledger.damage import damage
from tests.marketplace.ledger.test_audit_payments import DAMAGE as PAYMENTS

if TYPE_CHECKING:
    from marketplace.store.db import Database
    from tests.marketplace.conftest import MakeDatabase, Shop

REVENUE = revenue_account("tiny")


@dataclass
class Town:
    """A shop with a bit of everything, and the names of what is in it."""

    shop: Shop
    rich: str
    settled: str
    overrun: str
    open: str
    voided: str
    refund: str


COMPUTE = ("R", "C")
"""What checks of rentals and of compute are called: they are seen to fail in tests of their own."""


@pytest.fixture
def town(database: Database, make_shop: Callable[[Database], Shop]) -> Town:
    return _build(make_shop(database))


def _build(shop: Shop) -> Town:
    rich, poor = shop.customer(balance=10_000), shop.customer(balance=100)
    settled, overrun, voided = shop.hold(rich, 500), shop.hold(poor, 100), shop.hold(rich, 5)
    shop.apply(settled, overrun, voided, shop.void(voided.request_id))
    shop.apply(shop.settle(settled.request_id, 100, 40, 50), shop.settle(overrun.request_id, 250, 0, 0))
    later = shop.price(3_000_000, 3_000_000, 3_000_000)
    still_open = shop.hold(rich, 700, price_id=later)
    shop.apply(still_open)
    with shop.database.write() as unit:
        refund = accounts.refund(unit, settled.request_id, 30, key="sorry", now=shop.tick(), random=shop.random).tx_id
    return Town(shop, rich, settled.request_id, overrun.request_id, still_open.request_id, voided.request_id, refund)


def test_the_town_is_in_order(town: Town) -> None:
    report = town.shop.audit()
    assert report.clean, "\n".join(report.lines())
    assert {result.id: result.checked for result in report.results if not result.id.startswith(COMPUTE)} == {
        "I1": 5,
        "I2": 6,
        "I3": 6,
        "I4": 2,
        "I5": 2,
        "I6": 4,
        "I7": 2,
        "I9": 2,
        "I10": 6,
        "I11": 14 if town.shop.database.dialect == "sqlite" else 15,
        "I12": 4,
        "I13": 6,
        "I14": 3,
        "I19": 1,
        "I20": 2,
        "I21": 5,
        "P1": 0,
        "P2": 0,
        "J1": 0,
        "I6d": 1,
    }


# What is done, the checks that must report it and no others, and a word that the report must contain.
DAMAGE = {
    "an amount": (
        ["UPDATE entry SET amount = amount + 1 WHERE account_id = :rich AND ordinal = 1"],
        {"I1", "I2", "I12", "I21"},
        "topup:",
    ),
    "a lost leg": (["DELETE FROM entry WHERE tx_id = :refund AND amount < 0"], {"I1", "I2", "I12"}, "refund:sorry"),
    "a balance made up": (["UPDATE account SET posted = posted + 5 WHERE id = :rich"], {"I2", "I13"}, "sum to 5"),
    "a balance moved": (
        [
            "UPDATE account SET posted = posted + 5 WHERE id = :rich",
            f"UPDATE account SET posted = posted - 5 WHERE id = '{CLEARING}'",
        ],
        {"I2"},
        ":rich",
    ),
    "what was spent": (["UPDATE account SET spent = spent + 5 WHERE id = :rich"], {"I20"}, "spent "),
    "a balance after": (
        ["UPDATE entry SET balance_after = balance_after + 1 WHERE account_id = :rich AND ordinal = 2"],
        {"I2", "I12"},
        "after entry 2 is off by -1",
    ),
    "an ordinal": (
        ["UPDATE entry SET ordinal = ordinal + 5 WHERE account_id = :rich AND ordinal = 3"],
        {"I2", "I12", "I21"},
        "last is 8",
    ),
    "held money": (["UPDATE account SET held = held + 1 WHERE id = :rich"], {"I3"}, "holds 701"),
    "a hold's amount": (["UPDATE hold SET amount = amount - 1 WHERE request_id = :open"], {"I3"}, "sum to 699"),
    "a limit": (
        [
            "UPDATE hold SET amount = 10000, asked = 10000 WHERE request_id = :open",
            "UPDATE account SET held = 10000 WHERE id = :rich",
        ],
        {"I4"},
        "150 below its limit",
    ),
    "a charge under another key": (
        ["UPDATE ledger_tx SET idempotency_key = 'usage:other' WHERE id = :settled"],
        {"I5", "I12"},
        "usage:other",
    ),
    "a second charge, the books in order": (
        [
            "INSERT INTO ledger_tx SELECT 'twice', 'usage:twice', input_hash, kind, occurred_at, refers_to, memo, "
            "node, batch FROM ledger_tx WHERE id = :settled",
            "INSERT INTO entry SELECT 'twice', 0, id, -180, posted - 180, entries + 1 FROM account WHERE id = :rich",
            "INSERT INTO entry SELECT 'twice', 1, id, 180, posted + 180, entries + 1 "
            f"FROM account WHERE id = '{REVENUE}'",
            "UPDATE account SET posted = posted - 180, entries = entries + 1 WHERE id = :rich",
            f"UPDATE account SET posted = posted + 180, entries = entries + 1 WHERE id = '{REVENUE}'",
        ],
        {"I5", "I12", "I14", "I20", "I21"},
        "usage:twice charges for no usage record",
    ),
    "a charge that vanished": (
        ["DELETE FROM entry WHERE tx_id = :settled", "DELETE FROM ledger_tx WHERE id = :settled"],
        {"I2", "I5", "I12", "I14", "I19", "I20", "I21"},
        "under key None",
    ),
    "a usage record that vanished": (
        [
            "DELETE FROM usage_record WHERE request_id = :settled",
            "UPDATE hold SET state = 'voided' WHERE request_id = :settled",
        ],
        {"I5", "I12", "I14", "I21"},
        "charges for no usage record",
    ),
    "a hold's end": (["UPDATE hold SET state = 'voided' WHERE request_id = :settled"], {"I6"}, "is voided"),
    "a usage record without its hold": (["DELETE FROM hold WHERE request_id = :settled"], {"I6"}, "has no hold"),
    "a hold that ended unsettled": (
        ["UPDATE hold SET state = 'settled' WHERE request_id = :voided"],
        {"I6"},
        "is settled",
    ),
    "somebody else's usage": (
        ["UPDATE usage_record SET key_id = 'another' WHERE request_id = :settled"],
        {"I6", "I12", "I21"},
        "another account, key",
    ),
    "an overrun that nobody flagged": (
        [f"UPDATE usage_record SET overrun = {'{false}'} WHERE request_id = :overrun"],
        {"I7", "I12"},
        "not flagged",
    ),
    "an overrun that was none": (
        [f"UPDATE usage_record SET overrun = {'{true}'} WHERE request_id = :settled"],
        {"I7", "I12"},
        ", flagged",
    ),
    "a token": (
        ["UPDATE usage_record SET completion = completion + 1 WHERE request_id = :settled"],
        {"I9", "I12", "I21"},
        "cost 180 recorded, 182 follows",
    ),
    "impossible counters": (
        ["UPDATE usage_record SET cached = prompt + 1 WHERE request_id = :settled"],
        {"I9", "I12", "I21"},
        "impossible counters",
    ),
    "an outcome": (
        ["UPDATE usage_record SET outcome = 'gift' WHERE request_id = :settled"],
        {"I9", "I12"},
        "unknown outcome 'gift'",
    ),
    "a price that requests ran under": (
        ["UPDATE price_version SET prompt = prompt * 2 WHERE number = 1"],
        {"I9", "I10"},
        "was altered",
    ),
    "a price": (["UPDATE price_version SET completion = 1 WHERE number = 2"], {"I10"}, "was altered"),
    "a price's number": (["UPDATE price_version SET number = 3 WHERE number = 2"], {"I10"}, "without a gap: [1, 3]"),
    "the price of a running request": (
        ["UPDATE hold SET price_id = (SELECT id FROM price_version WHERE number = 1) WHERE request_id = :open"],
        {"I10"},
        "altered since it was opened",
    ),
    "the price of a settled request": (
        [
            "UPDATE usage_record SET price_id = (SELECT id FROM price_version WHERE number = 2) "
            "WHERE request_id = :settled"
        ],
        {"I9", "I10", "I12"},
        "and settled at",
    ),
    "a memo": (["UPDATE ledger_tx SET memo = 'x' WHERE id = :refund"], {"I12", "I21"}, "is not what was posted"),
    "a timing": (
        ["UPDATE usage_record SET ttft_us = 1 WHERE request_id = :settled"],
        {"I12"},
        "is not what was posted",
    ),
    "a line of a statement": (
        ["UPDATE statement_line SET amount = amount + 1 WHERE account_id = :rich AND requests > 0"],
        {"I21"},
        "says what its entries do not",
    ),
    "a line that vanished": (
        ["DELETE FROM statement_line WHERE account_id = :rich AND tx_id = :refund"],
        {"I21"},
        "is missing or says otherwise",
    ),
    "a batch": (["UPDATE batch SET records = 0 WHERE node = 'gateway-1'"], {"I12"}, "batch 1 of gateway-1"),
    "a batch that vanished": (
        ["DELETE FROM batch WHERE node = 'ledger' AND number = 2"],
        {"I12"},
        "batch 3 of ledger does not follow batch 1",
    ),
    "the last batch": (["DELETE FROM batch WHERE node = 'gateway-1'"], {"I12"}, "does not end with its last batch, 0"),
    "what was applied": (["UPDATE chain SET applied_seq = 1 WHERE node = 'gateway-1'"], {"I12"}, "but says 1"),
    "a chain": (["DELETE FROM chain WHERE node = 'gateway-1'"], {"I12"}, "the chain of gateway-1"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_reported_by_the_checks_it_concerns(town: Town, name: str) -> None:
    statements, expected, word = DAMAGE[name]
    truth = ("1", "0") if town.shop.database.dialect == "sqlite" else ("true", "false")
    ready = [part.replace("{true}", truth[0]).replace("{false}", truth[1]) for part in statements]
    names = {field: getattr(town, field) for field in ("rich", "settled", "overrun", "open", "voided", "refund")}
    used = {field: value for field, value in names.items() if any(f":{field}" in part for part in ready)}
    damage(town.shop, *ready, **used)
    report = town.shop.audit()
    assert set(report.failed) == expected, "\n".join(report.lines())
    lines = "\n".join(report.lines())
    assert (names["rich"] if word == ":rich" else word) in lines
    assert "WRONG" in lines and not report.clean


@pytest.mark.parametrize("change", ["update", "delete"])
def test_a_missing_guard(make_database: MakeDatabase, make_shop: Callable[[Database], Shop], change: str) -> None:
    town = _build(make_shop(make_database()))
    on = " ON entry" if town.shop.database.dialect == "postgresql" else ""
    with town.shop.database._writer.begin() as connection:
        connection.execute(text(f"DROP TRIGGER entry_refuse_{change}{on}"))
    report = town.shop.audit()
    assert report.failed == ("I11",)
    assert f"trigger entry_refuse_{change} is missing" in "\n".join(report.lines())


def test_a_disabled_guard(make_database: MakeDatabase, make_shop: Callable[[Database], Shop]) -> None:
    town = _build(make_shop(make_database()))
    if town.shop.database.dialect == "postgresql":
        with town.shop.database._writer.begin() as connection:
            connection.execute(text("ALTER TABLE entry DISABLE TRIGGER entry_refuse_imbalance"))
        assert town.shop.audit().failed == ("I11",)
    else:
        assert town.shop.audit().clean  # SQLite cannot disable a trigger


def test_a_refund_beyond_its_charge(town: Town) -> None:
    shop = town.shop
    with shop.database.write() as unit:
        ledger.post(
            unit,
            tx_id="generous",
            key="refund:generous",
            kind="refund",
            entries=[(town.rich, 151), (REFUNDS, -151)],
            now=shop.tick(),
            refers_to=town.settled,
        )
    report = shop.audit()
    assert report.failed == ("I19",)
    assert "took 180, refunds gave back 181" in "\n".join(report.lines())
    with shop.database.read() as unit:
        assert refunds_within_charge(unit).count == 1


def test_a_record_that_could_not_be_applied(town: Town) -> None:
    town.shop.apply(town.shop.void("ghost"))
    report = town.shop.audit()
    assert report.failed == ("J1",)
    assert "request ghost" in "\n".join(report.lines())


def test_a_hold_past_its_deadline(town: Town) -> None:
    shop = town.shop
    assert shop.audit().clean
    shop.now += 24 * 3_600_000_000 + 60_000_000 + 2
    report = shop.audit()
    assert report.failed == ("I6d",)
    assert town.open in "\n".join(report.lines())
    with shop.database.read() as unit:
        assert audit(unit).clean  # without a time, deadlines are not judged


def test_every_check_is_seen_to_fail() -> None:
    damages = [*DAMAGE.values(), *PAYMENTS.values()]
    seen = set().union(*(expected for _, expected, _ in damages)) | {"I11", "I19", "J1"}
    assert seen == {name for name in CHECKS if not name.startswith(COMPUTE)}


def test_many_findings_are_counted_and_the_first_are_kept(town: Town) -> None:
    shop = town.shop
    shop.apply(*(shop.void(f"ghost-{number}") for number in range(60)))
    result = next(result for result in shop.audit().results if result.id == "J1")
    assert (result.failures, len(result.findings)) == (60, 50)
