"""Charges over the API: whom, by whom, how much, how often."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select

from marketplace.accounts import service as accounts
from marketplace.ledger import ledger
from marketplace.ledger.audit import audit
from marketplace.ledger.tables import account

if TYPE_CHECKING:
    from tests.marketplace.conftest import Answer, Caller, Office

CENT = 10_000_000


def charge(office: Office, caller: Caller, who: str, /, **fields: Any) -> Answer:
    body = {"service": "render", "provider": "acme", "amount": [1354, 1000], **fields}
    return office.ask("services.charge", body, caller, X_On_Behalf_Of=who)


def posted(office: Office, account_id: str) -> int:
    with office.database.read() as unit:
        return int(unit.select(select(account.c.posted).where(account.c.id == account_id)).scalar() or 0)


def clean(office: Office) -> bool:
    with office.database.read() as unit:
        return audit(unit).clean


def test_a_charge_is_shared_with_the_provider_and_shown_to_its_customer(office: Office) -> None:
    service, person = office.service(), office.person(balance=10**9)
    made = charge(office, service, f"user:{person.id}", request_id="r1", usage_metadata='{"frames": 12}')
    assert (made.status, made.body) == (201, {"request_id": "r1"})
    assert posted(office, person.account_id) == 10**9 - 13_540_000
    assert posted(office, ledger.payable_account(service.id)) == 10_832_000
    assert posted(office, ledger.service_account("render")) == 2_708_000
    line = office.ask("account.transactions_list", {}, person).body["transactions"][0]
    assert str(line["amount"]) == "-1.354"
    assert line["info"] == {
        "ServiceUsage": {
            "service": "render",
            "provider": "acme",
            "request_id": "r1",
            "usage_metadata": '{"frames": 12}',
        }
    }
    assert clean(office)


def test_a_request_is_charged_once(office: Office) -> None:
    service, person = office.service(), office.person(balance=10**9)
    assert charge(office, service, f"user:{person.id}", request_id="r1").status == 201
    again = charge(office, service, f"user:{person.id}", request_id="r1", amount=[1, 1])
    assert (again.status, again.code, again.param) == (409, "DuplicateRequestId", "request_id")
    other = office.service("upscale")
    answer = office.ask(
        "services.charge",
        {"service": "upscale", "provider": "acme", "amount": [1, 1], "request_id": "r1"},
        other,
        X_On_Behalf_Of=f"user:{person.id}",
    )
    assert answer.status == 201
    assert posted(office, person.account_id) == 10**9 - 13_540_000 - CENT


def test_the_same_request_from_many_threads_is_charged_once(office: Office) -> None:
    service, person = office.service(), office.person(balance=10**9)
    together, statuses = threading.Barrier(8), []

    def ask() -> None:
        together.wait()
        statuses.append(charge(office, service, f"user:{person.id}", request_id="r1").status)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [201] + [409] * 7
    assert posted(office, person.account_id) == 10**9 - 13_540_000
    assert clean(office)


def test_teams_are_charged_and_strangers_are_not(office: Office) -> None:
    service, team = office.service(), office.team()
    with office.database.write() as unit:
        accounts.top_up(unit, team.account_id, 10**9, key="t", now=office.clock(), random=office.random)
    assert charge(office, service, f"team:{team.id}").status == 201
    assert posted(office, team.account_id) == 10**9 - 13_540_000
    for who, code in (
        ("user:nobody", "UserNotFound"),
        ("team:nobody", "TeamNotFound"),
        (f"user:{team.id}", "UserNotFound"),
    ):
        answer = charge(office, service, who)
        assert (answer.status, answer.code, answer.param) == (404, code, "X-On-Behalf-Of")


@pytest.mark.parametrize("who", ["", "user", "user:", "admin:1", "someone"])
def test_it_must_be_said_who_is_charged(sqlite_office: Office, who: str) -> None:
    sqlite_office.wait(60)
    answer = charge(sqlite_office, sqlite_office.service(), who)
    assert (answer.status, answer.code, answer.param) == (400, "ValidationFailed", "X-On-Behalf-Of")


def test_a_key_charges_for_its_own_service_and_provider_only(office: Office) -> None:
    service, person = office.service(), office.person(balance=10**9)
    office.service("render", "other")
    for fields, param in (({"service": "upscale"}, "service"), ({"provider": "other"}, "provider")):
        answer = charge(office, service, f"user:{person.id}", **fields)
        assert (answer.status, answer.code, answer.param) == (403, "PermissionDenied", param)
    assert charge(office, service, f"user:{person.id}", provider=None).param == "provider"
    assert charge(office, person, f"user:{person.id}").code == "CredentialsNotPermitted"
    for name in ("auth.me", "account.info", "events.list"):
        assert office.ask(name, {}, service).code == "CredentialsNotPermitted"
    assert posted(office, person.account_id) == 10**9


def test_who_cannot_pay_is_not_charged(office: Office) -> None:
    service, person = office.service(), office.person(balance=CENT)
    answer = charge(office, service, f"user:{person.id}", request_id="r1")
    assert (answer.status, answer.code) == (402, "InsufficientFunds")
    assert charge(office, service, f"user:{person.id}", request_id="r1", amount=[1, 1]).status == 201
    assert posted(office, person.account_id) == 0


@pytest.mark.parametrize(
    "amount", [[-1, 1], [1, 0], [1], [1, 2, 3], [1.5, 1], ["1", 1], 5, None, [2**63, 1], [True, 1]]
)
def test_impossible_amounts_are_refused_by_name(sqlite_office: Office, amount: object) -> None:
    sqlite_office.wait(60)
    answer = charge(sqlite_office, sqlite_office.service(), "user:x", amount=amount)
    assert (answer.status, answer.code, answer.param) == (400, "ValidationFailed", "amount")


def test_what_rounds_to_nothing_is_kept_without_a_transaction(office: Office) -> None:
    service, person = office.service(), office.person()
    assert charge(office, service, f"user:{person.id}", request_id="r1", amount=[1, 10**12]).status == 201
    assert charge(office, service, f"user:{person.id}", request_id="r1", amount=[1, 10**12]).status == 409
    assert office.ask("account.transactions_list", {}, person).body["transactions"] == []


def test_charges_in_bulk_are_all_made_or_none(office: Office) -> None:
    service, person = office.service(), office.person(balance=5 * CENT)

    def bulk(*charges: dict[str, Any]) -> Answer:
        body = {"service": "render", "provider": "acme", "charges": list(charges)}
        return office.ask("services.bulk_charge", body, service, X_On_Behalf_Of=f"user:{person.id}")

    poor = bulk({"amount": [3, 1], "request_id": "a"}, {"amount": [3, 1], "request_id": "b"})
    assert (poor.status, poor.code, poor.param) == (402, "InsufficientFunds", "charges.1.amount")
    twice = bulk({"amount": [1, 1], "request_id": "a"}, {"amount": [1, 1], "request_id": "a"})
    assert (twice.status, twice.code, twice.param) == (409, "DuplicateRequestId", "charges.1.request_id")
    assert posted(office, person.account_id) == 5 * CENT
    made = bulk({"amount": [3, 1], "request_id": "a"}, {"amount": [1, 1]})
    assert made.status == 201 and made.body["request_ids"][0] == "a" and len(made.body["request_ids"]) == 2
    assert posted(office, person.account_id) == CENT
    lines = office.ask("account.transactions_list", {}, person).body["transactions"]
    assert [line["amount"] for line in lines[:2]] == [-1, -3]
    assert clean(office)
