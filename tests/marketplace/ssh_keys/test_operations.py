"""Public SSH keys: kept, listed, forgotten, and found when a machine is rented."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from marketplace.ssh_keys import service
from marketplace.ssh_keys.service import UnknownSshKeyError

if TYPE_CHECKING:
    from tests.marketplace.conftest import Caller, Office

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f"


def add(office: Office, who: Caller, name: str, **more: Any) -> dict[str, Any]:
    answer = office.ask("ssh_keys.add", {"name": name, "public_key": f"{KEY} {name}", **more}, who)
    assert answer.status == 200, answer.body
    return dict(answer.body)


def names(office: Office, who: Caller, **more: Any) -> list[str]:
    return [one["name"] for one in office.ask("ssh_keys.list", more, who).body["ssh_keys"]]


def test_keys_are_kept_under_their_owner_s_name_and_forgotten(office: Office) -> None:
    ada, other = office.person(), office.person()
    made = add(office, ada, "laptop")
    assert made["public_key"] == f"{KEY} laptop" and made["fingerprint"].startswith("SHA256:")
    add(office, ada, "desk")
    add(office, other, "laptop")
    assert names(office, ada) == ["desk", "laptop"] and names(office, other) == ["laptop"]
    taken = office.ask("ssh_keys.add", {"name": "laptop", "public_key": KEY}, ada)
    assert (taken.status, taken.code, taken.param) == (409, "NameExists", "name")
    foreign = office.ask("ssh_keys.delete", {"selector": {"ById": [made["id"]]}}, other)
    assert foreign.body == {"deleted_ids": []} and names(office, ada) == ["desk", "laptop"]
    gone = office.ask("ssh_keys.delete", {"selector": {"ByName": ["laptop", "none"]}}, ada)
    assert gone.body == {"deleted_ids": [made["id"]]}
    assert office.ask("ssh_keys.delete", {"selector": "All"}, ada).status == 200
    assert names(office, ada) == [] and names(office, other) == ["laptop"]
    actions = [event["action"] for event in office.ask("events.list", {}, ada).body["events"]]
    assert actions == ["ssh_keys.delete", "ssh_keys.delete", "ssh_keys.add", "ssh_keys.add"]


def test_a_team_s_keys_are_its_members(office: Office) -> None:
    ada = office.person()
    team = office.team(owner=ada)
    add(office, ada, "shared", team_id=team.id)
    add(office, team, "ci")
    assert names(office, ada, team_id=team.id) == names(office, team) == ["ci", "shared"]
    assert names(office, ada) == []
    for name, body in (
        ("ssh_keys.add", {"name": "x", "public_key": KEY}),
        ("ssh_keys.list", {}),
        ("ssh_keys.delete", {"selector": "All"}),
    ):
        refused = office.ask(name, {**body, "team_id": team.id}, office.person())
        assert (refused.status, refused.code, refused.param) == (403, "NotTeamMember", "team_id")


def test_what_is_no_key_is_400(office: Office) -> None:
    ada = office.person()
    for body, param in (
        ({"name": "x", "public_key": "-----BEGIN OPENSSH PRIVATE KEY-----"}, "public_key"),
        ({"name": "x", "public_key": f"{KEY}\n{KEY}"}, "public_key"),
        ({"name": "a/b", "public_key": KEY}, "name"),
    ):
        answer = office.ask("ssh_keys.add", body, ada)
        assert (answer.status, answer.code, answer.param) == (400, "ValidationFailed", param)


def test_pages_and_a_bound(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    ada = office.person()
    monkeypatch.setattr(service, "MAX_KEYS", 3)
    for number in range(3):
        add(office, ada, f"k{number}")
    first = office.ask("ssh_keys.list", {"limit": 2}, ada).body
    second = office.ask("ssh_keys.list", {"limit": 2, "cursor": first["next_cursor"]}, ada).body
    assert [one["name"] for one in first["ssh_keys"] + second["ssh_keys"]] == ["k2", "k1", "k0"]
    full = office.ask("ssh_keys.add", {"name": "k3", "public_key": KEY}, ada)
    assert (full.status, full.code, full.param) == (400, "ValidationFailed", "name")


def test_a_rental_finds_keys_of_its_owners_by_name_or_id_in_order(office: Office) -> None:
    ada = office.person()
    team = office.team(owner=ada)
    mine, ours = add(office, ada, "mine"), add(office, ada, "ours", team_id=team.id)
    owners = [("team", team.id), ("user", ada.id)]
    with office.database.read() as unit:
        assert service.resolve(unit, owners, names=["mine", "ours"]) == [f"{KEY} mine", f"{KEY} ours"]
        assert service.resolve(unit, owners, ids=[ours["id"], mine["id"]]) == [f"{KEY} ours", f"{KEY} mine"]
        with pytest.raises(UnknownSshKeyError):
            service.resolve(unit, [("user", office.person().id)], ids=[mine["id"]])


def test_of_two_who_add_a_name_at_once_one_is_told(office: Office) -> None:
    ada = office.person()
    with ThreadPoolExecutor(4) as pool:
        body = {"name": "same", "public_key": KEY}
        answers = list(pool.map(lambda _: office.ask("ssh_keys.add", body, ada).status, range(4)))
    assert sorted(answers) == [200, 409, 409, 409]
