"""Volumes as their owners keep them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from marketplace.accounts import service as accounts
from marketplace.events.transitions import SYSTEM, Scene
from marketplace.ledger.money import NANO
from marketplace.providers import service as providers
from marketplace.volumes import service as volumes
from marketplace.volumes.service import UnknownVolumeError, VolumeBusyError

if TYPE_CHECKING:
    from tests.marketplace.office import Answer, Caller, Office
    from tests.marketplace.yard import Yard

PLACE = "acme-1"


def offer(office: Office, name: str = "standard", cents: int = 10) -> str:
    body = {"datacenter": PLACE, "name": name, "cost_per_gb_per_month": cents}
    answer = office.ask("volumes.types_add", body, office.person("admin"))
    assert answer.status == 200, answer.body
    return str(answer.body["id"])


def make(office: Office, who: Caller, name: str = "data", where: str = "volumes", **more: Any) -> Answer:
    body = {"name": name, "size_gb": 100, "datacenter": PLACE, "volume_type_name": "standard", **more}
    return office.ask(f"{where}.create", body, who)


def names(office: Office, who: Caller, where: str = "volumes", **more: Any) -> list[str]:
    answer = office.ask(f"{where}.list", more, who)
    assert answer.status == 200, answer.body
    return [row["name"] for row in answer.body["volumes"]]


def attach(office: Office, who: Caller, instance_id: str, node_id: str, volume_id: str, path: str = "/data") -> None:
    scene = Scene(SYSTEM, office.clock(), office.random)
    with office.database.write() as unit:
        volumes.attach(unit, instance_id, node_id, who.account_id, [(volume_id, path)], scene, owner_id=who.id)


def detach(office: Office, who: Caller, instance_id: str) -> None:
    with office.database.write() as unit:
        scene = Scene(SYSTEM, office.clock(), office.random)
        volumes.on_over(unit, instance_id, scene, owner_id=who.id)


def test_life_of_a_volume(office: Office, yard: Yard) -> None:
    ada, node_id = office.person(balance=NANO), yard.node()
    offer(office)
    made = make(office, ada, description="what I trained")
    assert made.status == 201, made.body
    volume = made.body["volume"]
    assert (volume["status"], volume["size_gb"], volume["cost_per_month"]) == ("Available", 100, 1000)
    assert (volume["datacenter_name"], volume["datacenters"]) == (PLACE, [PLACE])
    assert (volume["attached_executor_id"], volume["mount_path"], volume["billing_exempt"]) == (None, None, False)
    assert office.ask("volumes.get", {"volume_id": volume["id"]}, ada).body == made.body
    body = {"volume_id": volume["id"], "name": "models"}
    renamed = office.ask("volumes.update", body, ada).body["volume"]
    assert (renamed["name"], renamed["description"]) == ("models", "what I trained")
    body = {"volume_id": volume["id"], "description": None}
    assert office.ask("volumes.update", body, ada).body["volume"]["description"] is None
    instance_id = yard.instance(ada, node_id)
    attach(office, ada, instance_id, node_id, volume["id"])
    seen = office.ask("volumes.get", {"volume_id": volume["id"]}, ada).body["volume"]
    assert (seen["status"], seen["attached_executor_id"], seen["mount_path"]) == ("Attached", instance_id, "/data")
    refused = office.ask("volumes.delete", {"volume_id": volume["id"]}, ada)
    assert (refused.status, refused.code, refused.param) == (409, "VolumeAttached", "volume_id")
    detach(office, ada, instance_id)
    for _ in range(2):
        gone = office.ask("volumes.delete", {"volume_id": volume["id"]}, ada)
        assert gone.body == {"volume_id": volume["id"]}
    assert office.ask("volumes.list", {}, ada).body["volumes"][0]["status"] == "Deleting"
    with office.database.write() as unit:
        assert volumes.erasing(unit, node_id) == [volume["id"]]
        for _ in range(2):
            volumes.erased(unit, node_id, Scene(SYSTEM, office.clock(), office.random))
        assert volumes.erasing(unit, node_id) == []
    assert names(office, ada) == []
    assert office.ask("volumes.delete", {"volume_id": volume["id"]}, ada).code == "VolumeNotFound"
    actions = [event["action"] for event in office.ask("events.list", {}, ada).body["events"]]
    mine = sorted(action.removeprefix("volumes.") for action in actions if action.startswith("volumes."))
    assert mine == ["attach", "create", "delete", "deleted", "detach", "made", "update", "update"]


def test_a_volume_that_was_never_used_is_gone_at_once(office: Office, yard: Yard) -> None:
    ada = office.person(balance=NANO)
    yard.node()
    offer(office)
    volume_id = make(office, ada).body["volume"]["id"]
    assert office.ask("volumes.delete", {"volume_id": volume_id}, ada).status == 200
    assert names(office, ada) == [] and make(office, ada).status == 201, "its name is free again"


@pytest.mark.parametrize("where", ["volumes", "public_volumes"])
def test_lists_show_what_is_asked_for(where: str, office: Office, yard: Yard) -> None:
    ada, eve = office.person(balance=NANO), office.person(balance=NANO)
    yard.node()
    offer(office)
    ids = [make(office, ada, name, where).body["volume"]["id"] for name in ("a", "b", "c")]
    assert names(office, ada, where) == ["c", "b", "a"]
    assert names(office, ada, where, selector={"ById": [ids[0], "nothing"]}) == ["a"]
    assert names(office, ada, where, selector={"ByName": ["b", "z"]}) == ["b"]
    page = office.ask(f"{where}.list", {"limit": 2}, ada).body
    assert [row["name"] for row in page["volumes"]] == ["c", "b"]
    assert names(office, ada, where, limit=2, cursor=page["next_cursor"]) == ["a"]
    assert names(office, eve, where, selector={"ById": ids}) == []
    for verb in ("get", "update", "delete"):
        foreign = office.ask(f"{where}.{verb}", {"volume_id": ids[0]}, eve)
        assert (foreign.status, foreign.code) == (404, "VolumeNotFound")


def test_a_team_s_volumes(office: Office, yard: Yard) -> None:
    ada, eve = office.person(), office.person()
    team = office.team(ada)
    with office.database.write() as unit:
        accounts.top_up(unit, team.account_id, NANO, key="t", now=office.clock(), random=office.random)
    yard.node()
    offer(office)
    made = make(office, ada, "data", "team_volumes", team_id=team.id)
    assert made.status == 201, made.body
    volume_id = made.body["volume"]["id"]
    assert make(office, ada, "own").code == "InsufficientFunds", "her own account is empty"
    assert names(office, ada) == [] and names(office, team) == names(office, ada, team_id=team.id) == ["data"]
    assert names(office, ada, "team_volumes", team_id=team.id) == ["data"]
    for verb in ("list", "create", "update", "delete"):
        row = office.OPERATIONS[f"team_volumes.{verb}"]
        assert row.path == f"/public/team-volumes/{verb}"
        without = {name: value for name, value in row.example.items() if name != "team_id"}
        assert office.ask(row.name, without, ada).param == "team_id"
        foreign = office.ask(row.name, {**row.example, "team_id": team.id}, eve)
        assert (foreign.status, foreign.code, foreign.param) == (403, "NotTeamMember", "team_id")
    body = {"volume_id": volume_id, "team_id": team.id, "name": "shared"}
    assert office.ask("team_volumes.update", body, ada).body["volume"]["name"] == "shared"
    del body["name"]
    assert office.ask("team_volumes.delete", body, ada).status == 200


def test_what_cannot_be_made(office: Office, yard: Yard) -> None:
    ada, poor = office.person(balance=NANO), office.person()
    yard.node()
    type_id = offer(office)
    assert make(office, ada).status == 201
    for answer, status, code, param in (
        (make(office, ada), 409, "VolumeNameExists", "name"),
        (make(office, ada, "b", datacenter="nowhere"), 404, "DatacenterNotFound", "datacenter"),
        (make(office, ada, "b", volume_type_name="none"), 404, "VolumeNotFound", "volume_type_name"),
        (make(office, ada, "b", size_gb=0), 400, "ValidationFailed", "size_gb"),
        (make(office, ada, "b", size_gb=70_000), 400, "ValidationFailed", "size_gb"),
        (make(office, ada, "-b"), 400, "ValidationFailed", "name"),
        (make(office, ada, "b", billing_exempt=True), 403, "PermissionDenied", "billing_exempt"),
        (make(office, poor), 402, "InsufficientFunds", None),
    ):
        assert (answer.status, answer.code, answer.param) == (status, code, param), answer.body
    assert make(office, office.person("admin"), billing_exempt=True).status == 201
    make(office, ada, "c")
    first = office.ask("volumes.list", {"selector": {"ByName": ["data"]}}, ada).body["volumes"][0]["id"]
    assert office.ask("volumes.update", {"volume_id": first, "name": "c"}, ada).code == "VolumeNameExists"
    assert office.ask("volumes.types_remove", {"id": type_id}, office.person("admin")).status == 200
    assert make(office, ada, "d").code == "VolumeNotFound" and names(office, ada) == ["c", "data"]


def test_types_are_for_whoever_has_the_datacenter(office: Office, yard: Yard) -> None:
    operator, stranger = yard.operator(), office.person("provider")
    yard.node()
    body = {"datacenter": PLACE.upper(), "name": "fast", "cost_per_gb_per_month": 25}
    assert office.ask("volumes.types_add", body, stranger).code == "NotNodeOperator"
    made = office.ask("volumes.types_add", body, operator)
    assert made.status == 200, made.body
    again = office.ask("volumes.types_add", body, operator)
    assert (again.status, again.code, again.param) == (409, "NameExists", "name")
    listed = office.ask("volumes.types_list", {}, office.person()).body["types"]
    assert listed == [{**made.body, "name": "fast", "datacenter": PLACE, "cost_per_gb_per_month": 25}]
    with office.database.write() as unit:
        other = providers.create(unit, name="zenith", now=office.clock(), random=office.random)
        providers.add_member(unit, other.id, stranger.id, is_root=False, now=office.clock())
    assert office.ask("volumes.types_remove", made.body, stranger).code == "NotNodeOperator"
    assert office.ask("volumes.types_remove", made.body, operator).status == 200
    assert office.ask("volumes.types_remove", made.body, operator).code == "VolumeNotFound"
    for cents in (-1, 1001):
        refused = office.ask("volumes.types_add", {**body, "cost_per_gb_per_month": cents}, operator)
        assert (refused.status, refused.param) == (400, "cost_per_gb_per_month")


def test_a_volume_is_attached_to_one_instance_on_one_node(office: Office, yard: Yard) -> None:
    ada, eve = office.person(balance=NANO), office.person(balance=NANO)
    node_id, elsewhere = yard.node(), yard.node("g08")
    offer(office)
    volume_id = make(office, ada).body["volume"]["id"]
    first, second, third = (yard.instance(ada, place) for place in (node_id, node_id, elsewhere))
    with pytest.raises(UnknownVolumeError):
        attach(office, eve, first, node_id, volume_id)
    attach(office, ada, first, node_id, volume_id)
    with pytest.raises(VolumeBusyError):
        attach(office, ada, second, node_id, volume_id)
    detach(office, ada, first)
    with pytest.raises(VolumeBusyError):
        attach(office, ada, third, elsewhere, volume_id)
    attach(office, ada, second, node_id, volume_id)
    with office.database.read() as unit:
        (mounted,) = volumes.of_instances(unit, [first, second])[second]
        assert (mounted.id, mounted.mount_path) == (volume_id, "/data")
        assert volumes.home_of(unit, ada.account_id, [volume_id])[1] == node_id


def test_of_those_who_want_one_name_at_once_one_gets_it(office: Office, yard: Yard) -> None:
    ada = office.person(balance=NANO)
    yard.node()
    offer(office)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: make(office, ada), range(4)))
    assert sorted(answer.status for answer in answers) == [201, 409, 409, 409]
