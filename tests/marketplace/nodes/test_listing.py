"""What the list of nodes tells those who run them, and what of it a client sizes and prices rentals by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from marketplace.agent.wire import Metrics, Sample
from tests.marketplace.rack import GIB, Rack

if TYPE_CHECKING:
    from tests.marketplace.conftest import Office


def test_capacities_weights_and_what_is_free(office: Office) -> None:
    rack = Rack(office)
    rack.node(gpus=2, threads=16)
    people = rack.operator()
    (before,) = office.ask("nodes.list", {}, people).body["nodes"]
    assert (before["hostname"], before["ip_address"], before["status"]) == ("g01", "203.0.113.7", "Ready")
    assert 0 < before["vm_ram_capacity"] <= 256 * GIB and 0 < before["storage_disk_size"] <= 1 << 42
    weights = before["instance"]["custom_pricing"]
    assert set(weights) == {"vcpu_weight", "ram_weight", "disk_weight", "gpu_weight"} and sum(weights.values()) == 1
    assert {"mig_gpu_mask", "disk_available"} <= before["utilization"].keys()
    assert {"proxy_user", "proxy_port", "ssh_host"} <= before.keys()
    assert {one["gpuvendor_kernel_module_support"] for one in before["hardware"]["gpus"]} == {"OpenOrProprietary"}
    assert before["unallocated"]["gpu_count"] == before["utilization"]["rentable_gpus"] == 2
    renter = office.person(balance=1000 * rack.COST)
    rack.rented(renter)
    (after,) = office.ask("nodes.list", {}, people).body["nodes"]
    assert after["utilization"]["rentable_gpus"] == after["unallocated"]["gpu_count"] == 1
    assert after["utilization"]["cpu_cores_available"] < before["utilization"]["cpu_cores_available"]
    assert after["utilization"]["disk_available"] == before["utilization"]["disk_available"] - 10 * GIB
    assert after["active_instance_count"] == 1


def test_providers_see_their_own_and_admins_choose_whose(office: Office) -> None:
    rack = Rack(office)
    node = rack.node()
    admin, stranger = office.person("admin"), office.person("provider")
    assert office.ask("nodes.list", {}, stranger).body == {"nodes": []}
    for selector, found in (({"ByName": ["ACME"]}, [node.node_id]), ({"ByName": ["beta"]}, [])):
        body = office.ask("nodes.list", {"selector": selector}, admin).body
        assert [one["id"] for one in body["nodes"]] == found
    assert office.ask("nodes.list", {}, office.person()).status == 403


def test_memory_of_a_machine_is_live(office: Office) -> None:
    rack = Rack(office)
    node = rack.node()
    ada = office.person(balance=1000 * rack.COST)
    first = rack.rented(ada)
    node.bring_up(first)
    sample = Sample(at=office.clock(), instance_id=first, memory_bytes=812_344 * 1024)
    node.measure(Metrics(session_id=node.session.session_id, samples=[sample]))
    assert rack.show(ada, first)["virtual_machines"][0]["memory_usage_kb"] == 812_344
