"""Erasure of somebody who had machines: whatever they could write anywhere is in no column of any table any more, and
the sums are as they were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import select

from marketplace.agent.inventory_wire import RetainedDisk
from marketplace.instances.tables import instance
from marketplace.ledger.money import NANO
from marketplace.ledger.tables import account
from marketplace.store.base import metadata
from marketplace.teams import service as teams
from marketplace.teams.rules import Actor
from marketplace.teams.tables import team as team_table
from marketplace.users import service as users
from marketplace.workers.metering import Metering
from tests.marketplace.office import Caller, Office
from tests.marketplace.rack import GIB, Agent, Rack

if TYPE_CHECKING:
    from collections.abc import Callable

    from marketplace.store.db import Database
    from tests.marketplace.conftest import Shop

MARK = "zebmark"
"""In everything that the person writes."""
KEY = f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f {MARK}@laptop"
TOLD = {
    "name": f"{MARK}-box",
    "tags": [MARK, "training"],
    "cluster_name": f"{MARK}-cluster",
}
FUNDS = {"amount": 100_000, "description": "x"}
LEFT = {
    ("instance", "name"),
    ("instance", "cluster_name"),
    ("instance", "config"),
    ("instance", "failure_message"),
    ("instance_tag", "tag"),
    ("saved_environment", "name"),
    ("saved_environment", "os_label"),
    ("rental_meter", "resource_name"),
    ("volume", "name"),
    ("volume", "description"),
    ("volume_attachment", "mount_path"),
    ("quota", "name"),
    ("ssh_key", "name"),
    ("ssh_key", "public_key"),
    ("recipe", "name"),
    ("recipe", "description"),
    ("recipe", "details"),
    ("recipe", "image_url"),
    ("team", "name"),
    ("team", "name_key"),
    ("team", "description"),
    ("api_key", "name"),
    ("users", "email"),
    ("users", "email_key"),
    ("users", "name"),
    ("idempotency", "key"),
    ("idempotency", "answer"),
}
"""Where the person's own words were found before: every column that somebody who rents writes to."""


def vm(**more: Any) -> dict[str, Any]:
    image = {"image_url": f"https://{MARK}.example/disk.qcow2", "cloudinit_commands": f"echo {MARK}"}
    return {"VirtualMachine": {**image, "ssh_key": {"PublicKeys": [KEY]}, **more}}


def found(office: Office) -> set[tuple[str, str]]:
    """Every column that has the mark in it."""
    columns = set()
    with office.database.read() as unit:
        for table in metadata.sorted_tables:
            for row in unit.select(select(table)):
                for name, value in row._mapping.items():
                    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
                    if MARK in text.casefold():
                        columns.add((table.name, str(name)))
    return columns


def over(rack: Rack, node: Agent, who: Caller, machine: str) -> None:
    rack.terminate(who, machine)
    node.clean()


def rent_and_leave(rack: Rack, node: Agent, zeb: Caller, admin: Caller) -> str:
    """Use all that somebody who rents can write to; returns a machine that they rented for a team that goes on."""
    office = rack.office

    def did(name: str, body: dict[str, Any], who: Caller = zeb, **headers: str) -> Any:
        office.wait(10)
        answer = office.ask(name, body, who, **headers)
        assert answer.status < 300, (name, answer.body)
        return answer.body

    did("ssh_keys.add", {"name": f"{MARK} laptop", "public_key": KEY})
    words = {"name": f"{MARK} box", "description": MARK}
    did("recipes.add", {**words, "details": {"VirtualMachine": {"image_url": f"https://{MARK}.example/r.qcow2"}}})
    did("volumes.types_add", {"datacenter": "acme-1", "name": "disk", "cost_per_gb_per_month": 0}, admin)
    disk = {"name": f"{MARK}-data", "description": MARK, "size_gb": 7, "datacenter": "acme-1"}
    made = did("volumes.create", {**disk, "volume_type_name": "disk"}, Idempotency_Key=f"{MARK}-1")["volume"]["id"]
    mounts = {"Mounts": [{"volume": {"ById": [made]}, "mount_path": f"/{MARK}"}]}

    first = rack.rented(zeb, config=vm(volumes=mounts), recipe=f"{MARK} box", **TOLD)
    node.bring_up(first)
    office.wait(3600)
    node.poll()
    assert Metering(office.database, clock=office.clock, random=office.random).run() == 1
    rack.terminate(zeb, first)
    node.disks = [RetainedDisk(instance_id=first, disk_bytes=1, expires_at=2**60, os_label=f"https://{MARK}.example/")]
    node.clean()

    docker = {"image": f"{MARK}.example/image", "command": [MARK], "env": [[MARK, MARK]]}
    login = {"UsernamePassword": {"username": MARK, "password": MARK}}
    second = rack.rented(zeb, "h200.0", config={"Docker": {**docker, "registry_auth": login}}, **TOLD)
    node.fails(second, "BadImage", f"{MARK}.example/image is no image.")
    node.clean()

    team_id = did("teams.create", {"name": f"{MARK}'s own", "description": MARK})["id"]
    did("account.transactions_create_external", {**FUNDS, "account": {"ByTeamIds": [team_id]}}, admin)
    did("keys.add", {"name": f"{MARK}'s key", "team_id": team_id})
    did("ssh_keys.add", {"name": f"{MARK} laptop", "public_key": KEY, "team_id": team_id})
    third = rack.rented(zeb, team_id=team_id, config=vm(), **TOLD)
    node.bring_up(third)
    over(rack, node, zeb, third)

    shared = office.team(zeb, "shared")
    other = office.person()
    with office.database.write() as unit:
        joined = users.find(unit, other.id)
        assert joined is not None
        teams.add_member(unit, shared.id, Actor(zeb.id, "Owner"), joined, "Member", now=office.clock())
    did("account.transactions_create_external", {**FUNDS, "account": {"ByTeamIds": [shared.id]}}, admin)
    plain = {**vm()["VirtualMachine"], "image_url": "https://images.example/team.qcow2"}
    fourth = rack.rented(zeb, team_id=shared.id, config={"VirtualMachine": plain}, name="of-the-team")
    node.bring_up(fourth)
    over(rack, node, zeb, fourth)

    budget = {"gpu_count": 1, "cpu_count": 2, "dram": GIB, "disk": GIB}
    for recipient in ({"UserId": zeb.id}, {"TeamId": team_id}):
        allocation = {"name": f"for {MARK}", "node_id": node.node_id, "recipient": recipient, "resources": budget}
        did("quotas.create", allocation, admin)
    return fourth


