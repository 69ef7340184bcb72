"""Accounts through the API: exact money, usage summed per batch, pages that add up, and admins' corrections."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from marketplace.ledger.audit import audit

if TYPE_CHECKING:
    from tests.marketplace.conftest import Answer, Caller, Office, Shop

NANO_IN_CENT = 10**7


def pages(office: Office, name: str, who: Caller, **body: Any) -> list[dict[str, Any]]:
    """Every transaction, page by page."""
    found: list[dict[str, Any]] = []
    for _ in range(100):
        answer = office.ask(name, body, who)
        assert answer.status == 200, answer.body
        found += answer.body["transactions"]
        if answer.body["next_cursor"] is None:
            return found
        body["cursor"] = answer.body["next_cursor"]
    raise AssertionError("the pages do not end")


def use(shop: Shop, who: Caller, *tokens: tuple[int, int, int]) -> None:
    """Settle requests of these (prompt, cached, completion) tokens in one batch."""
    records = []
    for prompt, cached, completion in tokens:
        hold = shop.hold(who.account_id, 10**6)
        hold = type(hold)(**{**{name: getattr(hold, name) for name in hold.__struct_fields__}, "key_id": who.key_id})
        records += [hold, shop.settle(hold.request_id, prompt, cached, completion)]
    shop.apply(*sorted(records, key=lambda record: record.seq))


@pytest.fixture
def both(office: Office, shop: Shop) -> tuple[Office, Shop]:
    """The API and the ledger on one database and one clock."""
    shop.now = office.now
    return office, shop


def test_money_is_exact_to_the_nano_unit(office: Office) -> None:
    ada = office.person(balance=12_345_678_901)
    info = office.ask("account.info", {}, ada)
    assert info.body["balance"] == Decimal("1234.5678901")
    assert (info.body["held"], info.body["credit_limit"], info.body["unlimited"]) == (0, 0, False)
    whole = office.ask("account.info", {"selector": "ByToken"}, office.person(balance=10**9))
    assert whole.body["balance"] == 100 and isinstance(whole.body["balance"], int)


def test_usage_is_one_line_for_each_key_model_and_batch(both: tuple[Office, Shop]) -> None:
    office, shop = both
    ada = office.person(balance=10**10)
    use(shop, ada, (100, 20, 5), (10, 0, 1))
    use(shop, ada, (7, 0, 0))
    office.now = shop.now
    first, second, topup = pages(office, "account.transactions_list", ada)
    assert first["info"]["ServiceUsage"]["requests"] == 1
    usage = second["info"]["ServiceUsage"]
    assert {name: usage[name] for name in ("service", "model", "key_name")} == {
        "service": "inference",
        "model": "tiny",
        "key_name": "key of user",
    }
    assert (usage["prompt_tokens"], usage["cached_tokens"], usage["completion_tokens"]) == (110, 20, 6)
    assert usage["from"] < usage["to"] == second["created_at"]
    assert topup["info"] == {"External": {"description": ""}} and topup["amount"] == 1000
    state = shop.state(ada.account_id)
    assert sum(line["amount"] for line in (first, second, topup)) * NANO_IN_CENT == state.posted


def test_pages_of_any_size_say_the_same_and_add_up(both: tuple[Office, Shop]) -> None:
    office, shop = both
    ada, eve = office.person(balance=10**10), office.person(balance=10**10)
    for size in range(1, 6):
        use(shop, ada, *[(size, 0, number) for number in range(size)])
        use(shop, eve, (999, 0, 999))
        shop.top_up(ada.account_id, size)
    office.now = shop.now
    office.wait(1)
    whole = pages(office, "account.transactions_list", ada)
    assert len(whole) == 11 and [line["created_at"] for line in whole] == sorted(
        (line["created_at"] for line in whole), reverse=True
    )
    assert sum(line["amount"] for line in whole) * NANO_IN_CENT == shop.state(ada.account_id).posted
    for limit in (1, 2, 3, 11):
        office.wait(10)
        assert pages(office, "account.transactions_list", ada, limit=limit) == whole
        assert pages(office, "account.transactions_list_v2", ada, limit=limit) == whole
    assert shop.audit().clean


def test_the_second_version_lists_thirty_days_or_what_is_asked(both: tuple[Office, Shop]) -> None:
    office, shop = both
    ada = office.person()
    for _ in range(3):
        office.wait(20 * 86_400)
        shop.now = office.now
        shop.top_up(ada.account_id, 10**7)
    office.now = shop.now
    everything = pages(office, "account.transactions_list", ada)
    assert len(everything) == 3
    assert pages(office, "account.transactions_list_v2", ada) == everything[:2]
    middle = everything[1]["created_at"]
    assert pages(
        office, "account.transactions_list_v2", ada, **{"from": middle, "to": everything[0]["created_at"]}
    ) == [everything[1]]
    assert pages(office, "account.transactions_list_v2", ada, **{"from": "1970-01-01T00:00:00+00:00"}) == everything
    assert pages(office, "account.transactions_list_v2", ada, to=everything[0]["created_at"]) == everything[1:2]
    backwards = office.ask("account.transactions_list_v2", {"from": middle, "to": "2020-01-01T00:00:00Z"}, ada)
    assert (backwards.status, backwards.param) == (400, "to")


@pytest.mark.parametrize("cursor", ["", "x", "W10", "WzEsMl0x", "bnVsbA", "WzEsInQiXQ", "W" * 200, "é", "WzFlOTk5LDBd"])
def test_a_cursor_is_one_that_was_given(sqlite_office: Office, cursor: str) -> None:
    answer = sqlite_office.ask("account.transactions_list", {"cursor": cursor}, sqlite_office.person())
    assert (answer.status, answer.param) == (400, "cursor")


def test_no_cursor_opens_the_account_of_somebody_else(both: tuple[Office, Shop]) -> None:
    office, shop = both
    ada, eve = office.person(balance=10**9), office.person(balance=5 * 10**9)
    shop.top_up(ada.account_id, 1)
    cursor = office.ask("account.transactions_list", {"limit": 1}, ada).body["next_cursor"]
    stolen = office.ask("account.transactions_list", {"limit": 10, "cursor": cursor}, eve).body["transactions"]
    assert {line["id"] for line in stolen}.isdisjoint(
        line["id"] for line in pages(office, "account.transactions_list", ada)
    )


def test_teams_are_open_to_their_own_key_and_to_admins(office: Office) -> None:
    team, other = office.team(), office.team()
    for name in ("account.info", "account.transactions_list", "account.transactions_list_v2"):
        body = {"selector": {"ByTeam": team.id}}
        assert office.ask(name, body, team).status == 200
        assert office.ask(name, {}, team).status == 200
        assert office.ask(name, body, office.person("readonly_admin")).status == 200
        for stranger in (office.person(), office.person("provider"), other):
            answer = office.ask(name, body, stranger)
            assert (answer.status, answer.code) == (403, "NotTeamMember")
        unknown = office.ask(name, {"selector": {"ByTeam": "t"}}, office.person("admin"))
        assert (unknown.status, unknown.code) == (404, "TeamNotFound")


def external(office: Office, admin: Caller, amount: Any, *people: Caller, **headers: str) -> Answer:
    body = {"account": {"ByUserIds": [one.id for one in people]}, "amount": amount, "description": "transfer 4711"}
    raw = json.dumps(body, default=str).replace('"AMOUNT"', str(amount)).encode()
    return office.ask("account.transactions_create_external", None, admin, raw=raw, **headers)


def test_an_admin_adds_and_removes_funds(office: Office) -> None:
    admin, ada, eve = office.person("admin"), office.person(), office.person()
    made = external(office, admin, 2000, ada, eve, ada)
    assert made.status == 200 and len(made.body["transaction_ids"]) == 2
    assert external(office, admin, -1999.9999999, ada).status == 200
    assert office.ask("account.info", {}, ada).body["balance"] == Decimal("0.0000001")
    line = office.ask("account.transactions_list", {"limit": 1}, ada).body["transactions"][0]
    assert line["info"] == {"External": {"description": "transfer 4711"}} and line["amount"] == Decimal("-1999.9999999")
    poor = external(office, admin, -1, eve, ada)
    assert (poor.status, poor.code, poor.param) == (402, "InsufficientFunds", "amount")
    assert office.ask("account.info", {}, eve).body["balance"] == 2000  # all of it or nothing
    with office.database.read() as unit:
        assert audit(unit, now=office.now).clean


def test_funds_are_added_once_for_each_idempotency_key(office: Office) -> None:
    admin, other, ada = office.person("admin"), office.person("admin"), office.person()
    first = external(office, admin, 500, ada, Idempotency_Key="k1")
    again = external(office, admin, 500, ada, Idempotency_Key="k1")
    assert first.body == again.body and first.headers["X-Request-Id"] != again.headers["X-Request-Id"]
    assert again.headers["Idempotency-Replayed"] == "true" and "Idempotency-Replayed" not in first.headers
    reused = external(office, admin, 501, ada, Idempotency_Key="k1")
    assert (reused.status, reused.code) == (409, "IdempotencyKeyReused")
    assert external(office, other, 500, ada, Idempotency_Key="k1").status == 200  # keys are each caller's own
    assert office.ask("account.info", {}, ada).body["balance"] == 1000
    refused = external(office, admin, -5000, ada, Idempotency_Key="k2")
    assert refused.status == 402  # what was refused was not done, so the key is still free
    assert external(office, admin, 1, ada, Idempotency_Key="k2").status == 200
    office.wait(86_400)
    assert external(office, admin, 500, ada, Idempotency_Key="k1").body != first.body
    assert external(office, admin, 500, ada, Idempotency_Key="x" * 129).param == "Idempotency-Key"


@pytest.mark.parametrize(
    "amount",
    ["true", '"5"', "0", "0.0", "1e20", "0.00000001", "1e999999999", "-1e-999999999", "1e-8", "9" * 400, "null"],
)
def test_an_amount_is_a_number_of_cents_within_range(sqlite_office: Office, amount: str) -> None:
    admin = sqlite_office.person("admin")
    sqlite_office.wait(60)
    raw = b'{"account": {"ByUserIds": ["x"]}, "amount": %s}' % amount.encode()
    answer = sqlite_office.ask("account.transactions_create_external", None, admin, raw=raw)
    assert (answer.status, answer.param) == (400, "amount"), answer.body


def test_an_admin_sets_credit(office: Office) -> None:
    admin, ada, team = office.person("admin"), office.person(), office.team()
    body = {"selector": {"ByUserIds": [ada.id]}, "credit_limit": 10_000, "unlimited": False}
    assert office.ask("account.update_credit_limit", body, admin).body == {"updated_ids": [ada.id]}
    assert office.ask("account.info", {}, ada).body["credit_limit"] == 10_000
    office.ask("account.update_credit_limit", {"selector": {"ByTeamIds": [team.id]}, "unlimited": True}, admin)
    assert office.ask("account.info", {}, team).body["unlimited"] is True
    external(office, admin, -9000, ada)
    taken = office.ask("account.update_credit_limit", {**body, "credit_limit": 0}, admin)
    assert (taken.status, taken.code) == (409, "CreditInUse")
    unknown = office.ask("account.update_credit_limit", {**body, "selector": {"ByUserIds": ["nobody"]}}, admin)
    assert (unknown.status, unknown.code, unknown.param) == (404, "UserNotFound", "selector")
    negative = office.ask("account.update_credit_limit", {**body, "credit_limit": -1}, admin)
    assert (negative.status, negative.param) == (400, "credit_limit")
