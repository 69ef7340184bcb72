"""What a rental takes from elsewhere: an address of a network, drivers of an image, keys by name; and what it leaves: a
preset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import select, update

from marketplace.accounts import service as accounts
from marketplace.agent.inventory_wire import MigInstance, MigProfile
from marketplace.agent.wire import VmSpec
from marketplace.catalog import service as catalog
from marketplace.catalog.service import Variant
from marketplace.catalog.tables import datacenter
from marketplace.ledger.money import NANO
from marketplace.nodes.rules import OPEN_TAG, PROPRIETARY_TAG
from marketplace.nodes.tables import gpu
from marketplace.nodes.tables import node as node_table
from marketplace.placement import claims
from marketplace.settings import service as settings
from tests.marketplace.rack import GIB, Agent, Rack, inventory

if TYPE_CHECKING:
    from tests.marketplace.conftest import Caller, Office

IMAGE = "https://images.example/driver.qcow2"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f"
PROXY = {"http_proxy": "http://proxy:3128", "https_proxy": "http://proxy:3129", "no_proxy": ["10.0.0.0/8"]}


def spec_of(node: Agent, instance_id: str) -> VmSpec:
    node.poll()
    (spec,) = [one.spec for one in node.desired.instances if one.id == instance_id]
    assert isinstance(spec, VmSpec)
    return spec


def add_network(rack: Rack, name: str, **more: Any) -> str:
    with rack.office.database.read() as unit:
        home = unit.select(select(datacenter.c.name)).scalar_one()
    body = {"datacenter": home, "name": name, "netmask": 24, "iface": f"br-{name}", **more}
    answer = rack.office.ask("networks.add", body, rack.office.person("admin"))
    assert answer.status == 201, answer.body
    return str(answer.body["id"])


def vm(image: str = IMAGE, **more: Any) -> dict[str, Any]:
    return {"VirtualMachine": {"image_url": image, **more}}


def test_a_machine_in_a_network_has_its_address_and_its_way_out_until_it_is_over(rack: Rack, ada: Caller) -> None:
    node = rack.node()
    inside = {"from": "10.9.0.5", "to": "10.9.0.5", "external_from": "203.0.113.99", "external_to": "203.0.113.99"}
    made = add_network(rack, "lab", gateway="10.9.0.1", ip_ranges=[inside], proxy=PROXY)
    first = rack.rented(ada, network="lab")
    told = spec_of(node, first).network
    assert told is not None and (told.ip, told.gateway, told.interface) == ("10.9.0.5", "10.9.0.1", "br-lab")
    assert (told.http_proxy, told.https_proxy) == ("http://proxy:3128", "http://proxy:3129")
    assert "10.0.0.0/8" in told.no_proxy
    full = rack.rent(ada, network="lab")
    assert full.status == 409, full.body
    listed = rack.office.ask("networks.list", {}, rack.operator()).body["networks"]
    (shown,) = [one for place in listed for one in place["networks"] if one["id"] == made]
    assert [(one["id"], one["ip"], one["owner_email"]) for one in shown["executors"]] == [
        (first, "10.9.0.5", ada.email)
    ]
    rack.terminate(ada, first)
    node.clean()
    assert rack.rent(ada, network="lab").status == 201 and rack.audit().clean


def test_a_team_s_network_is_for_its_members(rack: Rack, ada: Caller, office: Office) -> None:
    rack.node()
    team = office.team()
    add_network(rack, "theirs", team_id=team.id, ip_ranges=[{"from": "10.9.0.5", "to": "10.9.0.6"}])
    refused = rack.rent(ada, network="theirs")
    assert refused.status in (403, 404) and refused.param == "network"
    assert office.ask("instances.list", {}, ada).body["instances"] == []


def test_a_catalog_image_whose_driver_the_gpus_cannot_load_is_refused(rack: Rack, ada: Caller, office: Office) -> None:
    node = rack.node(gpus=8, threads=64)
    admin = office.person("admin")
    for name, tags in (("open", [OPEN_TAG]), ("proprietary", [PROPRIETARY_TAG]), ("plain", [])):
        body = {"name": name, "details": vm(f"https://images.example/{name}"), "global": True, "tags": tags}
        assert office.ask("recipes.add", body, admin).status == 200
    where = {"ByNodeId": {"node_id": node.node_id, "instance_type": "h200.1"}}
    for modules, image, code in (
        ("ProprietaryOnly", "open", "ImageDriverMismatch"),
        ("OpenOnly", "proprietary", "ImageDriverMismatch"),
        ("OpenOnly", "open", None),
        ("Unknown", "proprietary", None),
        ("OpenOnly", "plain", None),  # an image without a tag is nobody's to judge
        ("OpenOnly", "of the renter's own", None),
    ):
        with office.database.write() as unit:
            unit.execute(update(gpu).values(kernel_modules=modules))
            claims.changed(unit, node.node_id)
        answer = rack.rent(ada, selector=where, config=vm(f"https://images.example/{image.replace(' ', '-')}"))
        told = (answer.status, answer.body.get("error", {}).get("code"))
        assert told == ((201, None) if code is None else (400, code)), (modules, image)


def test_keys_are_given_by_name_by_id_or_written_out(rack: Rack, ada: Caller, office: Office) -> None:
    node = rack.node()
    made = office.ask("ssh_keys.add", {"name": "laptop", "public_key": f"{KEY} ada"}, ada).body
    for choice in ({"ByName": ["laptop"]}, {"ById": [made["id"]]}):
        first = rack.rented(ada, config=vm(ssh_key=choice))
        spec = spec_of(node, first)
        assert spec.ssh_keys == [f"{KEY} ada"] and spec.password is None
        assert rack.show(ada, first)["ssh_key_auth"] is True
        rack.terminate(ada, first)
        node.clean()
    stranger = office.person(balance=1000 * NANO)
    refused = rack.rent(stranger, config=vm(ssh_key={"ById": [made["id"]]}))
    assert (refused.status, refused.code) == (404, "SshKeyNotFound")


def test_a_slice_is_named_by_the_instance_of_its_profile_that_begins_there(
    rack: Rack, ada: Caller, office: Office
) -> None:
    whole = inventory("g01", gpus=1)
    made = [("small", "1g.18gb", 0, 1), ("half", "3g.71gb", 4, 4)]
    split = msgspec.structs.replace(
        whole.gpus[0],
        mig_enabled=True,
        mig_profiles=[MigProfile(profile="3g.71gb", size=4, placements=[0, 4])],
        mig_instances=[
            MigInstance(uuid=f"MIG-{name}", profile=profile, start=start, size=size, vram_bytes=1)
            for name, profile, start, size in made
        ],
    )
    node = Agent(rack, "g01", msgspec.structs.replace(whole, gpus=[split]))
    node.register()
    part = Variant(
        name="h200.part",
        type_name="h200",
        gpu_count=1,
        mig_profile="3g.71gb",
        vcpu=1,
        dram=GIB,
        disk=GIB,
        services=("container",),
        cost_per_hour=NANO,
    )
    with office.database.write() as unit:
        unit.execute(update(node_table).values(instance_type="h200"))
        catalog.add_variant(unit, part, office.clock())
    rented = [rack.rented(ada, "h200.part", container=True) for _ in range(2)]
    assert rack.rent(ada, "h200.part", container=True).status == 409
    node.poll()
    named = {one.id: one.spec.gpus for one in node.desired.instances}
    assert sorted(named[machine] for machine in rented) == [["GPU-g01-0/0/3g.71gb"], ["GPU-g01-0/4/3g.71gb"]]
    assert rack.audit().clean


def test_written_out_keys_are_public_keys(rack: Rack, ada: Caller) -> None:
    node = rack.node()
    for wrong in (
        "ssh-ed25519 AAAAC3Nz",  # cut off
        KEY.replace("ssh-ed25519", "ssh-rsa"),  # of another kind than it says
        f'command="reboot" {KEY}',
        "-----BEGIN OPENSSH PRIVATE KEY-----",
    ):
        refused = rack.rent(ada, config=vm(ssh_key={"PublicKeys": [wrong]}))
        assert (refused.status, refused.code, refused.param) == (400, "ValidationFailed", "config"), wrong
    made = rack.rented(ada, config=vm(ssh_key={"PublicKeys": [f"  {KEY}   ada "]}))
    assert spec_of(node, made).ssh_keys == [f"{KEY} ada"]


def test_a_recipe_says_what_a_machine_begins_from_unless_the_renter_does(
    rack: Rack, ada: Caller, office: Office
) -> None:
    node, admin = rack.node(gpus=4, threads=32), office.person("admin")
    for who, name, more in ((admin, "ubuntu", {"global": True}), (ada, "ubuntu", {}), (admin, "theirs", {})):
        words = {"image_url": f"https://images.example/{who.id}/{name}", "cloudinit_url": "https://images.example/init"}
        body = {"name": name, "details": {"VirtualMachine": words}, **more}
        assert office.ask("recipes.add", body, who).status == 200

    def begun(who: Caller, recipe: str, **config: str) -> VmSpec:
        machine = rack.rented(who, config={"VirtualMachine": config}, recipe=recipe)
        found = spec_of(node, machine)
        rack.terminate(who, machine)
        node.clean()
        return found

    mine = begun(ada, "ubuntu")
    assert mine.image_url == f"https://images.example/{ada.id}/ubuntu", "one's own comes before everybody's"
    assert mine.user_data == "#include\nhttps://images.example/init\n"
    assert begun(ada, "ubuntu", cloudinit_commands="ls").user_data == "#!/bin/sh\nls\n"
    stranger = office.person(balance=1000 * NANO)
    assert begun(stranger, "ubuntu").image_url == f"https://images.example/{admin.id}/ubuntu"
    assert begun(stranger, "a note", image_url=IMAGE).image_url == IMAGE
    for unknown in ("theirs", "none"):
        refused = rack.rent(stranger, config={"VirtualMachine": {}}, recipe=unknown)
        assert (refused.status, refused.code, refused.param) == (404, "RecipeNotFound", "recipe")


def test_a_shape_of_one_s_own_is_remembered_once(rack: Rack, office: Office) -> None:
    node = rack.node()
    people = rack.operator()
    with office.database.write() as unit:
        settings.change(unit, {"allow_custom_instances": True}, office.clock())
        accounts.top_up(unit, people.account_id, 1000 * NANO, key="p", now=office.clock(), random=office.random)
    shape = {"vcpu": 2, "gpu": 0, "dram": 8 << 30, "disk": 10 << 30}
    custom = {"ByNodeWithResources": {"node_id": node.node_id, "resources": shape}}
    for _ in range(2):
        rack.rented(people, selector=custom, cpu_sharing_policy="Packed")
    (preset,) = office.ask("instance_presets.list", {}, people).body["presets"]
    assert (preset["cpu_count"], preset["gpu_count"], preset["dram"], preset["disk"]) == (2, 0, 8 << 30, 10 << 30)
    rack.rented(people)
    assert office.ask("instance_presets.list", {}, people).body["presets"] == [preset], "the catalog's leave none"
