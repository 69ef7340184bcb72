"""The catalog: what is on offer, where, and how much of it is free now; and who says what is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select, update

from marketplace.catalog.tables import datacenter
from marketplace.providers import service as providers
from marketplace.providers.tables import provider
from tests.marketplace.rack import Rack

if TYPE_CHECKING:
    from tests.marketplace.conftest import Caller, Office

TYPE = {"name": "b300", "brand_short": "B300", "cost_per_hour": 400, "gpuvendor_kernel_module_support": "OpenOnly"}
VARIANT = {
    "name": "b300.1",
    "instance_type": "b300",
    "gpu_count": 1,
    "cpu_count": 8,
    "dram": 64 << 30,
    "disk": 100 << 30,
    "vram": 288 << 30,
    "cost_per_hour": 400,
}


@pytest.fixture
def admin(office: Office) -> Caller:
    return office.person("admin")


def on_offer(office: Office, selector: Any = "All") -> dict[str, Any]:
    answer = office.ask("instance_types.list", {"selector": selector})
    assert answer.status == 200, answer.body
    return {one["name"]: one for one in answer.body["instance_types"]}


def test_everybody_sees_what_is_free_where(office: Office) -> None:
    rack = Rack(office)
    rack.node("one", gpus=2)
    rack.node("two", gpus=1)
    with office.database.write() as unit:
        unit.execute(update(provider).values(logo_url="https://acme.example/logo.svg"))
    shown = on_offer(office)["h200"]
    (home,) = shown["datacenters"]
    assert home["provider_logo"] == "https://acme.example/logo.svg" and len(home["country_code"]) == 2
    assert home["provider_name"] and shown["gpuvendor_kernel_module_support"] == "OpenOrProprietary"
    variants = {one["name"]: one for one in shown["variants"]}
    assert (variants["h200.1"]["available_nodes"], variants["h200.2"]["available_nodes"]) == (2, 1)
    assert variants["h200.4"]["available_nodes"] == 0
    assert variants["h200.1"]["available_nodes_per_dc"] == {home["name"]: 2}
    assert variants["h200.1"]["ip_availability_per_dc"] == {home["name"]: {"public_ips": False}}
    assert variants["h200.1"]["cpu_sharing_policy"] in ("Dedicated", "Packed", "Shared")
    assert on_offer(office, {"ByName": ["none"]}) == {}
    elsewhere = on_offer(office, {"ByServiceAndLocation": {"services": ["vm"], "datacenters": ["elsewhere"]}})["h200"]
    assert elsewhere["datacenters"] == [] and {one["nodes"] for one in elsewhere["variants"]} == {0}
    assert set(on_offer(office, {"ByServiceAndProvider": {"providers": [home["provider_name"].upper()]}})) == {"h200"}


def test_public_addresses_are_told_where_a_network_for_everybody_has_them(office: Office, admin: Caller) -> None:
    Rack(office).node()
    (home,) = on_offer(office)["h200"]["datacenters"]
    outside = {"external_from": "203.0.113.9", "external_to": "203.0.113.9"}
    body = {"datacenter": home["name"], "name": "open", "netmask": 24, "iface": "br0"}
    body["ip_ranges"] = [{"from": "10.0.0.9", "to": "10.0.0.9", **outside}]
    assert office.ask("networks.add", body, admin).status == 201
    for variant in on_offer(office)["h200"]["variants"]:
        assert variant["ip_availability_per_dc"] == {home["name"]: {"public_ips": True}}


def test_admins_add_change_and_remove_types_and_variants(office: Office, admin: Caller) -> None:
    ask = office.ask
    assert ask("instance_types.add", TYPE, admin).body == {"name": "b300"}
    assert ask("instance_types.add_variant", VARIANT, admin).body == {"name": "b300.1"}
    for name, body in (("instance_types.add", TYPE), ("instance_types.add_variant", VARIANT)):
        taken = ask(name, body, admin)
        assert (taken.status, taken.code, taken.param) == (409, "NameExists", "name")
    assert ask("instance_types.update", {**TYPE, "cost_per_hour": 500}, admin).status == 200
    assert ask("instance_types.update_variant", {**VARIANT, "cost_per_hour": 450}, admin).status == 200
    assert ask("instance_types.remove_variant", {"name": "b300.1"}, admin).status == 200
    assert ask("instance_types.remove", {"name": "b300"}, admin).status == 200
    for name, body in (
        ("instance_types.remove", {"name": "b300"}),
        ("instance_types.remove_variant", {"name": "b300.1"}),
        ("instance_types.update", TYPE),
        ("instance_types.add_variant", VARIANT),
    ):
        office.wait(10)
        gone = ask(name, body, admin)
        assert (gone.status, gone.code) == (404, "InstanceTypeNotFound"), name


def test_what_a_variant_cannot_be(office: Office, admin: Caller) -> None:
    office.ask("instance_types.add", TYPE, admin)
    shared = office.ask("instance_types.add_variant", {**VARIANT, "cpu_sharing_policy": "Shared"}, admin)
    assert (shared.status, shared.code, shared.param) == (400, "SharedPolicyReserved", "cpu_sharing_policy")
    weights = office.ask("instance_types.add", {**TYPE, "name": "x", "gpu_weight": 1}, admin)
    assert (weights.status, weights.code, weights.param) == (400, "ValidationFailed", "gpu_weight")


def test_a_type_that_nodes_are_of_stays(office: Office, admin: Caller) -> None:
    Rack(office).node()
    refused = office.ask("instance_types.remove", {"name": "h200"}, admin)
    assert (refused.status, refused.code, refused.param) == (409, "InUse", "name")


def test_ports_of_a_datacenter_are_published_by_its_nodes_or_not_at_all(office: Office, admin: Caller) -> None:
    with office.database.write() as unit:
        providers.create(unit, name="home", now=office.clock(), random=office.random)
    asked = {"name": "eu-9", "provider": "home", "country_code": "NL"}
    for tunnel in ("frp", ""):
        refused = office.ask("datacenters.add", {**asked, "tunnel": tunnel}, admin)
        assert (refused.status, refused.code, refused.param) == (400, "ValidationFailed", "tunnel"), tunnel
    none = office.ask("datacenters.add", {**asked, "tunnel": "none"}, admin)
    assert none.status in (200, 201)
    assert none.body["relay_secret"] is None


def test_a_datacenter_behind_a_relay_says_where_that_is_and_gets_its_secret_once(office: Office, admin: Caller) -> None:
    with office.database.write() as unit:
        providers.create(unit, name="home", now=office.clock(), random=office.random)
    asked = {"name": "eu-9", "provider": "home", "country_code": "NL"}
    relay = {**asked, "tunnel": "relay", "tunnel_host": "relay.example", "relay_port": 7000}
    for wrong, param in (
        ({**relay, "tunnel_host": None}, "tunnel_host"),
        ({**relay, "relay_port": None}, "relay_port"),
        ({**relay, "relay_port": 20_000}, "relay_port"),
        ({**relay, "tunnel": "nat"}, "relay_port"),
    ):
        refused = office.ask("datacenters.add", wrong, admin)
        assert (refused.status, refused.code, refused.param) == (400, "ValidationFailed", param), wrong
    made = office.ask("datacenters.add", relay, admin)
    assert made.status in (200, 201)
    secret = made.body["relay_secret"]
    assert len(bytes.fromhex(secret)) == 32
    with office.database.read() as unit:
        sealed = unit.select(select(datacenter.c.relay_sealed).where(datacenter.c.id == made.body["id"])).scalar_one()
    assert bytes.fromhex(secret) not in sealed
    assert secret.encode() not in sealed
