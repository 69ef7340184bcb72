"""Operations on recipes: people, teams and providers keep their own; admins keep everybody's, with groups and tags."""

from __future__ import annotations

from typing import Any

import msgspec

from marketplace.http.acting import party
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call, Operation, Reads, Writes
from marketplace.http.wire import Nothing
from marketplace.providers import service as providers
from marketplace.recipes import book, service
from marketplace.recipes.book import NameTakenError, Owner, Recipe, UnknownTagError
from marketplace.recipes.labels import LABELS
from marketplace.recipes.tables import recipe
from marketplace.recipes.wire import (
    AddAnswer,
    AddRequest,
    ByGroup,
    ByName,
    ByTag,
    GroupAnswer,
    ListAnswer,
    Owned,
    RecipeAnswer,
    RemoveAnswer,
    RemoveRequest,
    UpdateImageAnswer,
    UpdateImageRequest,
    VirtualMachine,
)
from marketplace.settings import service as settings
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.users.permissions import Permission

EVERYBODY = "everybody"
"""Whose matter a change of everybody's recipes is, in the audit log."""


def list_recipes(call: Call, unit: ReadUnit, request: Nothing) -> ListAnswer:
    """Return the recipes that the caller may use."""
    caller = call.caller
    person = caller.user is not None
    mine = book.usable(user_id=caller.id if person else None, team_id=None if person else caller.id)
    found = book.recipes(unit, mine)
    return ListAnswer(
        groups=[
            GroupAnswer(
                name=group.name,
                description=group.description,
                logo_url=group.logo_url,
                metadata=group.metadata,
                tags=list(group.tags),
                recipes=[_shown(one) for one in found if one.group_id == group.id],
            )
            for group in book.groups(unit)
        ],
        other_recipes=[_shown(one) for one in found if one.group_id is None],
    )


def add(call: Call, unit: WriteUnit, request: AddRequest) -> AddAnswer:
    """Add a recipe."""
    owner = _owner(call, unit, request)
    details = request.details.details.model_dump()
    kind = book.VM if isinstance(request.details, VirtualMachine) else book.DOCKER
    image_url = details.get("image_url")
    if kind == book.VM and image_url is None and owner == Owner():
        param = "details.VirtualMachine.image_url"
        raise Refusal(Code.VALIDATION_FAILED, f"{param}: everybody's machines name an image", param=param)
    _check_file(call, image_url, "details.VirtualMachine.image_url")
    group_id = None if request.group_name is None else book.group_id(unit, request.group_name)
    if request.group_name is not None and group_id is None:
        raise Refusal(Code.NOT_FOUND, "There is no such group.", param="group_name")
    values = {
        "name": request.name,
        "description": request.description,
        "group_id": group_id,
        "logo_url": request.logo_url,
        "instructions_url": request.instructions_url,
        "kind": kind,
        "image_url": image_url,
        "details": msgspec.json.encode(details).decode(),
    }
    try:
        made = book.add(unit, owner, values, request.tags, now=call.now, random=call.context.random)
    except NameTakenError as error:
        raise Refusal(Code.NAME_EXISTS, "There is another recipe of this name.", param="name") from error
    except UnknownTagError as error:
        param = f"tags.{error.place}"
        raise Refusal(Code.VALIDATION_FAILED, f"{param}: there is no such tag", param=param) from error
    call.record(unit, "recipes.add", owner_id=owner.id or EVERYBODY, subject_id=made, kind=kind)
    (found,) = book.recipes(unit, recipe.c.id == made)
    return AddAnswer(recipe=_shown(found))


def remove(call: Call, unit: WriteUnit, request: RemoveRequest) -> RemoveAnswer:
    """Remove recipes of one owner; names, tags and groups that there are none of are absent from the answer."""
    owner = _owner(call, unit, request)
    ids = book.matching(unit, owner, **_chosen(request.selector))
    book.remove(unit, ids, call.now)
    for recipe_id in ids:
        call.record(unit, "recipes.remove", owner_id=owner.id or EVERYBODY, subject_id=recipe_id)
    return RemoveAnswer(removed_ids=ids)


def update_image(call: Call, unit: WriteUnit, request: UpdateImageRequest) -> UpdateImageAnswer:
    """Give everybody's recipes of virtual machines another image, and ask nodes to fetch it."""
    ids = book.matching(unit, Owner(), **_chosen(request.selector), kind=book.VM)
    if not ids:
        raise Refusal(Code.RECIPE_NOT_FOUND, "There is no such recipe of everybody's machines.", param="selector")
    book.set_image(unit, ids, request.image_url, request.image_sha256)
    asked = 0
    if request.sync_nodes:
        by_tag = settings.current(unit).filter_vm_images_by_tag
        asked = service.request_sync(unit, request.image_url, by_tag=by_tag, now=call.now, random=call.context.random)
    for recipe_id in ids:
        call.record(
            unit, "recipes.update_vm_image", owner_id=EVERYBODY, subject_id=recipe_id, sync_requested_nodes=asked
        )
    return UpdateImageAnswer(updated=len(ids), sync_requested_nodes=asked)


