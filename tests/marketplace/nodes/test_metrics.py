"""What GPUs measured: for those who run nodes all of it, for renters what is theirs since it is theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from sqlalchemy import insert, update

from marketplace.agent.inventory_wire import MigInstance
from marketplace.agent.wire import GpuSample, Metrics, Sample
from marketplace.nodes import talk
from marketplace.nodes.service import StaleSessionError
from marketplace.nodes.tables import gpu
from marketplace.placement.tables import gpu_slice_claim
from tests.marketplace.site import Site

if TYPE_CHECKING:
    from tests.marketplace.conftest import Caller, Office

SECOND = 1_000_000
MIG = {
    "profiles": [],
    "instances": [
        MigInstance(uuid=f"MIG-{n}", profile="1g.18gb", start=n, size=1, vram_bytes=18 << 30) for n in (0, 1)
    ],
}


@pytest.fixture
def site(office: Office) -> Site:
    return Site(office)


def slot(place: int) -> str:
    return f"0000:{0x10 + place:02x}:00.0"


def tell(site: Site, node_id: str, *gpus: GpuSample, at: int | None = None, **more: Any) -> None:
    """Samples as an agent sends them; a site's node has its id as its session."""
    office = site.office
    sample = Sample(at=office.clock() if at is None else at, gpus=list(gpus), **more)
    with office.database.write() as unit:
        talk.metrics(unit, site.provider_id, Metrics(session_id=node_id, samples=[sample]), office.clock())


def busy(place: int, utilization: int, uuid: str | None = None) -> GpuSample:
    return GpuSample(
        pci_slot=slot(place),
        uuid=uuid,
        utilization=utilization,
        temperature=61,
        vram_used_bytes=3 << 30,
        vram_total_bytes=8 << 30,
        power_watts=512,
    )


def take(
    site: Site, node_id: str, place: int, instance_id: str, slices: range = range(8), mig: int | None = None
) -> None:
    at = site.office.clock()
    with site.office.database.write() as unit:
        for one in slices:
            unit.execute(
                insert(gpu_slice_claim).values(
                    gpu_id=f"{node_id}-{place}",
                    slice=one,
                    owner_id=instance_id,
                    node_id=node_id,
                    instance_id=instance_id,
                    mig_start=mig,
                    created_at=at,
                )
            )


def of_nodes(office: Office, who: Caller, selector: Any = "All") -> dict[str, list[int]]:
    answer = office.ask("nodes.metrics_list", {"selector": selector}, who)
    assert answer.status == 200, answer.body
    return {one["node_id"]: [item["gpu_utilization_percent"] for item in one["gpus"]] for one in answer.body["metrics"]}


def of_instances(office: Office, who: Caller, *ids: str) -> dict[str, list[int]]:
    answer = office.ask("instances.metrics", {"selector": {"ById": list(ids)}}, who)
    assert answer.status == 200, answer.body
    found = answer.body["metrics"]
    return {one["instance_id"]: [item["gpu_utilization_percent"] for item in one["gpus"]] for one in found}


def test_the_latest_of_each_gpu_is_told_to_those_who_run_the_node(office: Office, site: Site) -> None:
    node_id, other = site.node(gpus=2), Site(office, "beta", datacenter="us-1")
    tell(site, node_id, busy(0, 10), busy(1, 20))
    tell(site, node_id, busy(0, 30))
    tell(site, node_id, busy(0, 99), at=office.now - 10 * SECOND)
    assert of_nodes(office, site.operator) == of_nodes(office, office.person("admin")) == {node_id: [30, 20]}
    assert of_nodes(office, other.operator) == of_nodes(office, other.operator, {"ById": [node_id]}) == {}
    (shown,) = office.ask("nodes.metrics_list", {"selector": {"ById": [node_id]}}, site.operator).body["metrics"]
    first = shown["gpus"][0]
    at = first.pop("at")
    assert at.endswith("Z")
    assert first == {
        "gpu_index": 0,
        "gpu_uuid": None,
        "pci_bdf": slot(0),
        "mig_profile": None,
        "gpu_utilization_percent": 30,
        "gr_activity": None,
        "tensor_activity": None,
        "fb_used_mib": 3072,
        "fb_free_mib": 5120,
        "power_usage_watts": 512,
        "temperature_celsius": 61,
    }