def third_of(office: Office, first: str) -> str:
    """Another machine of the erased person's, a virtual one."""
    with office.database.read() as unit:
        mine = select(instance.c.id, instance.c.account_id).where(instance.c.kind == "VirtualMachine")
        rows = {row.id: row.account_id for row in unit.select(mine)}
        erased = select(team_table.c.account_id).where(team_table.c.deleted_at.is_not(None))
        gone = {rows[first], *unit.select(erased).scalars()}
    return next(id for id, account_id in rows.items() if account_id in gone and id != first)


def sums(office: Office) -> list[Any]:
    with office.database.read() as unit:
        money = select(account.c.id, account.c.posted, account.c.held, account.c.spent, account.c.entries)
        return list(unit.select(money.order_by(account.c.id)).all())


def test_nothing_that_somebody_who_rented_wrote_is_left_anywhere(
    office: Office, make_shop: Callable[[Database], Shop]
) -> None:
    rack = Rack(office)
    admin = office.person("admin")
    added = {"email": f"{MARK}@example.com", "name": f"{MARK} Quux", "financial": {"initial_balance": 100_000}}
    zeb = office.person(balance=1000 * NANO)
    with office.database.write() as unit:
        named = {"email": added["email"], "email_key": added["email"], "name": added["name"]}
        unit.execute(metadata.tables["users"].update().where(metadata.tables["users"].c.id == zeb.id).values(**named))
    zeb = msgspec.structs.replace(zeb, email=str(added["email"]))
    node = rack.node()
    fourth = rent_and_leave(rack, node, zeb, admin)
    assert found(office) == LEFT
    before = sums(office)

    answer = office.ask("users.delete", {"user_id": zeb.id, "reason": "asked"}, admin)
    assert answer.status == 200, answer.body
    assert found(office) == set()
    report = answer.body["report"]["hard_deleted"]
    told = {name: report[name] for name in ("saved_environments", "allocations", "instance_tags", "volumes")}
    assert told == {"saved_environments": 1, "allocations": 2, "instance_tags": 6, "volumes": 1}

    node.poll()  # its disk is nobody's: the node is told to remove it, until it says that it is gone
    (disk,) = node.disks
    assert node.desired.erased_disks == [disk.instance_id]
    late = RetainedDisk(instance_id=third_of(office, disk.instance_id), disk_bytes=1, expires_at=2**60, os_label=MARK)
    node.disks.append(late)  # a machine whose owner was erased before its node told of its disk
    node.poll()
    assert node.poll().desired is None and sorted(node.desired.erased_disks) == sorted(
        [disk.instance_id, late.instance_id]
    )
    node.disks.clear()
    for _ in range(2):
        node.poll()
    assert node.desired.erased_disks == [] and found(office) == set()
    assert sums(office) == before
    with office.database.read() as unit:
        kept = {row.id: row for row in unit.select(select(instance))}
    assert {row.secret for row in kept.values()} == {None}
    assert kept[fourth].name == "of-the-team" and "team.qcow2" in kept[fourth].config
    assert rack.audit().clean, rack.audit().lines()