def _owner(call: Call, unit: ReadUnit, request: Owned) -> Owner:
    """Whose recipes a request is about. Refusal: ValidationFailed where two are named; PermissionDenied,
    NotTeamMember, ProviderNotFound."""
    named = [name for name in ("team_id", "provider", "everybody") if getattr(request, name)]
    if len(named) > 1:
        param = "global" if request.everybody else named[-1]
        raise Refusal(Code.VALIDATION_FAILED, f"{param}: a recipe has one owner", param=param)
    everything = Permission.RECIPES_WRITE_ALL in call.caller.permissions
    if request.everybody:
        if not everything:
            raise Refusal(Code.PERMISSION_DENIED, "Everybody's recipes are kept by admins.", param="global")
        return Owner()
    if request.provider is not None:
        found = providers.find_by_name(unit, request.provider)
        own = None if call.caller.user is None else providers.provider_of(unit, call.caller.id)
        if not everything and (found is None or own is None or own.id != found.id):
            raise Refusal(Code.PERMISSION_DENIED, "You do not act for this provider.", param="provider")
        if found is None:
            raise Refusal(Code.PROVIDER_NOT_FOUND, "There is no such provider.", param="provider")
        return Owner("provider", found.id)
    mine = party(call, unit, request.team_id)
    return Owner(mine.kind, mine.id)


def _check_file(call: Call, url: str | None, param: str) -> None:
    if url is not None and url.startswith("file:") and Permission.RECIPES_WRITE_ALL not in call.caller.permissions:
        raise Refusal(Code.PERMISSION_DENIED, "Files of nodes are named by admins.", param=param)


def _chosen(selector: ByName | ByTag | ByGroup) -> dict[str, Any]:
    if isinstance(selector, ByName):
        return {"names": selector.names}
    return {"tags": selector.tags} if isinstance(selector, ByTag) else {"groups": selector.groups}


def _shown(one: Recipe) -> RecipeAnswer:
    return RecipeAnswer(
        id=one.id,
        name=one.name,
        description=one.description,
        logo_url=one.logo_url,
        instructions_url=one.instructions_url,
        tags=list(one.tags),
        details={one.kind: one.details},
    )


_IMAGE = "https://images.example/ubuntu-24.04.qcow2"
_DETAILS = {"image_url": _IMAGE, "cloudinit_url": "", "os_family": "ubuntu", "architecture": "x86_64"}
_RECIPE = {
    "id": "019a0f6c-2a00-7abc-8def-000000000051",
    "name": "Ubuntu 24.04 Server",
    "description": "",
    "logo_url": None,
    "instructions_url": None,
    "tags": ["gpuvendor-driver"],
    "details": {"VirtualMachine": {**_DETAILS, "image_sha256": None}},
}
_OWNERS = (Code.NOT_TEAM_MEMBER, Code.PROVIDER_NOT_FOUND)

OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="recipes.list",
        summary="Recipes that the caller may use, by group.",
        path="/api/v1/recipes/list",
        request=Nothing,
        response=ListAnswer,
        permission=Permission.RECIPES_READ,
        rate="read",
        handler=Reads(list_recipes),
        example={},
        answer={
            "groups": [
                {
                    "name": "Linux",
                    "description": "",
                    "logo_url": None,
                    "metadata": None,
                    "tags": ["VM"],
                    "recipes": [_RECIPE],
                }
            ],
            "other_recipes": [],
        },
    ),
    Operation(
        name="recipes.add",
        summary="Add a recipe of the caller's, of a team, of a provider, or for everybody.",
        path="/api/v1/recipes/add",
        request=AddRequest,
        response=AddAnswer,
        permission=Permission.RECIPES_WRITE,
        rate="write",
        handler=Writes(add),
        example={
            "name": "Ubuntu 24.04 Server",
            "description": "",
            "details": {"VirtualMachine": _DETAILS},
            "tags": ["gpuvendor-driver"],
            "global": False,
        },
        answer={"recipe": _RECIPE},
        errors=(*_OWNERS, Code.NAME_EXISTS, Code.NOT_FOUND),
    ),
    Operation(
        name="recipes.remove",
        summary="Remove recipes by name, tag or group; machines that were made by them stay.",
        path="/api/v1/recipes/remove",
        request=RemoveRequest,
        response=RemoveAnswer,
        permission=Permission.RECIPES_WRITE,
        rate="write",
        handler=Writes(remove),
        example={"selector": {"Name": ["Ubuntu 24.04 Server"]}},
        answer={"removed_ids": [_RECIPE["id"]]},
        errors=_OWNERS,
    ),
    Operation(
        name="recipes.update_vm_image",
        summary="Give everybody's recipes of virtual machines another image, and ask nodes to fetch it.",
        path="/api/v1/recipes/update_vm_image",
        request=UpdateImageRequest,
        response=UpdateImageAnswer,
        permission=Permission.RECIPES_WRITE_ALL,
        rate="write",
        handler=Writes(update_image),
        example={"selector": {"Name": ["Ubuntu 24.04 Server"]}, "image_url": _IMAGE, "sync_nodes": True},
        answer={"updated": 1, "sync_requested_nodes": 7},
        errors=(Code.RECIPE_NOT_FOUND,),
    ),
    *LABELS,
)
