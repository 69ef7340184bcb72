"""What the server signs: the ports of a node's machines, until their end is asked for, and nobody else's."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from marketplace.agent.wire import VmSpec
from marketplace.ledger.money import NANO
from marketplace.relay import grants
from marketplace.relay.access import RelayAnswer, RelayGrant, Relaying
from marketplace.relay.granting import GRANT_US, make_secret
from marketplace.relay.grants import Grant
from tests.marketplace.office import Office
from tests.marketplace.rack import Agent, HttpError, Rack

RELAY: dict[str, Any] = {"provider": "acme", "name": "hidden", "country_code": "IT", "tunnel": "relay"}
RELAY |= {"tunnel_host": "relay.example", "relay_port": 7000}

ON_ONE = pytest.mark.parametrize("fresh_database", ["sqlite"], indirect=True)
"""Rules that no database changes."""


def hidden(rack: Rack, **more: Any) -> tuple[Agent, bytes]:
    """A node behind a relay, and the relay's secret."""
    made = rack.office.ask("datacenters.add", RELAY | more, rack.office.person("admin"))
    assert made.status in (200, 201), made.body
    return put_there(rack, "g01"), bytes.fromhex(made.body["relay_secret"])


def put_there(rack: Rack, name: str) -> Agent:
    """A node of the datacenter that has the relay."""
    node = rack.node(name)
    move = {"node_id": node.node_id, "datacenter": "hidden"}
    assert rack.office.ask("nodes.update", move, rack.operator()).status == 200
    node.poll()
    return node


def granted(node: Agent) -> tuple[RelayGrant, Grant]:
    """What the server answers to a node that asks."""
    told = Relaying(session_id=node.session.session_id, epoch=node.session.epoch)
    access = node.rack.send("relay", told, RelayAnswer).access
    assert access is not None
    return access, msgspec.json.decode(access.grant, type=Grant)


def test_a_machine_behind_a_relay_is_reached_there_until_its_end_is_asked_for(office: Office) -> None:
    rack, ada = Rack(office), office.person(balance=1000 * NANO)
    node, secret = hidden(rack)
    assert node.desired.relayed
    vm: dict[str, Any] = {"VirtualMachine": {"image_url": "https://images.example/u.qcow2", "ports": ["8000"]}}
    box = rack.rented(ada, config=vm)
    shown = rack.show(ada, box)
    assert shown["host_address"] == "relay.example"
    assert [guest for guest, _ in shown["port_mappings"]] == [22, 8000]
    outside = sorted(host for _, host in shown["port_mappings"])
    node.poll()
    spec = node.desired.instances[0].spec
    assert isinstance(spec, VmSpec)
    assert {one.host_ip for one in spec.ports} == {"127.0.0.1"}, "nobody but the relay comes to the node itself"
    assert sorted(one.host for one in spec.ports) == outside
    access, grant = granted(node)
    assert (access.host, access.port) == ("relay.example", 7000)
    assert access.key == grants.key_of(secret, access.grant).hex()
    assert access.key not in repr(access)
    assert grant.node == node.node_id
    assert [one.port for one in grant.ports] == outside
    assert office.now < grant.expires_at <= office.now + GRANT_US
    elsewhere = {"provider": "acme", "name": "open", "country_code": "IT"}
    assert office.ask("datacenters.add", elsewhere, office.person("admin")).status in (200, 201)
    move = {"node_id": node.node_id, "datacenter": "open"}
    stays = office.ask("nodes.update", move, rack.operator())
    assert (stays.status, stays.code, stays.param) == (409, "NodeInUse", "datacenter")
    assert rack.terminate(ada, box).status == 200
    _, after = granted(node)
    assert after.ports == []
    assert after.serial > grant.serial
    assert rack.audit().clean


@ON_ONE
def test_nodes_behind_one_relay_share_its_ports_and_sign_for_their_own(office: Office) -> None:
    rack, ada = Rack(office), office.person(balance=1000 * NANO)
    first, _ = hidden(rack, port_from=21_000, port_to=21_001)
    second = put_there(rack, "g02")
    there = [
        rack.rented(ada, selector={"ByNodeId": {"node_id": one.node_id, "instance_type": "h200.0"}})
        for one in (first, second)
    ]
    mappings = [rack.show(ada, box)["port_mappings"] for box in there]
    assert sorted(port for ((_, port),) in mappings) == [21_000, 21_001]
    for one, ((_, port),) in zip((first, second), mappings, strict=True):
        assert [given.port for given in granted(one)[1].ports] == [port]
    full = rack.rent(ada, "h200.0")
    assert (full.status, full.code) == (409, "InsufficientCapacity")


@ON_ONE
def test_udp_is_refused_behind_a_relay(office: Office) -> None:
    rack, ada = Rack(office), office.person(balance=1000 * NANO)
    node, _ = hidden(rack)
    named = {"selector": {"ByNodeId": {"node_id": node.node_id, "instance_type": "h200.0"}}}
    udp = {"config": {"Docker": {"image": "busybox", "ports": ["53/udp", "80"]}}}
    refused = rack.rent(ada, **named, **udp)
    assert (refused.status, refused.code, refused.param) == (400, "ValidationFailed", "config")
    assert "carries TCP and no UDP" in refused.body["error"]["message"]
    tcp = {"config": {"Docker": {"image": "busybox", "ports": ["53", "80"]}}}
    assert rack.rent(ada, **named, **tcp).status == 201


@ON_ONE
def test_grants_are_for_the_sessions_of_nodes_that_have_a_relay(office: Office) -> None:
    rack = Rack(office)
    open_node = rack.node("open")
    told = Relaying(session_id=open_node.session.session_id, epoch=open_node.session.epoch)
    assert rack.send("relay", told, RelayAnswer).access is None
    assert not open_node.desired.relayed
    with pytest.raises(HttpError, match="409 StaleSession"):
        rack.send("relay", Relaying(session_id="another", epoch=1), RelayAnswer)
    with pytest.raises(HttpError, match="409 StaleSession"):
        rack.send("relay", Relaying(session_id=told.session_id, epoch=told.epoch + 1), RelayAnswer)
    with pytest.raises(HttpError, match="401"):
        rack.send("relay", told, RelayAnswer, key="")


@ON_ONE
def test_a_secret_is_not_shown_by_accident(office: Office) -> None:
    made = make_secret(office.context.vault, "eu-1", office.random)
    assert made.text not in repr(made)
