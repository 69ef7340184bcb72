"""What instances are rented on: allocations, reservations, volumes, and disks that are used again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select

from marketplace.accounts import service as accounts
from marketplace.agent.inventory_wire import RetainedDisk
from marketplace.agent.wire import VmSpec
from marketplace.ledger import rentals
from marketplace.ledger.money import NANO, round_half_up
from marketplace.ledger.rentals import HOUR_US, Meter
from marketplace.quotas.tables import quota
from marketplace.reservations.rules import PPM, price
from marketplace.settings import service as settings
from marketplace.workers import expiry
from tests.marketplace.rack import GIB, Rack

if TYPE_CHECKING:
    from tests.marketplace.conftest import Caller, Office
    from tests.marketplace.rack import Agent

DAY = 86_400


def named(node_id: str, variant: str = "h200.1") -> dict[str, Any]:
    return {"selector": {"ByNodeId": {"node_id": node_id, "instance_type": variant}}}


def give(office: Office, who: Caller, node_id: str, gpus: int, **more: Any) -> str:
    resources = {"gpu_count": gpus, "cpu_count": 4 * gpus, "dram": 8 * gpus * GIB, "disk": 10 * gpus * GIB}
    body = {"name": "q", "node_id": node_id, "recipient": {"UserId": who.id}, "resources": resources, **more}
    answer = office.ask("quotas.create", body, office.person("admin"))
    assert answer.status == 200, answer.body
    return str(answer.body["quota"]["id"])


def money(office: Office, who: Caller) -> tuple[int, int]:
    with office.database.read() as unit:
        state = accounts.get(unit, who.account_id)
    return state.posted, state.held


def meter(office: Office, instance_id: str) -> Meter:
    with office.database.read() as unit:
        return rentals.of_resources(unit, [instance_id])[instance_id]


def reservation(office: Office, who: Caller) -> dict[str, Any]:
    answer = office.ask("reservations.list", {}, who)
    found: list[dict[str, Any]] = answer.body["reservations"]
    return found[0]


@pytest.fixture
def day(office: Office) -> str:
    """A type of reservation: a day at the price on demand."""
    body = {"duration_secs": DAY, "price_factor": 1}
    return str(office.ask("reservations.types_add", body, office.person("admin")).body["id"])


def test_who_holds_an_allocation_rents_on_it_and_nowhere_else(rack: Rack, office: Office, ada: Caller) -> None:
    own, public = rack.node("own"), rack.node("public")
    give(office, ada, own.node_id, 1)
    first = rack.show(ada, rack.rented(ada))
    assert first["node_id"] == own.node_id
    for body, status, code in (
        ({}, 409, "NotCoveredByQuota"),
        (named(own.node_id), 409, "NotCoveredByQuota"),
        (named(public.node_id), 403, "WalledToAllocations"),
    ):
        refused = rack.rent(ada, **body)
        assert (refused.status, refused.code) == (status, code), body
    rack.terminate(ada, first["id"])
    own.clean()
    assert rack.show(ada, rack.rented(ada))["node_id"] == own.node_id, "what it used is free under it again"
    assert rack.audit().clean


def test_others_rent_what_allocations_leave(rack: Rack, office: Office, ada: Caller) -> None:
    node, eve = rack.node(), office.person(balance=1000 * NANO)
    quota_id = give(office, ada, node.node_id, 1)
    auto = rack.rent(eve)
    assert (auto.status, auto.code) == (409, "InsufficientCapacity"), "it is in nobody's pool"
    refused = rack.rent(eve, **named(node.node_id, "h200.2"))
    assert (refused.status, refused.code) == (409, "CapacityReserved")
    details = refused.body["error"]["details"]
    assert details["node_id"] == node.node_id
    assert (details["unallocated"]["gpu_count"], details["requested"]["gpu_count"]) == (1, 2)
    uncovered = rack.rent(eve, **named(node.node_id), require_quota_coverage=True)
    assert (uncovered.status, uncovered.code) == (409, "NotCoveredByQuota")
    assert rack.rent(eve, **named(node.node_id)).status == 201
    assert rack.rent(eve, **named(node.node_id)).code == "CapacityReserved"
    assert rack.rent(ada).status == 201, "what is hers is hers"
    office.ask("quotas.revoke", {"quota_id": quota_id}, office.person("admin"))
    assert rack.audit().clean


def test_an_exclusive_allocation_leaves_others_nothing(rack: Rack, office: Office, ada: Caller) -> None:
    node, eve = rack.node(), office.person(balance=1000 * NANO)
    give(office, ada, node.node_id, 1, exclusive=True)
    refused = rack.rent(eve, **named(node.node_id))
    assert (refused.code, refused.body["error"]["details"]["unallocated"]["gpu_count"]) == ("CapacityReserved", 0)
    assert rack.rent(ada).status == 201


def test_what_an_allocation_covers_is_free_until_it_ends(rack: Rack, office: Office, ada: Caller) -> None:
    node, poor = rack.node(), office.person()
    quota_id = give(office, poor, node.node_id, 1)
    instance_id = rack.rented(poor)
    node.run(instance_id)
    assert rack.show(poor, instance_id)["status"] == "Active", "it need not say that it is ready"
    office.wait(1000)
    node.poll()
    office.ask("quotas.revoke", {"quota_id": quota_id}, office.person("admin"))
    with office.database.write() as unit:
        ended = unit.select(select(quota.c.revoked_at).where(quota.c.id == quota_id)).scalar_one()
        accounts.set_unlimited(unit, poor.account_id, True)
    office.wait(30)
    node.poll()
    rack.terminate(poor, instance_id)
    stopped = meter(office, instance_id).stopped_at
    assert ended is not None and stopped is not None
    cost = round_half_up(Rack.COST * (stopped - ended), HOUR_US)
    assert meter(office, instance_id).charged == cost > 0 and money(office, poor) == (-cost, 0)
    node.clean()
    assert rack.audit().clean


@pytest.mark.parametrize("how", ["fails", "terminated"])
def test_a_reservation_of_what_never_runs_is_given_back(how: str, rack: Rack, office: Office, day: str) -> None:
    paid = price(Rack.COST, DAY, PPM)
    node, ada = rack.node(), office.person(balance=paid)
    terms = {"reservation": {"New": {"type_id": day}}}
    instance_id = rack.rented(ada, **terms)
    assert money(office, ada) == (paid, paid)
    poor = rack.rent(ada, **terms)
    assert (poor.status, poor.code) == (402, "InsufficientFunds"), "what is held is not spent twice"
    assert reservation(office, ada)["state"] == "Held" and reservation(office, ada)["valid_till"] is None
    if how == "fails":
        node.fails(instance_id, "VmBootFailed", "it did not boot")
    else:
        rack.terminate(ada, instance_id)
    node.clean()
    assert money(office, ada) == (paid, 0) and reservation(office, ada)["state"] == "Cancelled"
    assert rack.audit().clean


def test_a_reservation_is_charged_when_it_runs_used_again_and_over_in_time(
    rack: Rack, office: Office, day: str
) -> None:
    paid = price(Rack.COST, DAY, PPM)
    node, ada = rack.node(), office.person(balance=paid + 100 * NANO)
    first = rack.rented(ada, reservation={"New": {"type_id": day}})
    node.bring_up(first)
    assert money(office, ada) == (100 * NANO, 0)
    made = reservation(office, ada)
    assert made["state"] == "Bound" and made["bound_resource"] == first
    assert rack.show(ada, first)["reservation_data"]["valid_till"] == made["valid_till"]
    rack.terminate(ada, first)
    node.clean()
    assert reservation(office, ada)["state"] == "Unbound" and meter(office, first).charged == 0
    again = {"reservation": {"Existing": made["id"]}}
    assert rack.rent(office.person(balance=10**12), **again).code == "ReservationNotFound"
    assert rack.rent(ada, "h200.0", **again).status in (400, 404), "it is for another variant"
    second = rack.rented(ada, **again)
    assert rack.rent(ada, **again).code == "ReservationNotFound", "one at a time"
    node.bring_up(second)
    assert reservation(office, ada)["valid_till"] == made["valid_till"], "its clock kept running"
    for _ in range(DAY // 7200 + 1):
        office.wait(7200)
        node.poll()
    assert expiry.of_reservations(office.database, clock=office.clock, random=office.random).run() == 1
    rack.terminate(ada, second)
    after = meter(office, second)
    assert after.stopped_at is not None and after.free_until is not None
    assert after.charged == round_half_up(Rack.COST * (after.stopped_at - after.free_until), HOUR_US) > 0
    node.clean()
    assert money(office, ada) == (100 * NANO - after.charged, 0) and rack.audit().clean


def test_only_admins_rent_and_reserve_for_nothing(rack: Rack, office: Office, ada: Caller, day: str) -> None:
    node, admin = rack.node(), office.person("admin")
    free = {"reservation": {"New": {"type_id": day, "billing_exempt": True}}}
    refused = rack.rent(ada, **free)
    assert (refused.status, refused.code) == (403, "PermissionDenied")
    instance_id = rack.rented(admin, **free)
    node.bring_up(instance_id)
    assert reservation(office, admin)["billing_exempt"] is True and money(office, admin) == (0, 0)


def volume(office: Office, who: Caller) -> str:
    kind = {"datacenter": "acme-1", "name": "standard", "cost_per_gb_per_month": 10}
    assert office.ask("volumes.types_add", kind, office.person("admin")).status == 200
    body = {"name": "data", "size_gb": 5, "datacenter": "acme-1", "volume_type_name": "standard"}
    return str(office.ask("volumes.create", body, who).body["volume"]["id"])


def with_volume(volume_id: str) -> dict[str, Any]:
    mounts = {"Mounts": [{"volume": {"ById": [volume_id]}, "mount_path": "/data"}]}
    return {"config": {"VirtualMachine": {"image_url": "https://images.example/u.qcow2", "volumes": mounts}}}


def wanted(agent: Agent, instance_id: str) -> VmSpec:
    agent.poll()
    (spec,) = [one.spec for one in agent.desired.instances if one.id == instance_id]
    assert isinstance(spec, VmSpec)
    return spec


def test_volumes_are_mounted_kept_and_found_again(rack: Rack, office: Office, ada: Caller) -> None:
    home, elsewhere = rack.node("home"), rack.node("elsewhere")
    volume_id = volume(office, ada)
    first = rack.rented(ada, **with_volume(volume_id), **named(home.node_id))
    (disk,) = wanted(home, first).volumes
    assert (disk.id, disk.size_bytes, disk.mount_path) == (volume_id, 5 * 10**9, "/data")
    home.bring_up(first)

    def seen() -> dict[str, Any]:
        found: dict[str, Any] = office.ask("volumes.get", {"volume_id": volume_id}, ada).body["volume"]
        return found

    assert (seen()["status"], seen()["attached_executor_id"]) == ("Attached", first)
    busy = rack.rent(ada, **with_volume(volume_id))
    assert (busy.status, busy.code) == (409, "VolumeAttached")
    rack.terminate(ada, first)
    assert seen()["status"] == "Attached", "until its machine is gone"
    home.clean()
    assert seen()["status"] == "Available"
    refused = rack.rent(ada, **with_volume(volume_id), **named(elsewhere.node_id))
    assert (refused.status, refused.code) == (409, "VolumeAttached")
    eve = office.person(balance=1000 * NANO)
    assert rack.rent(eve, **with_volume(volume_id)).code == "VolumeNotFound"
    second = rack.rented(ada, **with_volume(volume_id))
    assert rack.show(ada, second)["node_id"] == home.node_id, "where its file is"
    home.fails(second, "VmBootFailed", "it did not boot")
    home.clean()
    assert seen()["status"] == "Available" and rack.audit().clean


def test_a_saved_disk_is_used_again_by_one(rack: Rack, office: Office, ada: Caller) -> None:
    with office.database.write() as unit:
        settings.change(unit, {"erase_grace_period": DAY}, office.clock())
    node = rack.node()
    rack.node("another", gpus=1)
    first = rack.rented(ada, **named(node.node_id))
    node.bring_up(first)
    rack.terminate(ada, first)
    node.clean()
    again = {"reuse_environment_id": first}
    gone = rack.rent(ada, **again)
    assert (gone.status, gone.code, gone.param) == (400, "EnvironmentGone", "reuse_environment_id")
    node.disks = [RetainedDisk(instance_id=first, disk_bytes=GIB, expires_at=office.now + DAY * 10**6)]
    node.poll()

    def listed() -> list[str]:
        rows = office.ask("instances.saved_environments_list", {}, ada).body["saved_environments"]
        return [row["id"] for row in rows]

    assert listed() == [first]
    assert rack.rent(office.person(balance=1000 * NANO), **again).code == "EnvironmentGone"
    second = rack.rented(ada, **again)
    assert rack.show(ada, second)["node_id"] == node.node_id, "where its disk is"
    assert wanted(node, second).reuse_environment_id == first and listed() == []
    assert rack.rent(ada, **again).code == "EnvironmentGone"
    node.fails(second, "VmBootFailed", "it did not boot")
    node.clean()
    assert listed() == [first], "its use failed, and its node still has it"
    third = rack.rented(ada, **again)
    node.disks = []
    node.bring_up(third)
    assert listed() == [] and rack.rent(ada, **again).code == "EnvironmentGone"
    assert rack.audit().clean
