"""Erasure: what names a person is gone from every table, and the books are as they were."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import msgspec
import pyotp
import pytest
from sqlalchemy import insert, update

from marketplace.auth import email_tokens
from marketplace.auth.oauth_tables import oauth_identity, oauth_state
from marketplace.keys.tables import api_key
from marketplace.ledger.audit import audit
from marketplace.notify import outbox
from marketplace.presets.tables import instance_preset
from marketplace.recipes.tables import recipe, recipe_tag
from marketplace.ssh_keys.tables import ssh_key
from marketplace.teams import service as teams
from marketplace.teams.rules import Actor
from marketplace.users import erasure
from marketplace.users import service as users
from marketplace.users.tables import users as users_table

if TYPE_CHECKING:
    from marketplace.store.db import Database, WriteUnit
    from tests.marketplace.conftest import Caller, Office, Shop

EMAIL = "Zeb.Quux@Erasure-Example.ORG"
NAME = "Zebediah Quux"
PERSONAL = ("zeb.quux", "erasure-example", "zebediah", "quux")
RETAINED = ("batch", "chain", "entry", "hold", "ledger_tx", "price_version", "quarantine", "usage_record", "account")


@pytest.fixture
def admin(office: Office) -> Caller:
    return office.person("admin")


@pytest.fixture
def zeb(office: Office) -> Caller:
    """A person who left traces everywhere."""
    made = msgspec.structs.replace(office.person(balance=10**9), email=EMAIL)
    with office.database.write() as unit:
        unit.execute(
            update(users_table)
            .where(users_table.c.id == made.id)
            .values(email=EMAIL, email_key=EMAIL.casefold(), name=NAME)
        )
    return made


def leave_traces(office: Office, zeb: Caller, admin: Caller, shop: Shop) -> str:
    """Use everything that keeps something about somebody; returns a team that has another member."""
    device = pyotp.parse_uri(office.ask("auth.totp_setup", {}, zeb).body["totp_uri"])
    assert isinstance(device, pyotp.TOTP)
    office.login(zeb)
    office.ask("auth.totp_confirm", {"code": device.at(office.now // 1_000_000)}, zeb)
    assert "partial_token" in office.ask("auth.login", {"email": EMAIL, "password": office.PASSWORD}).body
    office.ask("keys.add", {"name": f"{NAME}'s laptop"}, zeb)
    office.ask(
        "users.send_message", {"selector": {"ById": [zeb.id]}, "subject": f"Dear {NAME}", "message": NAME}, admin
    )
    render = {"service": "render", "provider": "acme", "amount": [1, 1]}
    assert office.ask("services.charge", render, office.service(), X_On_Behalf_Of=f"user:{zeb.id}").status == 201
    charged = shop.hold(zeb.account_id, 10**6)
    shop.apply(charged, shop.settle(charged.request_id, 100, 20, 30))
    other = office.person()
    with office.database.write() as unit:
        email_tokens.issue(unit, zeb.id, "reset", now=office.now, random=office.random)
        outbox.enqueue(
            unit, template="invite", to=EMAIL.upper(), values={"name": NAME}, now=office.now, random=office.random
        )
        unit.execute(
            insert(oauth_identity).values(issuer="https://id.example", subject="1", user_id=zeb.id, created_at=1)
        )
        unit.execute(
            insert(oauth_state).values(digest=b"d", provider="id", user_id=zeb.id, sealed=b"s", expires_at=2**60)
        )
        _leave_shapes(unit, zeb)
        alone = teams.create(unit, name="alone", owner_id=zeb.id, now=office.clock(), random=office.random)
        shared = teams.create(unit, name="shared", owner_id=zeb.id, now=office.clock(), random=office.random)
        joined = users.find(unit, other.id)
        assert joined is not None
        teams.add_member(unit, shared.id, Actor(zeb.id, "Owner"), joined, "Member", now=office.clock())
        theirs = teams.create(unit, name="theirs", owner_id=other.id, now=office.clock(), random=office.random)
        teams.invite(unit, theirs.id, Actor(other.id, "Owner"), EMAIL, "Member", inviter=other.id, now=office.clock())
        unit.execute(update(api_key).where(api_key.c.id == other.key_id).values(created_by=zeb.id))
    assert alone.id != shared.id
    return shared.id


def _leave_shapes(unit: WriteUnit, zeb: Caller) -> None:
    """A key, a recipe and a preset of theirs."""
    mine = {"owner_kind": "user", "owner_id": zeb.id, "created_at": 1}
    key = {"public_key": f"ssh-ed25519 AAAA {EMAIL}", "fingerprint": "SHA256:x"}
    unit.execute(insert(ssh_key).values(id="k", name="laptop", **mine, **key))
    details = {"description": "", "kind": "Docker", "details": f'{{"image": "{NAME}"}}'}
    unit.execute(insert(recipe).values(id="r", name=NAME, **mine, **details))
    unit.execute(insert(recipe_tag).values(recipe_id="r", tag=NAME))
    shape = {"gpu_count": 1, "vcpu": 4, "dram": 1, "disk": 1}
    unit.execute(
        insert(instance_preset).values(id="p", user_id=zeb.id, shape_hash="h", created_at=1, last_used_at=1, **shape)
    )


def erase(office: Office, who: Caller, admin: Caller, *, dry_run: bool = False) -> Any:
    return office.ask("users.delete", {"user_id": who.id, "reason": f"asked by {EMAIL}", "dry_run": dry_run}, admin)


def said(value: object) -> str:
    return (value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)).casefold()


def test_nothing_names_the_person_and_the_books_are_as_they_were(
    office: Office, zeb: Caller, admin: Caller, make_shop: Callable[[Database], Shop]
) -> None:
    shop = make_shop(office.database)
    team_id = leave_traces(office, zeb, admin, shop)
    before = shop.dump()
    assert any(part in said(value) for part in PERSONAL for row in before["users"] for value in row)

    rehearsed = erase(office, zeb, admin, dry_run=True)
    assert rehearsed.status == 200 and rehearsed.body["dry_run"] is True
    assert shop.dump() == before

    done = erase(office, zeb, admin)
    assert done.status == 200 and done.body["dry_run"] is False
    moments = ("started_at", "finished_at")
    first, second = (
        {name: value for name, value in answer.body["report"].items() if name not in moments}
        for answer in (rehearsed, done)
    )
    assert first == second
    after = shop.dump()
    for table, rows in after.items():
        for row in rows:
            assert not [value for value in row for part in PERSONAL if part in said(value)], table
    for table in RETAINED:
        assert after[table] == before[table], table
    assert len(before["event"]) == len(after["event"]) - 3  # the erasure, and two teams that were left
    with office.database.read() as unit:
        assert audit(unit, now=office.now).clean
        assert teams.find(unit, team_id) is not None
        assert [member.role for member in teams.members(unit, [team_id])] == ["Owner"]

    report = done.body["report"]
    assert report["retained_account_id"] == zeb.account_id and report["requester_admin_id"] == admin.id
    assert {name: count for name, count in report["hard_deleted"].items() if count} == {
        "api_keys": 2,
        "sessions": 1,
        "partial_logins": 1,
        "second_factors": 1,
        "email_tokens": 1,
        "identities": 1,
        "sign_ins": 1,
        "mails": 2,
        "invites": 1,
        "ssh_keys": 1,
        "recipes": 1,
        "instance_presets": 1,
    }
    assert report["anonymized"] == {
        "fraud_activities": 0,
        "team_memberships": 2,
        "team_api_keys_creator_nulled": 1,
        "usage_payout_tx_nulled": 1,
        "service_usage_payout_tx_nulled": 1,
    }
    assert report["cleanup_failures"] == []


def test_whoever_is_erased_is_nobody_any_more(office: Office, zeb: Caller, admin: Caller) -> None:
    token = office.login(zeb)
    assert erase(office, zeb, admin).status == 200
    assert office.ask("auth.me", {}, token).code == "InvalidToken"
    assert office.ask("auth.me", {}, zeb).code == "InvalidApiKey"
    refused = office.ask("auth.login", {"email": EMAIL, "password": office.PASSWORD})
    assert (refused.status, refused.code) == (401, "InvalidCredentials")
    again = erase(office, zeb, admin)
    assert (again.status, again.code, again.param) == (404, "UserNotFound", "user_id")
    assert erase(office, zeb, admin, dry_run=True).code == "UserNotFound"
    assert office.ask("users.update_role", {"user_id": zeb.id, "role": "admin"}, admin).code == "UserNotFound"
    credit = {"selector": {"ByUserIds": [zeb.id]}, "credit_limit": 1}
    assert office.ask("account.update_credit_limit", credit, admin).code == "UserNotFound"
    funds = {"account": {"ByUserIds": [zeb.id]}, "amount": 1}
    assert office.ask("account.transactions_create_external", funds, admin).code == "UserNotFound"
    assert office.ask("users.list", {"selector": {"ById": [zeb.id]}}, admin).body["total"] == 0
    assert office.ask("users.search", {"query": "quux"}, admin).body["results"] == []


def test_the_address_is_free_for_a_new_person(office: Office, zeb: Caller, admin: Caller) -> None:
    erase(office, zeb, admin)
    added = office.ask("users.add", {"email": EMAIL.lower(), "name": "Zoe"}, admin)
    assert added.status == 200 and added.body["user_id"] != zeb.id
    with office.database.read() as unit:
        user = users.find_by_email(unit, EMAIL)
    assert user is not None and user.account_id != zeb.account_id
    assert erase(office, msgspec.structs.replace(zeb, id=user.id), admin).status == 200  # twice the same address


def protected(answer: Any) -> list[str]:
    assert (answer.status, answer.code, answer.param) == (409, "UserProtected", "user_id")
    return [item["reason"] for item in answer.body["error"]["details"]["reasons"]]


@pytest.mark.parametrize("dry_run", [True, False])
def test_the_root_of_a_provider_is_protected(office: Office, zeb: Caller, admin: Caller, dry_run: bool) -> None:
    made = office.ask("providers.create", {"name": "acme"}, admin).body["provider"]["id"]
    member = {"provider_id": made, "selector": {"ById": zeb.id}}
    office.ask("providers.members_add", {**member, "is_root": True}, admin)
    refused = erase(office, zeb, admin, dry_run=dry_run)
    assert protected(refused) == ["ProviderRoot"]
    assert refused.body["error"]["details"]["reasons"][0]["ids"] == [made]
    office.ask("providers.members_add", {**member, "is_root": False}, admin)
    report = erase(office, zeb, admin, dry_run=dry_run).body["report"]
    assert report["hard_deleted"]["provider_memberships"] == 1


def test_whoever_has_something_running_is_protected(
    office: Office, zeb: Caller, admin: Caller, make_shop: Callable[[Database], Shop]
) -> None:
    shop = make_shop(office.database)
    hold = shop.hold(zeb.account_id, 10**6)
    shop.apply(hold)
    before = shop.dump()
    refused = erase(office, zeb, admin)
    assert protected(refused) == ["ActiveExecutors"]
    assert refused.body["error"]["details"]["reasons"][0]["ids"] == [hold.request_id]
    assert shop.dump() == before
    shop.apply(shop.settle(hold.request_id, 1, 0, 1))
    assert erase(office, zeb, admin).status == 200


@pytest.mark.parametrize("whose", ["person", "team"])
def test_whoever_leaves_machines_running_is_protected(
    office: Office, zeb: Caller, admin: Caller, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = office.team(zeb)
    account_id = team.account_id if whose == "team" else zeb.account_id

    def running(unit: object, account_ids: Collection[str]) -> dict[str, int]:
        return {account_id: 1} if account_id in account_ids else {}

    monkeypatch.setattr(erasure, "live_instances", running)
    refused = erase(office, zeb, admin)
    assert protected(refused) == ["ActiveExecutors"]
    assert refused.body["error"]["details"]["reasons"][0]["ids"] == ([team.id] if whose == "team" else [])
    if whose == "team":  # somebody else looks after them
        member = office.person()
        with office.database.write() as unit:
            other = users.find(unit, member.id)
            assert other is not None
            teams.add_member(unit, team.id, Actor(zeb.id, "Owner"), other, "Member", now=office.clock())
        assert erase(office, zeb, admin).status == 200


def test_a_request_that_the_books_hear_of_later_is_still_charged(
    office: Office, zeb: Caller, admin: Caller, make_shop: Callable[[Database], Shop]
) -> None:
    shop = make_shop(office.database)
    assert erase(office, zeb, admin).status == 200
    hold = shop.hold(zeb.account_id, 10**6)
    assert shop.apply(hold, shop.settle(hold.request_id, 10, 0, 10)).settled == 1
    assert shop.state(zeb.account_id).posted == 10**9 - 30
    assert shop.audit().clean


def test_the_last_admin_is_protected(office: Office, admin: Caller) -> None:
    assert protected(erase(office, admin, admin)) == ["LastAdmin"]
    second = office.person("admin")
    assert erase(office, admin, second).status == 200
    assert protected(erase(office, second, second)) == ["LastAdmin"]


def test_others_keep_what_is_theirs(office: Office, zeb: Caller, admin: Caller) -> None:
    other = office.person(balance=10**9)
    session = office.login(other)
    erase(office, zeb, admin)
    assert office.ask("auth.me", {}, session).body["id"] == other.id
    assert office.ask("account.info", {}, other).body["balance"] == 100


def test_events_hold_neither_reasons_nor_addresses(office: Office, zeb: Caller, admin: Caller) -> None:
    """What an admin writes as the reason, and the addresses of callers, are in no event."""
    erase(office, zeb, admin)
    events = office.ask("events.list", {"selector": "All", "limit": 100}, admin).body["events"]
    told = str(events)
    assert events[0]["action"] == "users.delete" and events[0]["subject_id"] == zeb.id
    for secret in ("198.51.100.1", "asked by", EMAIL):
        assert secret not in told
