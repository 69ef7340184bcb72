"""Recipes: whose they are, who may use them, which images nodes keep ready, and what tags say of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select

from marketplace.nodes.rules import OPEN_TAG, PROPRIETARY_TAG
from marketplace.nodes.tables import node, node_command
from marketplace.providers import service as providers
from marketplace.recipes import service
from tests.marketplace.site import Site

if TYPE_CHECKING:
    from tests.marketplace.conftest import Answer, Caller, Office

IMAGE = "https://images.example/a.qcow2"


@pytest.fixture
def admin(office: Office) -> Caller:
    return office.person("admin")


def vm(image: str | None = IMAGE) -> dict[str, Any]:
    return {"VirtualMachine": {} if image is None else {"image_url": image}}


def add(office: Office, who: Caller, name: str = "Ubuntu", **more: Any) -> Answer:
    return office.ask("recipes.add", {"name": name, "details": vm(), **more}, who)


def added(office: Office, who: Caller, name: str = "Ubuntu", **more: Any) -> dict[str, Any]:
    answer = add(office, who, name, **more)
    assert answer.status == 200, answer.body
    return dict(answer.body["recipe"])


def names(office: Office, who: Caller) -> list[str]:
    body = office.ask("recipes.list", {}, who).body
    return sorted(one["name"] for one in body["other_recipes"] + [r for g in body["groups"] for r in g["recipes"]])


def tags_of(office: Office, image: str) -> frozenset[str]:
    with office.database.read() as unit:
        return service.tags_of_image(unit, image)


def ready_on(office: Office, node_id: str, *, by_tag: bool) -> list[str]:
    with office.database.read() as unit:
        return [one.url.rpartition("/")[2] for one in service.images_for(unit, node_id, by_tag=by_tag)]


def test_recipes_belong_to_people_teams_providers_or_everybody(office: Office, admin: Caller) -> None:
    ada, stranger = office.person(), office.person()
    team = office.team(owner=ada)
    site = Site(office)
    added(office, admin, "everybody's", **{"global": True})
    added(office, ada, "ada's", details=vm(None))
    added(office, ada, "the team's", team_id=team.id, details={"Docker": {"image": "busybox", "command": ["sleep"]}})
    added(office, team, "the key's")
    added(office, site.operator, "the provider's", provider="ACME")
    assert names(office, ada) == ["ada's", "everybody's", "the key's", "the team's"]
    assert names(office, team) == ["everybody's", "the key's", "the team's"]
    assert names(office, site.operator) == ["everybody's", "the provider's"]
    assert names(office, stranger) == ["everybody's"]
    with office.database.write() as unit:
        providers.add_customer(unit, site.provider_id, stranger.id, now=office.clock())
    assert names(office, stranger) == ["everybody's", "the provider's"]
    shown = {one["name"]: one for one in office.ask("recipes.list", {}, ada).body["other_recipes"]}
    assert shown["the team's"]["details"] == {
        "Docker": {"image": "busybox", "command": ["sleep"], "env": [], "ports": []}
    }
    assert shown["ada's"]["details"]["VirtualMachine"]["image_url"] is None


def test_who_may_not_add_or_remove_for_an_owner(office: Office, admin: Caller) -> None:
    ada = office.person()
    team = office.team()
    Site(office)
    for more, status, code, param in (
        ({"global": True}, 403, "PermissionDenied", "global"),
        ({"team_id": team.id}, 403, "NotTeamMember", "team_id"),
        ({"provider": "acme"}, 403, "PermissionDenied", "provider"),
        ({"provider": "none"}, 403, "PermissionDenied", "provider"),
        ({"provider": "acme", "team_id": team.id}, 400, "ValidationFailed", "provider"),
    ):
        for answer in (
            add(office, ada, **more),
            office.ask("recipes.remove", {"selector": {"Name": ["x"]}, **more}, ada),
        ):
            assert (answer.status, answer.code, answer.param) == (status, code, param)
    unknown = add(office, admin, provider="none")
    assert (unknown.status, unknown.code, unknown.param) == (404, "ProviderNotFound", "provider")


def test_what_a_recipe_cannot_be(office: Office, admin: Caller) -> None:
    url = "details.VirtualMachine.image_url"
    local = {"details": vm("file:///etc/shadow")}
    refused: list[tuple[Caller, dict[str, Any], int, str, str]] = [
        (admin, {"details": vm(None), "global": True}, 400, "ValidationFailed", url),
        (admin, {"details": vm("ftp://x/y")}, 400, "ValidationFailed", url),
        (admin, {"details": vm("https://user:pass@x/y")}, 400, "ValidationFailed", url),
        (office.person(), local, 403, "PermissionDenied", url),
        (admin, {"tags": [OPEN_TAG, "unheard"]}, 400, "ValidationFailed", "tags.1"),
        (admin, {"tags": [OPEN_TAG, OPEN_TAG]}, 400, "ValidationFailed", "tags"),
        (admin, {"group_name": "none"}, 404, "NotFound", "group_name"),
    ]
    for who, more, *told in refused:
        answer = add(office, who, **more)
        assert [answer.status, answer.code, answer.param] == told, more
    added(office, admin)
    again = add(office, admin)
    assert (again.status, again.code, again.param) == (409, "NameExists", "name")
    assert add(office, office.person()).status == 200, "another owner may have the name"


def test_removed_by_name_tag_and_group_within_one_owner(office: Office, admin: Caller) -> None:
    ada = office.person()
    office.ask("recipe_groups.add", {"name": "Linux", "tags": [OPEN_TAG]}, admin)
    added(office, admin, "one", tags=[OPEN_TAG], **{"global": True})
    added(office, admin, "two", group_name="Linux", **{"global": True})
    added(office, ada, "one", group_name="Linux", tags=[OPEN_TAG])
    gone = office.ask("recipes.remove", {"selector": {"Tag": [OPEN_TAG]}, "global": True}, admin).body["removed_ids"]
    assert len(gone) == 1 and names(office, ada) == ["one", "two"]
    assert len(office.ask("recipes.remove", {"selector": {"Group": ["Linux"]}}, ada).body["removed_ids"]) == 1
    assert names(office, ada) == ["two"]
    assert office.ask("recipes.remove", {"selector": {"Name": ["two"]}}, ada).body == {"removed_ids": []}
    added(office, ada, "one")


def test_groups_and_tags_are_kept_by_admins(office: Office, admin: Caller) -> None:
    ask = office.ask
    assert ask("recipe_tags.add", {"name": "VM"}, admin).body == {"name": "VM"}
    assert ask("recipe_groups.add", {"name": "Linux", "tags": ["VM"], "metadata": {"order": 1}}, admin).status == 200
    added(office, admin, group_name="Linux", tags=["VM"], **{"global": True})
    (group,) = ask("recipes.list", {}, office.person()).body["groups"]
    assert (group["name"], group["tags"], group["metadata"]) == ("Linux", ["VM"], {"order": 1})
    assert [one["tags"] for one in group["recipes"]] == [["VM"]]
    assert ask("recipe_tags.change", {"name": "VM", "new_name": "Machines"}, admin).body == {"name": "Machines"}
    body = {"name": "Linux", "new_name": "Systems", "metadata": None, "description": "Plain"}
    assert ask("recipe_groups.change", body, admin).body == {"name": "Systems"}
    (group,) = ask("recipes.list", {}, admin).body["groups"]
    assert (group["name"], group["tags"], group["metadata"]) == ("Systems", ["Machines"], None)
    assert group["description"] == "Plain" and group["recipes"][0]["tags"] == ["Machines"]
    assert ask("recipe_tags.remove", {"name": "Machines"}, admin).status == 200
    assert ask("recipe_groups.remove", {"name": "Systems"}, admin).status == 200
    body = ask("recipes.list", {}, admin).body
    assert body["groups"] == [] and [one["tags"] for one in body["other_recipes"]] == [[]]
    for name in ("recipe_groups.remove", "recipe_groups.change", "recipe_tags.remove", "recipe_tags.change"):
        missing = ask(name, {"name": "gone"}, admin)
        assert (missing.status, missing.code, missing.param) == (404, "NotFound", "name")
    for name in ("one", "other"):
        ask("recipe_tags.add", {"name": name}, admin)
        ask("recipe_groups.add", {"name": name}, admin)
        office.wait(10)
    for noun in ("recipe_tags", "recipe_groups"):
        taken = ask(f"{noun}.add", {"name": "one"}, admin)
        assert (taken.status, taken.code, taken.param) == (409, "NameExists", "name")
        taken = ask(f"{noun}.change", {"name": "one", "new_name": "other"}, admin)
        assert (taken.status, taken.code, taken.param) == (409, "NameExists", "new_name")
    unheard = ask("recipe_groups.change", {"name": "one", "tags": ["unheard"]}, admin)
    assert (unheard.status, unheard.code, unheard.param) == (400, "ValidationFailed", "tags.0")


def test_the_tags_that_machines_are_placed_by_stay(office: Office, admin: Caller) -> None:
    for tag in (OPEN_TAG, PROPRIETARY_TAG):
        for name, more in (("recipe_tags.remove", {}), ("recipe_tags.change", {"new_name": "x"})):
            answer = office.ask(name, {"name": tag, **more}, admin)
            assert (answer.status, answer.code, answer.param) == (400, "ValidationFailed", "name")
        assert office.ask("recipe_tags.add", {"name": tag}, admin).code == "NameExists"


def test_only_everybody_s_images_have_tags_that_rentals_are_held_to(office: Office, admin: Caller) -> None:
    added(office, admin, tags=[OPEN_TAG], **{"global": True})
    added(office, office.person(), tags=[PROPRIETARY_TAG])
    assert tags_of(office, IMAGE) == {OPEN_TAG} and tags_of(office, "https://elsewhere/x") == frozenset()
    office.ask("recipes.remove", {"selector": {"Name": ["Ubuntu"]}, "global": True}, admin)
    assert tags_of(office, IMAGE) == frozenset()


def test_another_image_is_for_everybody_s_machines_and_nodes_are_asked_once_to_fetch_it(
    office: Office, admin: Caller
) -> None:
    site, ada = Site(office), office.person()
    nodes = [site.node(), site.node(gpus=1)]
    added(office, admin, **{"global": True})
    added(office, admin, "container", details={"Docker": {"image": "busybox"}}, **{"global": True})
    added(office, ada)
    new = "https://images.example/b.qcow2"
    body = {"selector": {"Name": ["Ubuntu", "container"]}, "image_url": new, "sync_nodes": True}
    for _ in range(2):
        assert office.ask("recipes.update_vm_image", body, admin).body == {"updated": 1, "sync_requested_nodes": 2}
    shown = {one["id"]: one["details"] for one in office.ask("recipes.list", {}, ada).body["other_recipes"]}
    urls = sorted(one["VirtualMachine"]["image_url"] for one in shown.values() if "VirtualMachine" in one)
    assert urls == [IMAGE, new], "a person's own recipe keeps its image"
    with office.database.read() as unit:
        asked = unit.select(select(node_command.c.node_id, node_command.c.kind)).all()
        assert sorted(asked) == sorted((node_id, "sync_images") for node_id in nodes)
        assert set(unit.select(select(node.c.desired_rev)).scalars()) == {3}
    quiet = office.ask("recipes.update_vm_image", {**body, "sync_nodes": False}, admin)
    assert quiet.body == {"updated": 1, "sync_requested_nodes": 0}
    missing = office.ask("recipes.update_vm_image", {**body, "selector": {"Name": ["container"]}}, admin)
    assert (missing.status, missing.code, missing.param) == (404, "RecipeNotFound", "selector")
    refused = office.ask("recipes.update_vm_image", body, site.operator)
    assert (refused.status, refused.code) == (403, "PermissionDenied")


def test_nodes_keep_images_ready_filtered_by_driver_tags_where_the_setting_says_so(
    office: Office, admin: Caller
) -> None:
    site = Site(office)
    plain, volta = site.node(), site.node(gpus=1, modules="ProprietaryOnly")
    blackwell = site.node(gpus=2, modules="OpenOnly")
    for name, tags in (("plain", []), ("open", [OPEN_TAG]), ("proprietary", [PROPRIETARY_TAG])):
        added(office, admin, name, tags=tags, details=vm(f"https://images.example/{name}"), **{"global": True})
    added(office, admin, "here", details=vm("file:///images/x"), **{"global": True})
    added(office, office.person(), "own")
    assert ready_on(office, plain, by_tag=False) == ["open", "plain", "proprietary"]
    assert ready_on(office, plain, by_tag=True) == ["plain"]
    assert ready_on(office, volta, by_tag=True) == ["plain", "proprietary"]
    assert ready_on(office, blackwell, by_tag=True) == ["open", "plain"]
    body = {"selector": {"Name": ["open"]}, "image_url": "https://images.example/open2", "sync_nodes": True}
    assert office.ask("recipes.update_vm_image", body, admin).body["sync_requested_nodes"] == 3
    office.ask("app_settings.update", {"settings": {"filter_vm_images_by_tag": True}}, admin)
    body["image_url"] = "https://images.example/open3"
    assert office.ask("recipes.update_vm_image", body, admin).body["sync_requested_nodes"] == 1
