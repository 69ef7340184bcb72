"""Who belongs to a team: members, invites and roles, one after the other and at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select

from marketplace.http.limits import MAIL_PER_EMAIL
from marketplace.notify.rendering import render
from marketplace.notify.tables import outbox
from marketplace.teams import membership
from marketplace.teams import service as teams
from marketplace.teams.tables import team_invite
from marketplace.users import service as users
from marketplace.users.tables import users as people

if TYPE_CHECKING:
    from tests.marketplace.conftest import Answer, Caller, Office


@pytest.fixture
def ada(office: Office) -> Caller:
    """The owner."""
    return office.person()


@pytest.fixture
def team(office: Office, ada: Caller) -> Caller:
    """A team of ada's."""
    return office.team(owner=ada, name="research")


def add(office: Office, who: Caller, team: Caller, email: str, role: str = "Member", **headers: str) -> Answer:
    return office.ask("teams.members_add", {"team_id": team.id, "email": email, "role": role}, who, **headers)


def update(office: Office, who: Caller, team: Caller, selector: dict[str, str], role: str) -> Answer:
    return office.ask("teams.members_update", {"team_id": team.id, "selector": selector, "role": role}, who)


def remove(office: Office, who: Caller, team: Caller, selector: dict[str, str]) -> Answer:
    return office.ask("teams.members_remove", {"team_id": team.id, "selector": selector}, who)


def roles(office: Office, team: Caller) -> dict[str, str]:
    with office.database.read() as unit:
        return {one.user_id: one.role for one in teams.members(unit, [team.id])}


def mails(office: Office) -> list[Any]:
    with office.database.read() as unit:
        return list(unit.select(select(outbox).order_by(outbox.c.created_at)))


def verify(office: Office, email: str) -> users.User:
    """Somebody registers with an address and confirms it."""
    with office.database.write() as unit:
        return users.create(
            unit, email=email, role="user", password_hash=None, now=office.clock(), random=office.random, verified=True
        )


def join(office: Office, user: users.User) -> int:
    return office.database.transact(
        lambda unit: teams.join_by_invites(unit, user, now=office.clock(), random=office.random)
    )


def at_once(*asks: Callable[[], Any]) -> list[Any]:
    """Do these from threads that begin together."""
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


def test_somebody_with_an_account_is_a_member_at_once(office: Office, ada: Caller, team: Caller) -> None:
    eve = office.person()
    body = {"selector": {"ByTeam": team.id}}
    assert office.ask("account.info", body, eve).code == "NotTeamMember"
    answer = add(office, ada, team, eve.email.upper(), "Admin")
    assert answer.status == 200 and answer.body.keys() == {"Member"}
    member = answer.body["Member"]
    assert (member["user_id"], member["email"], member["role"]) == (eve.id, eve.email, "Admin")
    assert office.ask("account.info", body, eve).status == 200
    twice = add(office, ada, team, eve.email)
    assert (twice.status, twice.code, twice.param) == (409, "AlreadyTeamMember", "email")
    assert mails(office) == []
    removed = remove(office, ada, team, {"ById": eve.id})
    assert (removed.status, removed.body) == (204, None) and "Content-Type" not in removed.headers
    assert office.ask("account.info", body, eve).code == "NotTeamMember"
    gone = remove(office, ada, team, {"ById": eve.id})
    assert (gone.status, gone.code, gone.param) == (404, "MemberNotFound", "selector")


def test_adding_members_takes_the_protocol_that_knows_it(office: Office, ada: Caller, team: Caller) -> None:
    old = add(office, ada, team, "new@example.com", X_Protocol_Version="v055")
    assert (old.status, old.code) == (400, "UnsupportedVersion")
    assert add(office, ada, team, "new@example.com", X_Protocol_Version="v056").status == 200
    data = {"team_id": team.id, "email": "two@example.com"}
    enveloped = office.ask("teams.members_add", {"version": "v056", "data": data}, ada).body
    assert enveloped["version"] == "v056" and enveloped["data"]["Invite"]["email"] == "two@example.com"


