"""A balance that runs out is told once, to the person or to every owner of the team."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import select

from marketplace.accounts import service as accounts
from marketplace.events.tables import event
from marketplace.ledger.money import NANO
from marketplace.settings import service as settings
from marketplace.teams import service as teams
from marketplace.teams.rules import Actor
from marketplace.users import service as users
from marketplace.workers import funds
from marketplace.workers.funds import FundsWatch

if TYPE_CHECKING:
    from tests.marketplace.conftest import Caller, Office, Post


def watch(office: Office) -> FundsWatch:
    return FundsWatch(office.database, clock=office.clock, random=office.random)


def put(office: Office, account_id: str, amount: int) -> None:
    """Bring an account to a balance, in whole units."""
    with office.database.write() as unit:
        change = amount * NANO - accounts.get(unit, account_id).posted
        if change:
            accounts.adjust(unit, account_id, change, key=str(office.clock()), now=office.clock(), random=office.random)


def told(office: Office, post: Post) -> list[str]:
    """Whom one pass tells."""
    watch(office).run()
    return [letter.to for letter in post.deliver()]


def test_a_fall_is_told_once_and_again_only_after_a_rise(office: Office, post: Post) -> None:
    ada = office.person(balance=6 * NANO)
    assert told(office, post) == []
    put(office, ada.account_id, 4)
    watch(office).run()
    (letter,) = post.deliver()
    assert letter.to == ada.email and "4 USD can still be spent" in letter.text and "7.5 USD" in letter.text
    for balance in (3, 0, 6, 4, 7, 1):  # up and down, never to 7.5
        put(office, ada.account_id, balance)
        assert told(office, post) == []
    put(office, ada.account_id, 8)
    assert told(office, post) == []
    put(office, ada.account_id, 4)
    assert told(office, post) == [ada.email]
    with office.database.read() as unit:
        noted = unit.select(select(event).where(event.c.action == "account.low_balance")).all()
    assert [(row.actor_kind, row.owner_id, row.subject_id) for row in noted] == [("system", ada.id, ada.account_id)] * 2
    mine = office.ask("events.list", {}, ada).body["events"]
    assert [item["action"] for item in mine] == ["account.low_balance"] * 2


def test_whoever_never_had_as_much_has_not_fallen(office: Office, post: Post) -> None:
    office.person()
    poor = office.person(balance=1 * NANO)
    assert told(office, post) == []
    put(office, poor.account_id, 0)
    assert told(office, post) == []


def test_unlimited_accounts_and_credit(office: Office, post: Post) -> None:
    ada, bob = office.person(balance=20 * NANO), office.person(balance=20 * NANO)
    assert told(office, post) == []
    with office.database.write() as unit:
        accounts.set_unlimited(unit, ada.account_id, True)
        accounts.set_credit_limit(unit, bob.account_id, 10 * NANO)
    put(office, ada.account_id, 0)
    put(office, bob.account_id, 0)
    assert told(office, post) == []  # the credit is still there to spend
    put(office, bob.account_id, -6)
    assert told(office, post) == [bob.email]
    with office.database.write() as unit:
        accounts.set_unlimited(unit, ada.account_id, False)
    assert told(office, post) == [ada.email]


def test_every_owner_of_a_team_is_told_and_nobody_else(office: Office, post: Post) -> None:
    one, two, member = office.person(), office.person(), office.person()
    with office.database.write() as unit:
        team = teams.create(unit, name="Ops\r\nBcc: x@y", owner_id=one.id, now=office.clock(), random=office.random)
        for caller, role in ((two, "Owner"), (member, "Admin")):
            user = users.find(unit, caller.id)
            assert user is not None
            teams.add_member(unit, team.id, Actor(one.id, "Owner"), user, role, now=office.clock())  # type: ignore[arg-type] # a role
    put(office, team.account_id, 10)
    assert told(office, post) == []
    put(office, team.account_id, 2)
    assert sorted(told(office, post)) == sorted([one.email, two.email])
    assert "of the team Ops Bcc: x@y" in post.letters[0].subject


def test_the_threshold_is_a_setting_and_zero_tells_nobody(office: Office, post: Post) -> None:
    ada = office.person(balance=20 * NANO)
    told(office, post)
    for threshold, expected in ((0, []), (30 * NANO, [ada.email])):
        with office.database.write() as unit:
            settings.change(unit, {"low_balance_threshold": threshold}, office.clock())
        assert told(office, post) == expected


def test_eight_passes_at_once_tell_once(office: Office, post: Post) -> None:
    people = [office.person(balance=9 * NANO) for _ in range(5)]
    told(office, post)
    for person in people:
        put(office, person.account_id, 1)
    start = threading.Barrier(8)

    def work() -> None:
        start.wait(10)
        watch(office).run()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(letter.to for letter in post.deliver()) == sorted(person.email for person in people)


def test_a_pass_is_bounded_and_the_round_reaches_everybody(
    office: Office, post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    people: list[Caller] = [office.person(balance=9 * NANO) for _ in range(5)]
    monkeypatch.setattr(funds, "PASS", 2)
    round_trip = watch(office)
    passes = [round_trip.run() for _ in range(4)]
    assert sum(passes) == 5 and max(passes) <= 2
    for person in people:
        put(office, person.account_id, 1)
    for _ in range(4):
        assert round_trip.run() <= 2
    assert sorted(letter.to for letter in post.deliver()) == sorted(person.email for person in people)
