"""Teams through the API: found, found again, renamed, deleted, and seen by whom."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import insert, update

from marketplace.ledger.audit import audit
from marketplace.payments.tables import payment
from marketplace.providers import service as providers

if TYPE_CHECKING:
    from tests.marketplace.conftest import Answer, Caller, Office, Shop

CENT = 10**7
PAYMENT = {
    "provider": "manual",
    "reference": None,
    "payer_kind": "team",
    "created_by": None,
    "amount_cents": 5,
    "currency": "EUR",
    "save_card": False,
    "state": "pending",
    "tx_id": None,
    "created_at": 1,
    "paid_at": None,
    "checked_at": 1,
}


def found(office: Office, who: Caller, name: str = "research", **more: Any) -> dict[str, Any]:
    answer = office.ask("teams.create", {"name": name, **more}, who)
    assert answer.status == 200, answer.body
    return answer.body  # type: ignore[no-any-return]


def listed(office: Office, who: Caller, selector: Any = "Mine", **more: Any) -> list[str]:
    answer = office.ask("teams.list", {"selector": selector, **more}, who)
    assert answer.status == 200, answer.body
    assert answer.body["total"] == len(answer.body["teams"]) or more
    return [team["name"] for team in answer.body["teams"]]


def add(office: Office, who: Caller, team_id: str, email: str, role: str = "Member") -> Answer:
    return office.ask("teams.members_add", {"team_id": team_id, "email": email, "role": role}, who)


def test_whoever_founds_a_team_owns_it(office: Office) -> None:
    ada = office.person()
    team = found(office, ada, description="Third floor")
    assert (team["name"], team["description"], team["user_role"]) == ("research", "Third floor", "Owner")
    got = office.ask("teams.get", {"team_id": team["id"]}, ada).body
    assert got["team"] == team and got["invites"] == []
    assert [(one["user_id"], one["email"], one["role"]) for one in got["members"]] == [(ada.id, ada.email, "Owner")]
    info = office.ask("account.info", {"selector": {"ByTeam": team["id"]}}, ada)
    assert (info.status, info.body["balance"]) == (200, 0)
    assert office.ask("account.info", {}, ada).status == 200


@pytest.mark.parametrize("name", ["", "x" * 64, " x", "x ", "a\nb", 5, None])
def test_a_name_is_one_printable_line(sqlite_office: Office, name: object) -> None:
    sqlite_office.wait(60)
    answer = sqlite_office.ask("teams.create", {"name": name}, sqlite_office.person())
    assert (answer.status, answer.code, answer.param) == (400, "ValidationFailed", "name")


def test_strangers_learn_nothing_of_a_team(office: Office) -> None:
    ada, eve, team_key = office.person(), office.person(), office.team()
    team = found(office, ada)
    for stranger in (eve, office.person("provider"), team_key):
        told = [office.ask("teams.get", {"team_id": team_id}, stranger) for team_id in (team["id"], "nothing")]
        assert [(answer.status, answer.code) for answer in told] == [(403, "NotTeamMember")] * 2
        assert told[0].body["error"]["message"] == told[1].body["error"]["message"]
        assert team["name"] not in listed(office, stranger)
        assert listed(office, stranger, {"ById": [team["id"]]}) == []
    for name, body in (
        ("teams.update", {"name": "x"}),
        ("teams.delete", {}),
        ("teams.leave", {}),
        ("teams.transfer", {"user_id": eve.id}),
        ("teams.members_add", {"email": eve.email}),
        ("teams.members_remove", {"selector": {"ById": ada.id}}),
        ("teams.members_update", {"selector": {"ById": ada.id}, "role": "Member"}),
    ):
        for team_id in (team["id"], "nothing"):
            answer = office.ask(name, {"team_id": team_id, **body}, eve)
            assert (answer.status, answer.code, answer.param) == (403, "NotTeamMember", "team_id"), name
    assert office.ask("teams.get", {"team_id": team["id"]}, office.person("readonly_admin")).status == 200
    missing = office.ask("teams.get", {"team_id": "nothing"}, office.person("admin"))
    assert (missing.status, missing.code) == (404, "TeamNotFound")


def test_a_team_s_key_sees_its_team(office: Office) -> None:
    team, other = office.team(name="ours"), office.team(name="theirs")
    got = office.ask("teams.get", {"team_id": team.id}, team).body
    assert got["team"]["user_role"] is None and len(got["members"]) == 1
    assert listed(office, team) == listed(office, team, {"ByID": [team.id, other.id]}) == ["ours"]
    assert office.ask("auth.me", {}, team).body["name"] == "ours"
    assert office.ask("teams.create", {"name": "x"}, team).code == "CredentialsNotPermitted"


def test_pages_newest_first_with_a_total(office: Office) -> None:
    ada, eve = office.person(), office.person()
    for number in range(5):
        found(office, ada, f"t{number}")
    found(office, eve, "other")
    seen: list[str] = []
    cursor = None
    for _ in range(3):
        body = {"limit": 2} | ({"cursor": cursor} if cursor else {})
        page = office.ask("teams.list", body, ada).body
        assert page["total"] == 5
        seen += [team["name"] for team in page["teams"]]
        cursor = page["next_cursor"]
    assert seen == ["t4", "t3", "t2", "t1", "t0"] and cursor is None


def test_lists_tell_members_and_accounts_when_asked(office: Office) -> None:
    ada, eve, admin = office.person(), office.person(), office.person("admin")
    team = found(office, ada)
    add(office, ada, team["id"], eve.email, "Admin")
    office.ask("account.transactions_create_external", {"account": {"ByTeamIds": [team["id"]]}, "amount": 250}, admin)
    credit = {"selector": {"ByTeamIds": [team["id"]]}, "credit_limit": 40}
    assert office.ask("account.update_credit_limit", credit, admin).status == 200
    plain = office.ask("teams.list", {}, eve).body["teams"][0]
    assert (plain["user_role"], plain["members"], plain["account_info"]) == ("Admin", None, None)
    full = office.ask("teams.list", {"with_members": True, "with_account_info": True}, eve).body["teams"][0]
    assert [(one["email"], one["role"]) for one in full["members"]] == [(ada.email, "Owner"), (eve.email, "Admin")]
    assert full["account_info"] == {
        "balance": 250,
        "credit_limit": 40,
        "is_unlimited": False,
        "total_spent": 0,
        "instance_count": 0,
    }


def test_selectors_of_others_teams_are_for_admins_and_providers(office: Office, shop: Shop) -> None:
    shop.now = office.now
    admin, ada = office.person("admin"), office.person()
    spender = office.team(name="spender")
    office.team(name="quiet")
    shop.top_up(spender.account_id, 10**10)
    hold = shop.hold(spender.account_id, 10**9)
    shop.apply(hold, shop.settle(hold.request_id, 1000, 0, 1000))
    office.now = shop.now
    spent = office.ask("teams.list", {"selector": {"ById": [spender.id]}, "with_account_info": True}, admin).body[
        "teams"
    ][0]["account_info"]["total_spent"]
    assert spent * CENT == 1000 * 3
    assert listed(office, admin, {"ByMinSpend": 0}) == ["quiet", "spender"]
    assert listed(office, admin, {"ByMinSpend": float(spent)}) == ["spender"]
    assert listed(office, admin, {"ByMinSpend": 1}) == []
    assert listed(office, admin, "ByActiveExecutors") == []
    for selector in ({"ByMinSpend": 0}, "ByActiveExecutors", {"ByProvider": "acme"}):
        answer = office.ask("teams.list", {"selector": selector}, ada)
        assert (answer.status, answer.code, answer.param) == (403, "PermissionDenied", "selector")
    unknown = office.ask("teams.list", {"selector": {"ByProvider": "nobody"}}, admin)
    assert (unknown.status, unknown.code) == (404, "ProviderNotFound")


def test_a_provider_sees_its_own_teams_and_those_of_its_renters(office: Office) -> None:
    bob, customer, stranger = office.person("provider"), office.person(), office.person()
    with office.database.write() as unit:
        acme = providers.create(unit, name="acme", now=office.clock(), random=office.random)
        providers.create(unit, name="other", now=office.clock(), random=office.random)
        providers.add_member(unit, acme.id, bob.id, is_root=True, now=office.clock())
        providers.add_customer(unit, acme.id, customer.id, now=office.clock())
    for who, name in ((stranger, "hidden"), (customer, "renters"), (bob, "builders")):
        found(office, who, name)
    assert listed(office, bob) == ["builders"]
    assert (
        listed(office, bob, {"ByProvider": "ACME"})
        == listed(office, bob, {"ByMinSpend": 0})
        == [
            "builders",
            "renters",
        ]
    )
    assert listed(office, office.person("admin"), {"ByProvider": "acme"}) == ["builders", "renters"]
    other = office.ask("teams.list", {"selector": {"ByProvider": "other"}}, bob)
    assert (other.status, other.code, other.param) == (403, "PermissionDenied", "selector.ByProvider")
    names = [team["name"] for team in office.ask("teams.search", {"query": ""}, bob).body["results"]]
    assert names == ["builders", "renters"]


def test_search_finds_parts_of_names_literally(office: Office) -> None:
    ada, admin = office.person(), office.person("readonly_admin")
    for name in ("Ärzte", "a%b", "a_b", "aXb"):
        found(office, ada, name)

    def search(query: str, **more: Any) -> list[str]:
        answer = office.ask("teams.search", {"query": query, **more}, admin)
        assert answer.status == 200
        return [team["name"] for team in answer.body["results"]]

    assert search("ÄRZ") == ["Ärzte"]
    assert search("%") == ["a%b"] and search("_") == ["a_b"] and search("x") == ["aXb"]
    assert search("") == ["aXb", "a_b", "a%b", "Ärzte"] and search("", limit=1) == ["aXb"]
    assert office.ask("teams.search", {"query": ""}, ada).code == "PermissionDenied"


def test_admins_rename_and_members_do_not(office: Office) -> None:
    ada, eve = office.person(), office.person()
    team = found(office, ada, description="old")
    add(office, ada, team["id"], eve.email)
    low = office.ask("teams.update", {"team_id": team["id"], "name": "mine"}, eve)
    assert (low.status, low.code) == (403, "PermissionDenied")
    after = office.ask("teams.update", {"team_id": team["id"], "name": "new"}, ada).body
    assert (after["name"], after["description"]) == ("new", "old") and after["updated_at"] > team["updated_at"]
    by_admin = office.ask("teams.update", {"team_id": team["id"], "description": "d"}, office.person("admin")).body
    assert (by_admin["description"], by_admin["user_role"]) == ("d", None)
    denied = office.ask("teams.update", {"team_id": team["id"], "name": "x"}, office.person("readonly_admin"))
    assert (denied.status, denied.code) == (403, "NotTeamMember")


def test_a_team_with_money_or_running_requests_is_not_deleted(office: Office, shop: Shop) -> None:
    ada, eve, admin = office.person(), office.person(), office.person("admin")
    team = office.team(owner=ada)
    add(office, ada, team.id, eve.email, "Admin")
    external = {"account": {"ByTeamIds": [team.id]}, "amount": 100}
    office.ask("account.transactions_create_external", external, admin)
    assert office.ask("teams.delete", {"team_id": team.id}, eve).code == "PermissionDenied"
    rich = office.ask("teams.delete", {"team_id": team.id}, ada)
    assert (rich.status, rich.code) == (409, "TeamInUse") and rich.body["error"]["details"]["balance"] == 100
    office.ask("account.transactions_create_external", {**external, "amount": -100}, admin)
    shop.now = office.now
    hold = shop.hold(team.account_id, 0)
    shop.apply(hold)
    office.now = shop.now
    busy = office.ask("teams.delete", {"team_id": team.id}, ada)
    assert busy.code == "TeamInUse" and busy.body["error"]["details"]["open_requests"] == 1
    shop.apply(shop.void(hold.request_id))
    office.now = shop.now
    with office.database.write() as unit:
        unit.execute(insert(payment).values(id="p", account_id=team.account_id, payer_id=team.id, **PAYMENT))
    paying = office.ask("teams.delete", {"team_id": team.id}, ada)
    assert paying.code == "TeamInUse" and paying.body["error"]["details"]["pending_payments"] == 1
    with office.database.write() as unit:
        unit.execute(update(payment).values(state="canceled"))
    assert office.ask("teams.delete", {"team_id": team.id}, ada).body == {"id": team.id}
    assert office.ask("auth.me", {}, team).code == "InvalidApiKey"
    assert listed(office, ada) == [] and listed(office, admin, {"ById": [team.id]}) == []
    assert office.ask("teams.get", {"team_id": team.id}, ada).code == "NotTeamMember"
    again = office.ask("teams.delete", {"team_id": team.id}, admin)
    assert (again.status, again.code) == (404, "TeamNotFound")
    late = office.ask("account.transactions_create_external", external, admin)
    assert (late.status, late.code) == (404, "TeamNotFound")
    kept = office.ask("account.transactions_list", {"selector": {"ByTeam": team.id}}, admin).body["transactions"]
    assert [line["amount"] for line in kept] == [-100, 100]
    with office.database.read() as unit:
        assert audit(unit, now=office.now).clean


def test_members_read_the_team_s_audit_log(office: Office) -> None:
    ada, eve, stranger = office.person(), office.person(), office.person()
    team = found(office, ada)
    add(office, ada, team["id"], eve.email)
    add(office, ada, team["id"], "new@example.com")
    key = office.ask("keys.add", {"name": "ci", "team_id": team["id"]}, ada).body
    for who in (eve, office.person("readonly_admin")):
        told = office.ask("events.list", {"selector": {"ByTeam": team["id"]}}, who).body["events"]
        assert [event["action"] for event in told] == [
            "keys.add",
            "teams.invite",
            "teams.member_add",
            "teams.create",
        ]
        assert {event["owner_id"] for event in told} == {team["id"]}
        assert "new@example.com" not in json.dumps(told)
    assert office.ask("events.list", {}, key["key"]).body["events"] == told
    denied = office.ask("events.list", {"selector": {"ByTeam": team["id"]}}, stranger)
    assert (denied.status, denied.code, denied.param) == (403, "NotTeamMember", "selector.ByTeam")
    assert office.ask("events.list", {}, ada).body["events"] == []