def test_everybody_else_is_invited_and_joins_once_the_address_is_theirs(
    office: Office, ada: Caller, team: Caller
) -> None:
    answer = add(office, ada, team, "New@Example.com", "Admin")
    assert answer.body.keys() == {"Invite"}
    invite = answer.body["Invite"]
    assert (invite["email"], invite["role"], invite["team_name"], invite["invited_by_id"]) == (
        "New@Example.com",
        "Admin",
        "research",
        ada.id,
    )
    assert office.ask("teams.get", {"team_id": team.id}, ada).body["invites"] == [invite]
    [mail] = mails(office)
    assert (mail.template, mail.recipient) == ("invite", "New@Example.com") and "research" in mail.payload
    new = verify(office, "new@example.com")
    assert roles(office, team) == {ada.id: "Owner"}
    assert join(office, new) == 1 and join(office, new) == 0
    assert roles(office, team) == {ada.id: "Owner", new.id: "Admin"}
    got = office.ask("teams.get", {"team_id": team.id}, ada).body
    assert got["invites"] == [] and len(got["members"]) == 2
    told = office.ask("events.list", {"selector": {"ByTeam": team.id}, "limit": 1}, ada).body["events"][0]
    assert (told["action"], told["actor_id"]) == ("teams.join", new.id)


def test_an_account_whose_address_is_not_confirmed_is_invited(office: Office, ada: Caller, team: Caller) -> None:
    eve = office.person()
    with office.database.write() as unit:
        unit.execute(people.update().where(people.c.id == eve.id).values(email_verified_at=None))
    assert add(office, ada, team, eve.email).body.keys() == {"Invite"}
    assert eve.id not in roles(office, team)


def test_inviting_again_changes_the_role_and_reminds_at_most_hourly(office: Office, ada: Caller, team: Caller) -> None:
    for role in ("Member", "Admin"):
        assert add(office, ada, team, "new@example.com", role).body["Invite"]["role"] == role
    assert len(mails(office)) == 1
    office.wait(3600)
    add(office, ada, team, "NEW@example.com", "Owner")
    assert len(mails(office)) == 2
    assert [one["role"] for one in office.ask("teams.get", {"team_id": team.id}, ada).body["invites"]] == ["Owner"]


def test_an_invite_is_changed_and_cancelled_by_its_address(office: Office, ada: Caller, team: Caller) -> None:
    selector = {"ByEmail": "new@example.com"}
    for missing in (remove(office, ada, team, selector), update(office, ada, team, selector, "Admin")):
        assert (missing.status, missing.code, missing.param) == (404, "InviteNotFound", "selector")
    add(office, ada, team, "new@example.com")
    assert update(office, ada, team, {"ByEmail": "NEW@example.com"}, "Admin").status == 204
    assert office.ask("teams.get", {"team_id": team.id}, ada).body["invites"][0]["role"] == "Admin"
    assert remove(office, ada, team, selector).status == 204
    assert office.ask("teams.get", {"team_id": team.id}, ada).body["invites"] == []
    assert join(office, verify(office, "new@example.com")) == 0


def test_an_admin_neither_makes_nor_removes_an_owner(office: Office, ada: Caller, team: Caller) -> None:
    eve, bob = office.person(), office.person()
    add(office, ada, team, eve.email, "Admin")
    add(office, ada, team, "owner@example.com", "Owner")
    for denied in (
        add(office, eve, team, bob.email, "Owner"),
        add(office, eve, team, "x@example.com", "Owner"),
        add(office, eve, team, "owner@example.com", "Member"),
        remove(office, eve, team, {"ById": ada.id}),
        remove(office, eve, team, {"ByEmail": "owner@example.com"}),
        update(office, eve, team, {"ById": ada.id}, "Member"),
        update(office, eve, team, {"ById": eve.id}, "Owner"),
        update(office, eve, team, {"ByEmail": "owner@example.com"}, "Member"),
        office.ask("teams.transfer", {"team_id": team.id, "user_id": eve.id}, eve),
        office.ask("teams.delete", {"team_id": team.id}, eve),
    ):
        assert (denied.status, denied.code) == (403, "PermissionDenied")
    assert add(office, eve, team, bob.email, "Admin").status == 200
    assert update(office, eve, team, {"ById": bob.id}, "Member").status == 204
    assert remove(office, bob, team, {"ById": eve.id}).code == "PermissionDenied"
    assert remove(office, bob, team, {"ById": bob.id}).status == 204
    assert roles(office, team) == {ada.id: "Owner", eve.id: "Admin"}


