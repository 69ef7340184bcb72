"""Volumes of people who go, and of teams that end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from marketplace.accounts import service as accounts
from marketplace.ledger.audit import audit
from marketplace.ledger.money import NANO
from marketplace.volumes.tables import volume
from marketplace.workers.metering import Metering

if TYPE_CHECKING:
    from tests.marketplace.office import Caller, Office
    from tests.marketplace.yard import Yard


def make(office: Office, who: Caller, name: str, **more: Any) -> str:
    body = {"name": name, "size_gb": 1000, "datacenter": "acme-1", "volume_type_name": "standard", **more}
    answer = office.ask("volumes.create", body, who)
    assert answer.status == 201, answer.body
    return str(answer.body["volume"]["id"])


def offered(office: Office, yard: Yard) -> Caller:
    """A datacenter with volumes; returns an admin."""
    yard.node()
    admin = office.person("admin")
    kind = {"datacenter": "acme-1", "name": "standard", "cost_per_gb_per_month": 100}
    assert office.ask("volumes.types_add", kind, admin).status == 200
    return admin


def test_whoever_is_erased_leaves_no_volume(office: Office, yard: Yard) -> None:
    admin, ada = offered(office, yard), office.person(balance=NANO)
    alone = office.team(ada)
    with office.database.write() as unit:
        accounts.top_up(unit, alone.account_id, NANO, key="t", now=office.clock(), random=office.random)
    mine = make(office, ada, "ada-s", description="all about Ada")
    make(office, ada, "of-the-team", team_id=alone.id)
    office.wait(3600)
    asked = {"user_id": ada.id, "reason": "asked", "dry_run": False}
    answer = office.ask("users.delete", asked, admin)
    assert answer.status == 200 and answer.body["report"]["hard_deleted"]["volumes"] == 2, answer.body
    with office.database.read() as unit:
        rows = unit.select(select(volume.c.id, volume.c.status, volume.c.name, volume.c.description)).all()
        assert [tuple(row[1:]) for row in rows] == [("Deleted", row.id, None) for row in rows]
        assert audit(unit, now=office.now).clean
    assert yard.meter(mine).stopped_at is not None and yard.meter(mine).charged > 0


def test_a_team_with_volumes_is_not_deleted(office: Office, yard: Yard) -> None:
    admin, ada = offered(office, yard), office.person()
    team = office.team(ada)
    with office.database.write() as unit:
        accounts.set_credit_limit(unit, team.account_id, NANO)
    volume_id = make(office, ada, "data", team_id=team.id)
    refused = office.ask("teams.delete", {"team_id": team.id}, ada)
    assert (refused.code, refused.body["error"]["details"]["volumes"]) == ("TeamInUse", 1)
    office.ask("volumes.delete", {"volume_id": volume_id, "team_id": team.id}, ada)
    owed = -accounts_posted(office, team)
    if owed:
        body = {"account": {"ByTeamIds": [team.id]}, "amount": owed / 10_000_000, "description": ""}
        assert office.ask("account.transactions_create_external", body, admin).status == 200
    assert office.ask("teams.delete", {"team_id": team.id}, ada).status == 200


def accounts_posted(office: Office, who: Caller) -> int:
    with office.database.read() as unit:
        return accounts.get(unit, who.account_id).posted


def test_volumes_are_not_charged_every_minute(office: Office, yard: Yard) -> None:
    offered(office, yard)
    ada = office.person(balance=NANO)
    volume_id = make(office, ada, "data")
    office.wait(300)
    assert Metering(office.database, clock=office.clock, random=office.random).run() == 0
    assert yard.meter(volume_id).charged == 0
