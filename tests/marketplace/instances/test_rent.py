"""What may be rented, by whom, where, and what is refused."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from sqlalchemy import func, select

from marketplace.accounts import service as accounts
from marketplace.http.dispatch import Incoming
from marketplace.ledger.money import NANO
from marketplace.placement import claims
from marketplace.placement.tables import gpu_slice_claim
from marketplace.settings import service as settings
from marketplace.store.db import WriteUnit
from tests.marketplace.rack import GIB, HttpError, Rack

if TYPE_CHECKING:
    from tests.marketplace.conftest import Caller, Office

SHAPE = {"vcpu": 2, "gpu": 1, "dram": 8 * GIB, "disk": 10 * GIB}


def allow_custom(rack: Rack) -> None:
    with rack.office.database.write() as unit:
        settings.change(unit, {"allow_custom_instances": True}, rack.office.clock())


def custom(node_id: str, **more: Any) -> dict[str, Any]:
    selector = {"ByNodeWithResources": {"node_id": node_id, "resources": {**SHAPE, **more}}}
    return {"selector": selector, "cpu_sharing_policy": "Packed"}


def test_the_fullest_node_is_taken_and_what_does_not_fit_says_why(rack: Rack, ada: Caller) -> None:
    large, small = rack.node("large", gpus=4), rack.node("small", gpus=1)
    assert rack.show(ada, rack.rented(ada))["node_id"] == small.node_id
    assert rack.show(ada, rack.rented(ada, "h200.2"))["node_id"] == large.node_id
    refused = rack.rent(ada, "h200.4")
    assert (refused.status, refused.code) == (409, "InsufficientCapacity")
    assert refused.body["error"]["details"] == {"reasons": {"nodes": 2, "after_gpu": 0}}


def test_names_are_made_up_and_ports_are_published_once(rack: Rack, ada: Caller) -> None:
    rack.node()
    vm = {"VirtualMachine": {"image_url": "https://images.example/u.qcow2", "ports": ["8000", "53/udp"]}}
    shown = rack.show(ada, rack.rented(ada, config=vm))
    other = rack.show(ada, rack.rented(ada, config=vm))
    assert shown["instance_name"].count("-") == 2
    assert [guest for guest, _ in shown["port_mappings"]] == [22, 53, 8000]
    assert not {host for _, host in shown["port_mappings"]} & {host for _, host in other["port_mappings"]}
    assert shown["host_address"] == "203.0.113.7"


def test_ports_are_published_where_the_datacenter_does_so_and_refused_where_none_does(rack: Rack, ada: Caller) -> None:
    office = rack.office
    closed, admin = rack.node("closed", gpus=1), office.person("admin")
    home = {"provider": "acme", "name": "dark", "country_code": "IT", "tunnel": "none"}
    assert office.ask("datacenters.add", home, admin).status in (200, 201)
    move = {"node_id": closed.node_id, "datacenter": "dark"}
    assert office.ask("nodes.update", move, rack.operator()).status == 200
    ports = {"config": {"Docker": {"image": "busybox", "ports": ["80"]}}}
    dark = {"selector": {"ByInstanceTypeAndLocation": {"instance_type": "h200.0", "datacenters": ["dark"]}}}
    named = {"selector": {"ByNodeId": {"node_id": closed.node_id, "instance_type": "h200.0"}}}
    for more, param in (
        ({**dark, **ports}, "config"),
        ({**named, **ports}, "config"),
        ({**dark, "ports": ["80"]}, "ports"),
    ):
        refused = rack.rent(ada, **more)
        assert (refused.status, refused.code, refused.param) == (400, "ValidationFailed", param), more
        assert "ports: the datacenter publishes none" in refused.body["error"]["message"]
    quiet = rack.rented(ada, "h200.0", **dark)
    assert rack.show(ada, quiet)["port_mappings"] == []
    nowhere = rack.rent(ada, "h200.0", **ports)
    assert (nowhere.status, nowhere.code) == (409, "InsufficientCapacity"), "acme-1 publishes, and has no node yet"
    bright = rack.node("bright", gpus=4)
    box = rack.show(ada, rack.rented(ada, "h200.0", **ports))
    assert box["node_id"] == bright.node_id, "the other has fewer free GPUs, and no ports"
    assert [guest for guest, _ in box["port_mappings"]] == [80]
    unknown = {"selector": {"ByNodeId": {"node_id": office.person().id, "instance_type": "h200.0"}}}
    assert rack.rent(ada, **unknown, **ports).status == rack.rent(ada, **unknown).status != 400


def test_secrets_are_shown_only_to_who_asks_and_may(rack: Rack, ada: Caller, office: Office) -> None:
    node = rack.node()
    machine = rack.rented(ada)
    container = rack.rented(ada, "h200.0", container=True)
    node.poll()
    spec = next(one.spec for one in node.desired.instances if one.id == machine)
    password = spec.password  # type: ignore[union-attr]
    assert password
    hidden = rack.office.ask("instances.list", {}, ada)
    told = msgspec.json.encode(hidden.body, enc_hook=str).decode()
    assert password not in told and "canary-env" not in told
    login = rack.show(ada, machine)["virtual_machines"][0]["login_info"]
    assert login == {"HiddenPassword": {"username": "ubuntu"}}
    shown = rack.show(ada, machine, with_credentials=True)
    assert shown["virtual_machines"][0]["login_info"]["UsernameAndPassword"]["password"] == password
    assert password in shown["instructions"] and rack.show(ada, container)["instructions"] is None
    reader = office.person("readonly_admin")
    refused = office.ask("instances.list", {"mask": {"with_credentials": True}}, reader)
    assert (refused.status, refused.code) == (403, "CredentialsNotPermitted")
    assert len(office.ask("instances.list", {}, reader).body["instances"]) == 2


def test_selectors_scopes_and_whose_instances_are_whose(rack: Rack, ada: Caller, office: Office) -> None:
    rack.node(gpus=4)
    bob = office.person(balance=1000 * NANO)
    team = office.team(owner=ada)
    with office.database.write() as unit:
        accounts.top_up(unit, team.account_id, 1000 * NANO, key="t", now=office.clock(), random=office.random)
    own = rack.rented(ada, tags=["a", "b"], cluster_name="blue")
    teams = rack.rented(ada, team_id=team.id, tags=["b"])
    his = rack.rented(bob)

    def ids(who: Caller, selector: Any) -> set[str]:
        office.wait(1)
        answer = office.ask("instances.list", {"selector": selector}, who)
        assert answer.status == 200, answer.body
        return {one["id"] for one in answer.body["instances"]}

    assert ids(ada, "All") == {own, teams} and ids(bob, "All") == {his}
    assert ids(ada, {"ById": [own, teams, his]}) == ids(ada, {"ByID": [own, teams]}) == {own, teams}
    assert ids(ada, {"ByStatus": {"statuses": ["Initializing"], "scope": "Personal"}}) == {own}
    assert ids(ada, {"ByStatus": {"statuses": ["Initializing"], "scope": {"Teams": [team.id]}}}) == {teams}
    assert ids(ada, {"ByStatus": {"statuses": ["Initializing"], "scope": {"PersonalAndTeams": [team.id]}}}) == {
        own,
        teams,
    }
    assert ids(ada, {"ByStatus": ["Active"]}) == set()
    assert ids(ada, {"ByClusterName": "blue"}) == {own}
    assert ids(ada, {"ByTags": {"all": ["a", "b"]}}) == {own}
    assert ids(ada, {"ByTags": {"any": ["a", "b"]}}) == {own, teams}
    assert ids(team, {"ByStatus": ["Initializing"]}) == {teams}
    assert ids(rack.operator(), {"ByStatus": {"statuses": ["Initializing"], "scope": "All"}}) == {own, teams, his}
    assert ids(office.person("admin"), {"ByUserId": bob.id}) == {his}
    for selector, code in (
        ({"ByUserId": bob.id}, "PermissionDenied"),
        ({"ByNodeId": "n"}, "NotNodeOperator"),
        ({"ByTeamId": team.id}, "ValidationFailed"),
        ({"ByStatus": {"statuses": ["Active"], "scope": {"Teams": ["other"]}}}, "NotTeamMember"),
    ):
        assert office.ask("instances.list", {"selector": selector}, ada).code == code
    old = office.ask("instances.stop", {"selector": {"ByTeamId": team.id}}, ada, X_Protocol_Version="v045")
    assert (old.status, old.code) == (400, "InvalidTransition")
    assert rack.terminate(bob, own).body == {"terminated": []}, "it does not exist for them"
    reader = office.person("readonly_admin")
    assert rack.terminate(reader, own, his).code == "PermissionDenied"
    assert {one["id"] for one in rack.terminate(rack.operator(), his).body["terminated"]} == {his}


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"selector": {"ByInstanceTypeAndLocation": {"instance_type": "none"}}}, 404, "InstanceTypeNotFound"),
        (
            {"selector": {"ByInstanceTypeAndLocation": {"instance_type": "h200.1", "datacenters": ["no"]}}},
            404,
            "DatacenterNotFound",
        ),
        ({"selector": {"ByNodeId": {"node_id": "no", "instance_type": "h200.1"}}}, 404, "NodeNotFound"),
        ({"config": {"VirtualMachine": {}}}, 400, "ValidationFailed"),
        ({"config": {"VirtualMachine": {"image_url": "file:///etc/passwd"}}}, 403, "PermissionDenied"),
        (
            {"config": {"VirtualMachine": {"image_url": "https://i.example/a", "ports": ["70000"]}}},
            400,
            "ValidationFailed",
        ),
        (
            {"config": {"VirtualMachine": {"image_url": "https://i.example/a", "cloudinit_url": "init.yaml"}}},
            400,
            "ValidationFailed",
        ),
        (
            {"config": {"VirtualMachine": {"image_url": "https://i.example/a", "ssh_key": {"ByName": ["no"]}}}},
            404,
            "SshKeyNotFound",
        ),
        ({"billing_exempt": True}, 403, "PermissionDenied"),
        ({"reuse_environment_id": "no"}, 400, "EnvironmentGone"),
        ({"require_quota_coverage": True}, 409, "NotCoveredByQuota"),
        ({"reservation": {"New": {"type_id": "no"}}}, 404, "ReservationNotFound"),
        ({"reservation": {"Existing": "no"}}, 404, "ReservationNotFound"),
        ({"network": "no"}, 404, "NetworkNotFound"),
        ({"team_id": "no"}, 403, "NotTeamMember"),
        ({"tags": ["a", "a"]}, 400, "ValidationFailed"),
        ({"name": "-x"}, 400, "ValidationFailed"),
        ({"manual_numa_config": {"gpu_indices": [0]}}, 403, "PermissionDenied"),
    ],
)
def test_what_is_refused_changes_nothing(
    change: dict[str, Any], status: int, code: str, rack: Rack, ada: Caller
) -> None:
    rack.node()
    answer = rack.rent(ada, **change)
    assert (answer.status, answer.code) == (status, code), answer.body
    assert rack.office.ask("instances.list", {}, ada).body["instances"] == [] and rack.audit().clean


_GPUS = "manual_numa_config.gpu_indices"
_POLICY = "cpu_sharing_policy"
CONTRADICTIONS: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("h200.0", {"manual_numa_config": {"gpu_indices": [0]}}, "ValidationFailed", _GPUS, "has no GPU, and 1 named"),
    (
        "h200.1",
        {"manual_numa_config": {"gpu_indices": [0, 1]}},
        "ValidationFailed",
        _GPUS,
        "has 1 of them, and 2 named",
    ),
    ("h200.2", {"manual_numa_config": {"gpu_indices": [1, 1]}}, "ValidationFailed", _GPUS, "each GPU once"),
    ("h200.1", {_POLICY: "Packed"}, "ValidationFailed", _POLICY, "h200.1 has Dedicated CPUs, not Packed"),
    ("h200.1", {_POLICY: "Shared"}, "SharedPolicyReserved", _POLICY, "h200.1 has Dedicated CPUs, not Shared"),
    ("h200.m", {_POLICY: "Dedicated"}, "ValidationFailed", _POLICY, "h200.m has Shared CPUs, not Dedicated"),
]


def test_what_contradicts_what_is_rented_is_refused_and_names_its_field(rack: Rack, office: Office) -> None:
    node = rack.node()
    allow_custom(rack)
    rack.variant("h200.m", gpu_count=1, mig_profile="3g.71gb", cpu_policy="Shared")
    admin = office.person("admin", balance=100 * NANO)
    for variant, more, code, param, why in CONTRADICTIONS:
        answer = rack.rent(admin, variant, **more)
        assert (answer.status, answer.code, answer.param) == (400, code, param), answer.body
        said = answer.body["error"]["message"]
        assert said.startswith(f"{param}: ") and why in said
    answer = rack.rent(admin, **custom(node.node_id, gpu=0, manual_numa_config={"gpu_indices": [0]}))
    where = f"selector.ByNodeWithResources.resources.{_GPUS}"
    assert (answer.status, answer.code, answer.param) == (400, "ValidationFailed", where)


def test_what_agrees_with_what_is_rented_may_be_said_again(rack: Rack, office: Office) -> None:
    rack.node()
    admin = office.person("admin", balance=100 * NANO)
    rack.rented(admin, "h200.0", manual_numa_config={"gpu_indices": []}, cpu_sharing_policy=None)
    threads = {"gpu_indices": [1], "cpu_ids": [4, 12, 5, 13]}
    chosen = rack.rented(admin, manual_numa_config=threads, cpu_sharing_policy="Dedicated")
    assert rack.show(admin, chosen)["gpu_mask"] == "2" and rack.audit().clean


def test_renting_takes_money_for_an_hour_and_an_answer_is_repeated(rack: Rack, office: Office, ada: Caller) -> None:
    rack.node()
    poor = office.person(balance=rack.COST - 1)
    assert rack.rent(poor).code == "InsufficientFunds"
    body = {
        "selector": {"ByInstanceTypeAndLocation": {"instance_type": "h200.1"}},
        "config": {"Docker": {"image": "busybox"}},
    }
    first = office.ask("instances.rent", body, ada, Idempotency_Key="k")
    again = office.ask("instances.rent", body, ada, Idempotency_Key="k")
    assert first.body == again.body and again.headers["Idempotency-Replayed"] == "true"
    assert office.ask("instances.rent", body, ada, X_Protocol_Version="v061").code == "UnsupportedVersion"
    assert len(office.ask("instances.list", {}, ada).body["instances"]) == 1


def test_custom_shapes_are_for_those_who_may(rack: Rack, ada: Caller, office: Office) -> None:
    node = rack.node()
    people = rack.operator()
    assert rack.rent(people, **custom(node.node_id)).code == "CustomInstancesDisabled"
    allow_custom(rack)
    assert rack.rent(ada, **custom(node.node_id)).code == "NotNodeOperator"
    for policy, code in ((None, "CpuSharingPolicyRequired"), ("Shared", "SharedPolicyReserved")):
        assert rack.rent(people, **{**custom(node.node_id), "cpu_sharing_policy": policy}).code == code
    with office.database.write() as unit:
        accounts.top_up(unit, people.account_id, 1000 * NANO, key="p", now=office.clock(), random=office.random)
    shown = rack.show(people, rack.rented(people, **custom(node.node_id)))
    # Half of the GPUs, 2 of 16 threads, 8 of 256 GiB of memory, 10 GiB of 4 TiB, by weight.
    whole = 2 * rack.COST
    parts = ((880_000, 1, 2), (60_000, 2, 16), (50_000, 8, 256), (10_000, 10, 4096))
    cost = sum(whole * weight * part // (total * 1_000_000) for weight, part, total in parts)
    assert shown["resource_info"]["instance_type"] is None
    assert int(shown["resource_info"]["cost_per_hour"] * 10_000_000) == cost


def test_a_disabled_gpu_stays_so_when_its_node_registers_again(rack: Rack, ada: Caller) -> None:
    node = rack.node()
    people = rack.operator()
    rack.office.ask("nodes.update", {"node_id": node.node_id, "disabled_gpus": ["0000:01:00.0"]}, people)
    node.poll()
    assert node.desired.disabled_gpus == ["0000:01:00.0"]
    typed = rack.office.ask("nodes.update", {"node_id": node.node_id, "disabled_gpus": ["01:00.0"]}, people)
    assert (typed.status, typed.param) == (400, "disabled_gpus") and "01:00.0" in typed.body["error"]["message"]
    node.boot_id = "another"
    node.register()
    (shown,) = rack.office.ask("nodes.list", {}, people).body["nodes"]
    assert [one["enabled"] for one in shown["hardware"]["gpus"]] == [False, True]
    assert shown["utilization"]["rentable_gpus"] == 1
    assert rack.rent(ada, "h200.2").status == 409 and rack.rent(ada).status == 201
    with pytest.raises(HttpError, match="409 StaleSession"):
        stale = node.session
        node.register()
        node.session = stale
        node.poll()


@pytest.mark.parametrize("turns", [False, True])
def test_clients_at_once_never_have_the_same_gpu(rack: Rack, turns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they take turns, as in one process, or not, as in several."""
    overtaken: list[str] = []
    queue = claims.queue

    def counted(unit: WriteUnit, node_id: str) -> None:
        overtaken.append(node_id)
        queue(unit, node_id)

    monkeypatch.setattr(claims, "queue", counted)
    rack.office.context.turns._patience_s = 60 if turns else 0
    rack.node("a", gpus=4, threads=64)
    rack.node("b", gpus=4, threads=64)
    desk, database = rack.office.desk, rack.office.database
    body = msgspec.json.encode(
        {
            "selector": {"ByInstanceTypeAndLocation": {"instance_type": "h200.1"}},
            "config": {"Docker": {"image": "busybox"}},
        }
    )
    answers: list[int] = []
    begin = threading.Barrier(8)

    def client(who: Caller) -> None:
        begin.wait()
        for _ in range(2):
            sent = Incoming(headers={"authorization": f"Bearer {who.key}"}, body=body)
            answers.append(desk.serve(rack.office.OPERATIONS["instances.rent"], sent).status)

    people = [rack.office.person(balance=1000 * NANO) for _ in range(8)]
    threads = [threading.Thread(target=client, args=(who,)) for who in people]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [201] * 8 + [409] * 8
    with database.read() as unit:
        live = gpu_slice_claim.c.released_at.is_(None)
        claimed = unit.select(select(func.count(), func.count(gpu_slice_claim.c.gpu_id.distinct())).where(live)).one()
    assert tuple(claimed) == (64, 8) and rack.audit().clean
    assert not (turns and overtaken), "nobody works out twice what others of the same process are working out"