def test_the_last_owner_stays_until_there_is_another(office: Office, ada: Caller, team: Caller) -> None:
    eve, admin = office.person(), office.person("admin")
    add(office, ada, team, eve.email)
    for who in (ada, admin):
        for refused in (
            remove(office, who, team, {"ById": ada.id}),
            update(office, who, team, {"ById": ada.id}, "Admin"),
        ):
            assert (refused.status, refused.code) == (409, "LastOwner")
    assert office.ask("teams.leave", {"team_id": team.id}, ada).code == "LastOwner"
    unknown = office.ask("teams.transfer", {"team_id": team.id, "user_id": "nobody"}, ada)
    assert (unknown.status, unknown.code, unknown.param) == (404, "MemberNotFound", "user_id")
    assert office.ask("teams.transfer", {"team_id": team.id, "user_id": eve.id}, ada).body == {"id": team.id}
    assert roles(office, team) == {ada.id: "Admin", eve.id: "Owner"}
    assert office.ask("teams.leave", {"team_id": team.id}, ada).body == {"id": team.id}
    assert office.ask("teams.leave", {"team_id": team.id}, ada).code == "NotTeamMember"
    assert roles(office, team) == {eve.id: "Owner"}


def test_an_admin_of_the_platform_repairs_teams(office: Office, ada: Caller, team: Caller) -> None:
    eve, admin = office.person(), office.person("admin")
    assert add(office, admin, team, eve.email, "Owner").status == 200
    assert remove(office, admin, team, {"ById": ada.id}).status == 204
    assert roles(office, team) == {eve.id: "Owner"}
    missing = office.ask("teams.members_remove", {"team_id": "t", "selector": {"ById": "u"}}, admin)
    assert (missing.status, missing.code) == (404, "TeamNotFound")


def test_only_addresses_that_take_mail_are_invited(office: Office, ada: Caller, team: Caller) -> None:
    for email in ("a,b@example.com", "a@-example.com", '"a b"@example.com', "a@b@example.com"):
        answer = add(office, ada, team, email)
        assert (answer.status, answer.param) == (400, "email"), email
    assert mails(office) == []


def test_invites_are_few_for_each_person(office: Office, ada: Caller, team: Caller) -> None:
    codes = []
    for number in range(membership.INVITES_PER_PERSON.burst + 1):
        office.wait(1)
        answer = add(office, ada, team, f"n{number}@example.com")
        codes.append(answer.status)
    assert codes == [200] * membership.INVITES_PER_PERSON.burst + [429]
    assert len(mails(office)) == membership.INVITES_PER_PERSON.burst


def test_nobody_is_flooded_by_invites_that_are_taken_back(office: Office, ada: Caller, team: Caller) -> None:
    codes = []
    for _ in range(MAIL_PER_EMAIL.burst + 1):
        office.wait(1)
        codes.append(add(office, ada, team, "new@example.com").status)
        remove(office, ada, team, {"ByEmail": "new@example.com"})
    assert codes == [200] * MAIL_PER_EMAIL.burst + [429]
    assert len(mails(office)) == MAIL_PER_EMAIL.burst