def test_what_a_gpu_does_not_tell_is_null_and_old_samples_are_forgotten(office: Office, site: Site) -> None:
    node_id = site.node(gpus=1)
    tell(site, node_id, GpuSample(pci_slot=slot(0)))
    (shown,) = office.ask("nodes.metrics_list", {}, site.operator).body["metrics"]
    assert {shown["gpus"][0][name] for name in ("fb_used_mib", "fb_free_mib", "power_usage_watts")} == {None}
    office.wait(2 * 3600)
    tell(site, node_id)
    assert of_nodes(office, site.operator) == {node_id: []}
    with pytest.raises(StaleSessionError):
        tell(site, "another session")


def test_a_renter_is_told_of_its_own_gpus_alone_since_they_are_its_own(office: Office, site: Site) -> None:
    ada, stranger, node_id = office.person(), office.person(), site.node(gpus=3)
    team = office.team(owner=ada)
    mine, theirs = site.instance(node_id, ada), site.instance(node_id, stranger)
    shared = site.instance(node_id, team, team_id=team.id)
    tell(site, node_id, *(busy(place, 90) for place in range(3)))
    for place, instance_id in enumerate((mine, theirs, shared)):
        take(site, node_id, place, instance_id)
    assert of_instances(office, ada, mine) == {mine: []}, "what was measured before is somebody else's"
    tell(site, node_id, busy(0, 1), busy(1, 2), busy(2, 3))
    assert of_instances(office, ada, mine, theirs, shared) == {shared: [3], mine: [1]}
    assert of_instances(office, team, mine, theirs, shared) == {shared: [3]}
    assert of_instances(office, stranger, mine, theirs, shared) == {theirs: [2]}
    assert of_instances(office, site.operator, mine, theirs) == {theirs: [2], mine: [1]}
    with office.database.write() as unit:
        unit.execute(update(gpu_slice_claim).values(released_at=office.clock()))
    assert of_instances(office, ada, mine) == {mine: []}


def test_who_has_a_mig_instance_is_told_of_that_one(office: Office, site: Site) -> None:
    ada, grace, node_id = office.person(), office.person(), site.node(gpus=1)
    with office.database.write() as unit:
        unit.execute(update(gpu).values(mig_enabled=True, mig=msgspec.json.encode(MIG).decode()))
    first, second = site.instance(node_id, ada), site.instance(node_id, grace)
    take(site, node_id, 0, first, range(1), mig=0)
    take(site, node_id, 0, second, range(1, 2), mig=1)
    tell(site, node_id, busy(0, 50, f"GPU-{node_id}-0"), busy(0, 10, "MIG-0"), busy(0, 20, "MIG-1"))
    assert of_instances(office, ada, first, second) == {first: [10]}
    assert of_instances(office, grace, first, second) == {second: [20]}
    (shown,) = office.ask("nodes.metrics_list", {}, site.operator).body["metrics"]
    told = {item["gpu_uuid"]: item["mig_profile"] for item in shown["gpus"]}
    assert told == {f"GPU-{node_id}-0": None, "MIG-0": "1g.18gb", "MIG-1": "1g.18gb"}


def test_pages_and_selectors_are_those_of_lists(office: Office, site: Site) -> None:
    ada, node_id = office.person(), site.node()
    instances = [site.instance(node_id, ada) for _ in range(3)]
    body = {"selector": {"ByStatus": ["Active"]}, "limit": 2}
    first = office.ask("instances.metrics", body, ada).body
    second = office.ask("instances.metrics", {**body, "cursor": first["next_cursor"]}, ada).body
    assert [one["instance_id"] for one in first["metrics"] + second["metrics"]] == instances[::-1]
    refused = office.ask("instances.metrics", {"selector": {"ByNodeId": node_id}}, ada)
    assert (refused.status, refused.code) == (403, "NotNodeOperator")
    nodes = [node_id, site.node()]
    first = office.ask("nodes.metrics_list", {"limit": 1}, site.operator).body
    second = office.ask("nodes.metrics_list", {"limit": 1, "cursor": first["next_cursor"]}, site.operator).body
    assert [one["node_id"] for one in first["metrics"] + second["metrics"]] == nodes[::-1]
