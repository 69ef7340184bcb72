"""Changes of people at the same time: what must stay true stays true."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from sqlalchemy import func, select

from marketplace.keys.tables import api_key
from marketplace.ledger.audit import audit
from marketplace.providers.tables import provider
from marketplace.users.tables import users

if TYPE_CHECKING:
    from tests.marketplace.conftest import Answer, Office


def at_once(*asks: Callable[[], Answer]) -> list[Answer]:
    """Ask from threads that begin together."""
    gate, answers = threading.Barrier(len(asks)), {}

    def run(number: int) -> None:
        gate.wait(10)
        answers[number] = asks[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(asks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [answers[number] for number in range(len(asks))]


def test_admins_who_demote_and_erase_each_other_leave_one(office: Office) -> None:
    first, second, third = (office.person("admin") for _ in range(3))
    answers = at_once(
        lambda: office.ask("users.update_role", {"user_id": second.id, "role": "user"}, first),
        lambda: office.ask("users.delete", {"user_id": third.id, "reason": "r"}, second),
        lambda: office.ask("users.update_role", {"user_id": first.id, "role": "user"}, third),
    )
    assert {answer.status for answer in answers} <= {200, 401, 403, 409}
    with office.database.read() as unit:
        living = (users.c.role == "admin", users.c.erased_at.is_(None))
        assert unit.select(select(func.count()).select_from(users).where(*living)).scalar_one() >= 1


def test_an_address_is_added_once(office: Office) -> None:
    admin = office.person("admin")
    body = {"email": "grace@example.com", "name": "Grace"}
    answers = at_once(*[lambda: office.ask("users.add", body, admin)] * 4)
    assert sorted(answer.status for answer in answers) == [200, 409, 409, 409]
    assert {answer.code for answer in answers if answer.status == 409} == {"EmailExists"}


def test_a_provider_is_made_once(office: Office) -> None:
    admin = office.person("admin")
    answers = at_once(*[lambda: office.ask("providers.create", {"name": "acme"}, admin)] * 4)
    assert sorted(answer.status for answer in answers) == [200, 409, 409, 409]
    with office.database.read() as unit:
        assert unit.select(select(func.count()).select_from(provider)).scalar_one() == 1


def test_an_erasure_among_the_persons_own_requests(office: Office) -> None:
    admin, ada = office.person("admin"), office.person(balance=10**9)
    session = office.login(ada)
    answers = at_once(
        lambda: office.ask("users.delete", {"user_id": ada.id, "reason": "r"}, admin),
        lambda: office.ask("keys.add", {"name": "late"}, session),
        lambda: office.ask("keys.add", {"name": "late"}, ada),
        lambda: office.ask("auth.login", {"email": ada.email, "password": office.PASSWORD}),
        lambda: office.ask("users.delete", {"user_id": ada.id, "reason": "r"}, admin),
    )
    assert {answer.status for answer in answers} <= {200, 401, 404}
    assert [answer.status for answer in answers].count(404) == 1  # erased once
    with office.database.read() as unit:
        usable = (api_key.c.owner_id == ada.id, api_key.c.revoked_at.is_(None))
        assert unit.select(select(func.count()).select_from(api_key).where(*usable)).scalar_one() == 0
        assert audit(unit, now=office.now).clean
