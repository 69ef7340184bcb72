"""Requests that race: what may happen once happens once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyotp

from marketplace.auth.totp import STEP_S
from marketplace.ledger.audit import audit

if TYPE_CHECKING:
    from tests.marketplace.conftest import Answer, Office


def at_once(count: int, ask: Callable[[int], Answer]) -> list[Answer]:
    """Ask from so many threads that begin together."""
    gate, answers = threading.Barrier(count), {}

    def run(number: int) -> None:
        gate.wait(10)
        answers[number] = ask(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [answers[number] for number in range(count)]


def test_one_idempotency_key_moves_money_once(office: Office) -> None:
    admin, ada = office.person("admin"), office.person()
    body: dict[str, Any] = {"account": {"ByUserIds": [ada.id]}, "amount": 500}
    name = "account.transactions_create_external"
    answers = at_once(6, lambda _: office.ask(name, body, admin, Idempotency_Key="k"))
    assert [answer.status for answer in answers] == [200] * 6
    assert len({answer.body["transaction_ids"][0] for answer in answers}) == 1
    assert sum("Idempotency-Replayed" not in answer.headers for answer in answers) == 1
    assert office.ask("account.info", {}, ada).body["balance"] == 500


def test_eight_clients_move_money_on_the_same_accounts(office: Office) -> None:
    admin = office.person("admin")
    people = [office.person(balance=10**9) for _ in range(3)]
    ids = [one.id for one in people]

    def ask(number: int) -> Answer:
        order = ids[number % 3 :] + ids[: number % 3]
        if number % 4 == 3:
            return office.ask(
                "account.update_credit_limit", {"selector": {"ByUserIds": order}, "credit_limit": 9}, admin
            )
        body = {"account": {"ByUserIds": order}, "amount": number - 4 or 1}
        return office.ask("account.transactions_create_external", body, admin)

    answers = at_once(8, ask)
    assert [answer.status for answer in answers] == [200] * 8
    moved = sum(number - 4 or 1 for number in range(8) if number % 4 != 3)
    for one in people:
        assert office.ask("account.info", {}, one).body["balance"] == 100 + moved
    with office.database.read() as unit:
        assert audit(unit, now=office.now).clean


def test_one_code_opens_one_session(office: Office) -> None:
    ada = office.person()
    device = pyotp.parse_uri(office.ask("auth.totp_setup", {}, ada).body["totp_uri"])
    assert isinstance(device, pyotp.TOTP)
    office.ask("auth.totp_confirm", {"code": device.at(office.now // 1_000_000)}, ada)
    credentials = {"email": ada.email, "password": office.PASSWORD}
    partial = [office.ask("auth.login", credentials).body["partial_token"] for _ in range(4)]
    office.wait(STEP_S)
    code = device.at(office.now // 1_000_000)
    answers = at_once(4, lambda n: office.ask("auth.totp_complete", {"partial_token": partial[n], "code": code}))
    assert sorted(answer.status for answer in answers) == [200, 400, 400, 400]
