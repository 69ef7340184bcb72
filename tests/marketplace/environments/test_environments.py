"""Saved environments: shown while their node has the disk, used by one at a time, over in time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select

from marketplace.agent.inventory_wire import RetainedDisk
from marketplace.environments import service as environments
from marketplace.environments.service import EnvironmentGoneError
from marketplace.environments.tables import saved_environment
from marketplace.instances.tables import instance
from marketplace.workers import expiry

if TYPE_CHECKING:
    from tests.marketplace.office import Caller, Office
    from tests.marketplace.yard import Yard

SECOND = 1_000_000
SIZE = 5 << 30


def told(office: Office, yard: Yard, node_id: str, *ids: str, seconds: int = 3600) -> None:
    """Let a node report the disks that it keeps."""
    until = office.now + seconds * SECOND
    disks = [RetainedDisk(instance_id=one, disk_bytes=SIZE, expires_at=until, os_label="debian") for one in ids]
    with office.database.write() as unit:
        rows = unit.select(select(instance).where(instance.c.id.in_(ids)))
        environments.observed(unit, node_id, disks, {row.id: row for row in rows}, yard.scene())


def kept(office: Office, yard: Yard, who: Caller, node_id: str, **more: Any) -> str:
    """The disk of something that ran and is over."""
    instance_id = yard.instance(who, node_id, **more)
    yard.end(instance_id)
    told(office, yard, node_id, instance_id)
    return instance_id


def listed(office: Office, who: Caller, **more: Any) -> list[str]:
    answer = office.ask("instances.saved_environments_list", more, who)
    assert answer.status == 200, answer.body
    return [row["id"] for row in answer.body["saved_environments"]]


def claim(office: Office, yard: Yard, who: Caller, environment_id: str, instance_id: str) -> None:
    with office.database.write() as unit:
        environments.claim(unit, environment_id, who.account_id, instance_id, yard.scene(), owner_id=who.id)


def row(office: Office, environment_id: str) -> Any:
    with office.database.read() as unit:
        wanted = select(saved_environment).where(saved_environment.c.id == environment_id)
        return unit.select(wanted).one()


def expire(office: Office, **more: Any) -> int:
    return expiry.of_environments(office.database, clock=office.clock, random=office.random).run(**more)


def test_what_is_shown(office: Office, yard: Yard) -> None:
    ada, eve = office.person(), office.person()
    team = office.team(ada)
    node_id = yard.node()
    yard.variant()
    mine = kept(office, yard, ada, node_id, variant="h200.1", name="lab")
    answer = office.ask("instances.saved_environments_list", {}, ada).body
    (shown,) = answer["saved_environments"]
    assert (shown["id"], shown["name"], shown["node_id"], shown["node_hostname"]) == (mine, "lab", node_id, "g07")
    assert (shown["original_variant_name"], shown["os_label"]) == ("h200.1", "debian")
    assert shown["disk_size_bytes"] == SIZE and answer["next_cursor"] is None
    assert listed(office, eve) == listed(office, team) == []
    instance_id = yard.instance(team, node_id, team=True)
    yard.end(instance_id)
    told(office, yard, node_id, mine, instance_id)
    assert listed(office, team) == listed(office, ada, team_id=team.id) == [instance_id]
    foreign = office.ask("instances.saved_environments_list", {"team_id": team.id}, eve)
    assert (foreign.status, foreign.code) == (403, "NotTeamMember")
    more = yard.instance(ada, node_id)
    yard.end(more)
    told(office, yard, node_id, mine, instance_id, more)
    first = office.ask("instances.saved_environments_list", {"limit": 1}, ada).body
    assert [one["id"] for one in first["saved_environments"]] == [more]
    assert listed(office, ada, limit=1, cursor=first["next_cursor"]) == [mine]


def test_a_disk_that_vanished_is_not_offered(office: Office, yard: Yard) -> None:
    """Disks that were gone were offered once, because only a timer was looked at."""
    ada, node_id = office.person(), yard.node()
    first = kept(office, yard, ada, node_id)
    second = yard.instance(ada, node_id)
    yard.end(second)
    assert listed(office, ada) == [first], "nobody has seen the other one's disk"
    told(office, yard, node_id, second)
    assert listed(office, ada) == [second] and row(office, first).state == "Erased"
    told(office, yard, node_id)
    assert listed(office, ada) == []
    for gone in (first, second, "nothing"):
        with pytest.raises(EnvironmentGoneError):
            claim(office, yard, ada, gone, yard.instance(ada, node_id, status="Initializing"))
    told(office, yard, node_id, first)
    assert listed(office, ada) == [], "what was erased stays so"


def test_one_at_a_time_uses_a_disk(office: Office, yard: Yard) -> None:
    ada, eve, node_id = office.person(), office.person(), yard.node()
    disk = kept(office, yard, ada, node_id)
    with pytest.raises(EnvironmentGoneError):
        claim(office, yard, eve, disk, yard.instance(eve, node_id, status="Initializing"))
    made = [yard.instance(ada, node_id, status="Initializing") for _ in range(3)]

    def attempt(instance_id: str) -> bool:
        try:
            claim(office, yard, ada, disk, instance_id)
        except EnvironmentGoneError:
            return False
        return True

    with ThreadPoolExecutor(3) as pool:
        assert sorted(pool.map(attempt, made)) == [False, False, True]
    assert listed(office, ada) == [] and row(office, disk).claimed_by in made


def test_what_ran_on_it_has_used_it_up(office: Office, yard: Yard) -> None:
    ada, node_id = office.person(), yard.node()
    disk = kept(office, yard, ada, node_id)
    made = yard.instance(ada, node_id, status="Initializing")
    claim(office, yard, ada, disk, made)
    told(office, yard, node_id)
    with office.database.write() as unit:
        environments.on_active(unit, made, yard.scene(), owner_id=ada.id)
        environments.on_failed(unit, made, yard.scene(), owner_id=ada.id)
    assert row(office, disk).state == "Consumed" and listed(office, ada) == []
    yard.activate(made)
    yard.end(made)
    told(office, yard, node_id, made)
    assert listed(office, ada) == [made], "its own disk is the next environment"


@pytest.mark.parametrize("moved", [False, True])
def test_a_disk_comes_back_when_its_use_failed(moved: bool, office: Office, yard: Yard) -> None:
    ada, node_id = office.person(), yard.node()
    disk = kept(office, yard, ada, node_id)
    made = yard.instance(ada, node_id, status="Initializing")
    claim(office, yard, ada, disk, made)
    if moved:
        told(office, yard, node_id)
    with office.database.write() as unit:
        environments.on_failed(unit, made, yard.scene(), owner_id=ada.id)
    assert listed(office, ada) == ([] if moved else [disk]), "shown again once its node has it"
    told(office, yard, node_id, disk)
    assert listed(office, ada) == [disk]
    claim(office, yard, ada, disk, yard.instance(ada, node_id, status="Initializing"))


def test_a_disk_comes_back_with_its_node(office: Office, yard: Yard) -> None:
    ada, node_id = office.person(), yard.node()
    disk = kept(office, yard, ada, node_id)
    made = yard.instance(ada, node_id, status="Initializing")
    claim(office, yard, ada, disk, made)
    yard.end(made)  # its node was lost: nobody could say what became of the disk
    assert listed(office, ada) == []
    told(office, yard, node_id, disk)
    assert listed(office, ada) == [disk]


def test_environments_end_in_time_and_once(office: Office, yard: Yard) -> None:
    ada, node_id = office.person(), yard.node()
    first, used, lost = (yard.instance(ada, node_id) for _ in range(3))
    for instance_id in (first, used, lost):
        yard.end(instance_id)
    told(office, yard, node_id, first, used, lost, seconds=100)
    made = [yard.instance(ada, node_id, status="Initializing") for _ in range(2)]
    claim(office, yard, ada, used, made[0])
    claim(office, yard, ada, lost, made[1])
    yard.end(made[1])
    assert expire(office) == 0
    office.wait(100)
    assert listed(office, ada) == [], "not a moment longer, worker or not"
    with pytest.raises(EnvironmentGoneError):
        claim(office, yard, ada, first, made[0])
    assert expire(office, stopping=lambda: True) == 0
    assert [expire(office), expire(office)] == [2, 0]
    assert [row(office, one).state for one in (first, used, lost)] == ["Erased", "Claimed", "Erased"]
    events = office.ask("events.list", {"limit": 100}, ada).body["events"]
    assert [event["action"] for event in events].count("environments.erase") == 2