def test_a_team_has_a_bound(office: Office, ada: Caller, team: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MAX_SIZE", 2)
    assert add(office, ada, team, "one@example.com").status == 200
    for email in ("two@example.com", office.person().email):
        full = add(office, ada, team, email)
        assert (full.status, full.code) == (409, "TeamFull")
    assert len(roles(office, team)) == 1 and len(mails(office)) == 1


def test_an_erased_person_leaves_every_team_to_somebody(office: Office, ada: Caller, team: Caller) -> None:
    eve, bob = office.person(), office.person()
    alone = office.team(owner=ada, name="alone")
    shared = office.team(owner=eve, name="shared")
    add(office, eve, shared, ada.email)
    add(office, ada, team, eve.email)
    add(office, ada, team, bob.email, "Admin")
    add(office, ada, team, "new@example.com")
    departures = office.database.transact(lambda unit: teams.leave_all(unit, ada.id, office.clock()))
    assert {one.team_id: (one.successor, one.closed) for one in departures} == {
        team.id: (bob.id, False),
        alone.id: (None, True),
        shared.id: (None, False),
    }
    assert roles(office, team) == {eve.id: "Member", bob.id: "Owner"} and roles(office, alone) == {}
    assert office.ask("teams.get", {"team_id": team.id}, bob).body["invites"][0]["invited_by_id"] is None
    assert office.ask("auth.me", {}, alone).code == "InvalidApiKey"
    assert office.ask("auth.me", {}, team).status == 200


def test_two_owners_who_demote_each_other_leave_one(office: Office, ada: Caller, team: Caller) -> None:
    owner = ada
    for _ in range(4):
        eve = office.person()
        add(office, owner, team, eve.email, "Owner")
        answers = at_once(
            partial(update, office, owner, team, {"ById": eve.id}, "Member"),
            partial(remove, office, eve, team, {"ById": owner.id}),
        )
        assert sorted(answer.status for answer in answers) == [204, 403], [answer.body for answer in answers]
        assert list(roles(office, team).values()).count("Owner") == 1
        owner = owner if roles(office, team).get(owner.id) == "Owner" else eve


def test_two_owners_who_leave_at_once_leave_one(office: Office, ada: Caller, team: Caller) -> None:
    eve = office.person()
    add(office, ada, team, eve.email, "Owner")
    answers = at_once(*(lambda who=who: office.ask("teams.leave", {"team_id": team.id}, who) for who in (ada, eve)))
    assert sorted(answer.status for answer in answers) == [200, 409]
    assert list(roles(office, team).values()) == ["Owner"]


def test_an_invite_taken_up_many_times_at_once_joins_once(office: Office, ada: Caller, team: Caller) -> None:
    other = office.team(owner=ada, name="other")
    for one in (team, other):
        add(office, ada, one, "new@example.com")
    new = verify(office, "new@example.com")
    assert sum(at_once(*(lambda: join(office, new) for _ in range(4)))) == 2
    assert roles(office, team)[new.id] == roles(office, other)[new.id] == "Member"
    with office.database.read() as unit:
        assert unit.select(select(team_invite)).all() == []


def test_an_invite_that_is_cancelled_while_it_is_taken_up_is_one_or_the_other(
    office: Office, ada: Caller, team: Caller
) -> None:
    add(office, ada, team, "new@example.com")
    new = verify(office, "new@example.com")
    cancelled, joined = at_once(
        lambda: remove(office, ada, team, {"ByEmail": "new@example.com"}), lambda: join(office, new)
    )
    assert (cancelled.status, joined) in ((204, 0), (404, 1))
    assert (new.id in roles(office, team)) == bool(joined)


def test_no_key_is_made_for_a_team_that_is_deleted_at_the_same_time(office: Office, ada: Caller) -> None:
    for _ in range(4):
        team = office.team(owner=ada)
        made, deleted = at_once(
            partial(office.ask, "keys.add", {"name": "ci", "team_id": team.id}, ada),
            partial(office.ask, "teams.delete", {"team_id": team.id}, ada),
        )
        assert deleted.status == 200 and made.status in (200, 403), made.body
        if made.status == 200:
            assert office.ask("auth.me", {}, made.body["key"]).code == "InvalidApiKey"


def test_the_invite_says_who_where_and_as_what() -> None:
    values = {"team": "R&D <x>", "inviter": "Ada", "role": "Admin", "platform": "Headrace", "base_url": "https://h"}
    mail = render("invite", values)
    assert mail.subject == "Headrace: you are invited to the team R&D <x>"
    assert "Ada invites you to join the team R&D <x> at Headrace as Admin." in mail.text and "https://h" in mail.text
    assert "R&amp;D &lt;x&gt;" in mail.html and "<x>" not in mail.html
