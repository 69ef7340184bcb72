"""Disks as nodes tell of them: what volumes take, who was stopped for writing too much, and what holds containers."""

from __future__ import annotations

import msgspec
import pytest

from marketplace.agent.wire import Event, Metrics, VolumeUse
from marketplace.volumes import service as volumes
from tests.marketplace.office import Caller
from tests.marketplace.rack import Rack


def make_volume(rack: Rack, who: Caller, name: str) -> str:
    body = {"name": name, "size_gb": 2, "datacenter": "acme-1", "volume_type_name": "standard"}
    answer = rack.office.ask("volumes.create", body, who)
    assert answer.status == 201, answer.body
    return str(answer.body["volume"]["id"])


def test_what_a_volume_takes_is_as_its_node_measured_it_last(rack: Rack, ada: Caller) -> None:
    office, node, other = rack.office, rack.node(), rack.node("g02")
    kind = {"datacenter": "acme-1", "name": "standard", "cost_per_gb_per_month": 10}
    assert office.ask("volumes.types_add", kind, office.person("admin")).status == 200
    used, fresh = make_volume(rack, ada, "used"), make_volume(rack, ada, "fresh")
    mounts = {"Mounts": [{"volume": {"ById": [used]}, "mount_path": "/data"}]}
    config = {"Docker": {"image": "busybox", "volumes": mounts}}
    answer = rack.rent(ada, "h200.0", config=config)
    assert answer.status == 201, answer.body
    with office.database.read() as unit:
        (home,) = volumes.home_of(unit, ada.account_id, [used])[1:]
    node, other = (node, other) if home == node.node_id else (other, node)

    def measure(agent: object, *told: VolumeUse, known: bool = True) -> list[int]:
        assert isinstance(agent, type(node))
        session = agent.session.session_id
        agent.measure(Metrics(session_id=session, samples=[], volumes=list(told) if known else None))
        office.wait(1)
        shown = office.ask("volumes.list", {"selector": {"ById": [used, fresh]}}, ada).body["volumes"]
        return [one["disk_usage"] for one in sorted(shown, key=lambda one: str(one["name"]), reverse=True)]

    assert measure(node, VolumeUse(used, 4096), VolumeUse("another", 1), VolumeUse(fresh, 7)) == [4096, 0]
    assert measure(node, known=False) == [4096, 0]
    assert measure(other, VolumeUse(used, 9)) == [4096, 0], "it is on the first node"
    assert measure(node) == [0, 0]


def test_a_renter_is_told_once_why_a_container_was_stopped(rack: Rack, ada: Caller) -> None:
    office, node, other = rack.office, rack.node(), rack.node("g02")
    box = rack.rented(ada, "h200.0", container=True)
    home, away = (node, other) if box in {one.id for one in node.poll().desired.instances} else (other, node)
    event = Event(id="e1", at=office.now, kind="DiskFull", message="It wrote too much.", instance_id=box)
    rest = [Event(id="e2", at=office.now, kind="ImageNotReady", message="no", instance_id=box)]
    for agent in (away, home, home):
        agent.poll(events=[event, event, *rest, msgspec.structs.replace(event, id="e3", instance_id="another")])
    office.wait(1)
    told = office.ask("events.list", {}, ada)
    assert told.status == 200, told.body
    found = [one for one in told.body["events"] if one["action"] == "instances.disk_full"]
    assert [(one["subject_id"], one["detail"]) for one in found] == [(box, {"message": "It wrote too much."})]


def test_the_list_of_nodes_says_what_holds_containers_to_their_disks(rack: Rack) -> None:
    node = rack.node()
    people = rack.operator()
    for how in (None, "quota", "watched"):
        node.capabilities = msgspec.structs.replace(node.capabilities, container_disk=how)
        node.register()
        (shown,) = rack.office.ask("nodes.list", {}, people).body["nodes"]
        assert shown["container_disk_limit"] == how


def test_a_volume_is_for_the_kind_of_machine_that_has_written_on_it(rack: Rack, ada: Caller) -> None:
    office, node = rack.office, rack.node()
    kind = {"datacenter": "acme-1", "name": "standard", "cost_per_gb_per_month": 10}
    assert office.ask("volumes.types_add", kind, office.person("admin")).status == 200
    disk = make_volume(rack, ada, "data")
    mounts = {"volumes": {"Mounts": [{"volume": {"ById": [disk]}, "mount_path": "/data"}]}}
    vm = {"config": {"VirtualMachine": {"image_url": "https://images.example/u.qcow2", **mounts}}}
    box = {"config": {"Docker": {"image": "busybox", **mounts}}}
    never = rack.rented(ada, "h200.0", **box)
    rack.terminate(ada, never)
    node.clean()
    first = rack.rented(ada, "h200.0", **vm)
    node.bring_up(first)
    rack.terminate(ada, first)
    node.clean()
    refused = rack.rent(ada, "h200.0", **box)
    assert (refused.status, refused.code, refused.param) == (400, "ValidationFailed", "config")
    assert "can be read by virtual machines alone" in refused.body["error"]["message"]
    assert rack.rent(ada, "h200.0", **vm).status == 201


@pytest.mark.parametrize("used", [-1, 2**62, 2**80])
def test_a_volume_takes_no_impossible_number_of_bytes(used: int) -> None:
    told = msgspec.json.encode({"session_id": "s", "samples": [], "volumes": [{"id": "v", "used_bytes": used}]})
    with pytest.raises(msgspec.ValidationError, match="used_bytes"):
        msgspec.json.decode(told, type=Metrics)
