"""API keys through the API: shown once, changed, switched off, revoked, and never somebody else's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from marketplace.keys import service as keys

if TYPE_CHECKING:
    from tests.marketplace.conftest import Office


def test_a_key_works_until_it_is_deleted(office: Office) -> None:
    ada = office.person()
    made = office.ask("keys.add", {"name": "laptop"}, ada).body
    assert made["key"].startswith("hr_u_") and made["key"].startswith(made["prefix"])
    assert office.ask("auth.me", {}, made["key"]).body["id"] == ada.id
    listed = office.ask("keys.list", {}, ada).body
    assert [key["id"] for key in listed["api_keys"]] == [made["id"], ada.key_id] and listed["next_cursor"] is None
    assert made["key"] not in json.dumps(listed, default=str)
    assert office.ask("keys.delete", {"id": made["id"]}, ada).body == {"id": made["id"]}
    gone = office.ask("auth.me", {}, made["key"])
    assert (gone.status, gone.code) == (401, "InvalidApiKey") and made["key"] not in json.dumps(gone.body)
    assert [key["id"] for key in office.ask("keys.list", {}, ada).body["api_keys"]] == [ada.key_id]
    assert office.ask("keys.delete", {"id": made["id"]}, ada).code == "KeyNotFound"


def test_a_key_can_be_switched_off_and_on_and_the_gateway_sees_it(office: Office) -> None:
    ada = office.person()
    made = office.ask("keys.add", {"name": "laptop"}, ada).body

    def loaded() -> tuple[int, bool]:
        with office.database.read() as unit:
            return keys.key_epoch(unit), made["id"] in {row.id for row in keys.load_active(unit)}

    before = loaded()
    off = office.ask("keys.update", {"id": made["id"], "active": False}, ada).body
    assert off["active"] is False and off["name"] == "laptop"
    assert office.ask("auth.me", {}, made["key"]).code == "InvalidApiKey"
    assert loaded() == (before[0] + 1, False)
    office.ask("keys.update", {"id": made["id"], "active": True, "name": None}, ada)
    assert office.ask("auth.me", {}, made["key"]).status == 200
    assert loaded() == (before[0] + 2, True)


def test_limits_are_set_and_taken_away(office: Office) -> None:
    ada = office.person()
    wanted = {
        "name": "ci",
        "expires_at": "2027-02-01T00:00:00Z",
        "allowed_models": ["tiny"],
        "allowed_addresses": ["203.0.113.7", "2001:db8::1/32"],
        "requests_per_minute": 5,
        "max_concurrency": 2,
    }
    made = office.ask("keys.add", wanted, ada).body
    assert made["allowed_addresses"] == ["2001:db8::/32", "203.0.113.7/32"]
    assert {name: made[name] for name in wanted if name != "allowed_addresses"} == {
        name: value for name, value in wanted.items() if name != "allowed_addresses"
    }
    elsewhere = office.ask("auth.me", {}, made["key"])
    assert (elsewhere.status, elsewhere.code) == (403, "CredentialsNotPermitted")
    assert office.ask("auth.me", {}, made["key"], address="203.0.113.7").status == 200
    freed = office.ask("keys.update", {"id": made["id"], "allowed_addresses": None, "max_concurrency": None}, ada).body
    assert (freed["allowed_addresses"], freed["max_concurrency"], freed["requests_per_minute"]) == (None, None, 5)
    assert office.ask("auth.me", {}, made["key"]).status == 200
    office.now = 1_801_440_000_000_000  # the day it expires
    assert office.ask("auth.me", {}, made["key"]).code == "InvalidApiKey"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", "x" * 64),
        ("name", "a\nb"),
        ("allowed_addresses", ["example.com"]),
        ("requests_per_minute", 0),
        ("requests_per_minute", 1.5),
        ("requests_per_minute", True),
        ("expires_at", "tomorrow"),
        ("expires_at", "2026-02-30T00:00:00Z"),
        ("expires_at", 1_900_000_000),
        ("allowed_models", ["m"] * 101),
    ],
)
def test_wrong_settings_are_named(sqlite_office: Office, field: str, value: object) -> None:
    sqlite_office.wait(60)
    answer = sqlite_office.ask("keys.add", {"name": "n", field: value}, sqlite_office.person())
    assert (answer.status, answer.code) == (400, "ValidationFailed")
    assert answer.param is not None and answer.param.split(".")[0] == field


def test_nobody_touches_a_key_of_somebody_else(office: Office) -> None:
    ada, eve, admin = office.person(), office.person(), office.person("admin")
    for stranger in (eve, admin):
        for name, body in (("keys.update", {"id": ada.key_id, "active": False}), ("keys.delete", {"id": ada.key_id})):
            answer = office.ask(name, body, stranger)
            assert (answer.status, answer.code, answer.param) == (404, "KeyNotFound", "id")
        assert ada.key_id not in json.dumps(office.ask("keys.list", {}, stranger).body)
    assert office.ask("keys.list", {"team_id": "t1"}, ada).code == "NotTeamMember"
    assert office.ask("auth.me", {}, ada).status == 200


def test_a_rotated_key_works_beside_the_new_one_for_a_while(office: Office) -> None:
    ada = office.person()
    old = office.ask(
        "keys.add", {"name": "ci", "requests_per_minute": 7, "expires_at": "2027-06-01T00:00:00Z"}, ada
    ).body
    new = office.ask("keys.rotate", {"id": old["id"], "overlap_s": 3600}, ada).body
    same = ("name", "requests_per_minute", "expires_at", "active", "allowed_models")
    assert {name: new[name] for name in same} == {name: old[name] for name in same} and new["key"] != old["key"]
    office.wait(3590)
    assert {office.ask("auth.me", {}, key["key"]).status for key in (old, new)} == {200}
    office.wait(20)
    assert office.ask("auth.me", {}, old["key"]).code == "InvalidApiKey"
    assert office.ask("auth.me", {}, new["key"]).status == 200
    again = office.ask("keys.rotate", {"id": old["id"]}, ada)
    assert (again.status, again.code, again.param) == (400, "InvalidTransition", "id")
    assert office.ask("keys.rotate", {"id": old["id"]}, office.person()).code == "KeyNotFound"


def test_pages_go_through_every_key_once(office: Office) -> None:
    ada = office.person()
    made = [office.ask("keys.add", {"name": f"k{number}"}, ada).body["id"] for number in range(7)]
    seen: list[str] = []
    cursor = None
    for _ in range(4):
        page = office.ask("keys.list", {"limit": 3, "cursor": cursor} if cursor else {"limit": 3}, ada).body
        seen += [key["id"] for key in page["api_keys"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == [*reversed(made), ada.key_id]
