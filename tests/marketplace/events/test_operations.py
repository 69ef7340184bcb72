"""The audit log: every change leaves a line, its owner reads it, and nobody changes it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

if TYPE_CHECKING:
    from tests.marketplace.conftest import Caller, Office


def events(office: Office, who: Caller, **body: Any) -> list[dict[str, Any]]:
    answer = office.ask("events.list", body, who)
    assert answer.status == 200, answer.body
    return answer.body["events"]  # type: ignore[no-any-return]


def test_every_change_leaves_a_line(office: Office) -> None:
    ada, admin = office.person(), office.person("admin")
    token = office.login(ada)
    added = office.ask("keys.add", {"name": "laptop"}, token)
    office.ask("keys.update", {"id": added.body["id"], "active": False}, ada)
    office.ask("keys.delete", {"id": added.body["id"]}, ada)
    office.ask("auth.totp_setup", {}, ada)
    credit = {"selector": {"ByUserIds": [ada.id]}, "credit_limit": 5}
    office.ask("account.update_credit_limit", credit, admin)
    office.ask("account.transactions_create_external", {"account": credit["selector"], "amount": 5}, admin)
    office.ask("auth.logout", {}, token)
    found = events(office, ada)
    assert [item["action"] for item in reversed(found)] == [
        "auth.login",
        "keys.add",
        "keys.update",
        "keys.delete",
        "totp.setup",
        "account.credit",
        "account.external",
        "auth.logout",
    ]
    by_action = {item["action"]: item for item in found}
    assert by_action["keys.add"]["request_id"] == added.headers["X-Request-Id"]
    assert by_action["keys.add"]["subject_id"] == added.body["id"]
    assert by_action["keys.delete"]["credential_id"] == ada.key_id
    assert by_action["account.external"]["actor_id"] == admin.id
    assert added.body["key"] not in json.dumps(found, default=str) and ada.email not in json.dumps(found, default=str)


def test_what_was_refused_leaves_none(office: Office) -> None:
    ada = office.person()
    office.ask("keys.delete", {"id": "nothing"}, ada)
    office.ask("auth.login", {"email": ada.email, "password": "wrong"})
    assert events(office, ada) == []


def test_one_reads_ones_own_and_admins_read_all(office: Office) -> None:
    ada, eve = office.person(), office.person()
    for who in (ada, eve):
        office.ask("keys.add", {"name": "k"}, who)
    assert {item["owner_id"] for item in events(office, ada)} == {ada.id}
    for role in ("admin", "readonly_admin"):
        everything = events(office, office.person(role), selector="All")
        assert {item["owner_id"] for item in everything} == {ada.id, eve.id}
    refused = office.ask("events.list", {"selector": "All"}, ada)
    assert (refused.status, refused.code) == (403, "PermissionDenied")
    first = office.ask("events.list", {"selector": "All", "limit": 1}, office.person("admin")).body
    assert len(first["events"]) == 1
    rest = events(office, office.person("admin"), selector="All", cursor=first["next_cursor"])
    assert [*first["events"], *rest] == everything


def test_the_log_is_final(office: Office) -> None:
    ada = office.person()
    office.ask("keys.add", {"name": "k"}, ada)
    for statement in ("UPDATE event SET action = 'nothing'", "DELETE FROM event"):
        with pytest.raises(DBAPIError, match="append-only"), office.database._writer.begin() as connection:
            connection.execute(text(statement))
    assert len(events(office, ada)) == 1
