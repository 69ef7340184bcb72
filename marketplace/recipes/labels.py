"""Operations on groups and tags of recipes: admins keep them."""

from __future__ import annotations

from typing import Any

import msgspec

from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call, Operation, Writes
from marketplace.recipes import book
from marketplace.recipes.book import NameTakenError, UnknownTagError
from marketplace.recipes.rules import DRIVER_TAGS
from marketplace.recipes.wire import (
    AddGroupRequest,
    AddTagRequest,
    ChangeGroupRequest,
    ChangeTagRequest,
    GroupRequest,
    Named,
    TagRequest,
)
from marketplace.store.db import WriteUnit
from marketplace.users.permissions import Permission

_OWNER = "everybody"


def add_group(call: Call, unit: WriteUnit, request: AddGroupRequest) -> Named:
    """Add a group."""
    values = {
        "name": request.name,
        "description": request.description,
        "logo_url": request.logo_url,
        "data": _written(request.metadata),
    }
    try:
        made = book.add_group(unit, values, request.tags, now=call.now, random=call.context.random)
    except NameTakenError as error:
        raise _taken("name") from error
    except UnknownTagError as error:
        raise _unknown_tag(error) from error
    call.record(unit, "recipe_groups.add", owner_id=_OWNER, subject_id=made)
    return Named(name=request.name)


def change_group(call: Call, unit: WriteUnit, request: ChangeGroupRequest) -> Named:
    """Change what is named of a group."""
    found = _group(unit, request.name)
    told = request.model_fields_set
    values: dict[str, Any] = {}
    if request.new_name is not None:
        values["name"] = request.new_name
    if request.description is not None:
        values["description"] = request.description
    if "logo_url" in told:
        values["logo_url"] = request.logo_url
    if "metadata" in told:
        values["data"] = _written(request.metadata)
    try:
        book.change_group(unit, found, values, request.tags)
    except NameTakenError as error:
        raise _taken("new_name") from error
    except UnknownTagError as error:
        raise _unknown_tag(error) from error
    call.record(unit, "recipe_groups.change", owner_id=_OWNER, subject_id=found, changed=sorted(told - {"name"}))
    return Named(name=request.new_name or request.name)


def remove_group(call: Call, unit: WriteUnit, request: GroupRequest) -> Named:
    """Remove a group."""
    found = _group(unit, request.name)
    book.remove_group(unit, found)
    call.record(unit, "recipe_groups.remove", owner_id=_OWNER, subject_id=found)
    return Named(name=request.name)


def add_tag(call: Call, unit: WriteUnit, request: AddTagRequest) -> Named:
    """Add a tag."""
    try:
        book.add_tag(unit, request.name, request.description, call.now)
    except NameTakenError as error:
        raise _taken("name") from error
    call.record(unit, "recipe_tags.add", owner_id=_OWNER, subject_id=request.name)
    return Named(name=request.name)


def change_tag(call: Call, unit: WriteUnit, request: ChangeTagRequest) -> Named:
    """Give a tag another name or description."""
    _tag(unit, request.name)
    try:
        book.change_tag(unit, request.name, request.new_name, request.description)
    except NameTakenError as error:
        raise _taken("new_name") from error
    call.record(unit, "recipe_tags.change", owner_id=_OWNER, subject_id=request.name)
    return Named(name=request.new_name or request.name)


def remove_tag(call: Call, unit: WriteUnit, request: TagRequest) -> Named:
    """Remove a tag from whatever has it."""
    _tag(unit, request.name)
    book.remove_tag(unit, request.name)
    call.record(unit, "recipe_tags.remove", owner_id=_OWNER, subject_id=request.name)
    return Named(name=request.name)


def _group(unit: WriteUnit, name: str) -> str:
    found = book.group_id(unit, name)
    if found is None:
        raise Refusal(Code.NOT_FOUND, "There is no such group.", param="name")
    return found


def _tag(unit: WriteUnit, name: str) -> None:
    """Refusal: NotFound; ValidationFailed for a tag that placement goes by."""
    if name in DRIVER_TAGS:
        raise Refusal(Code.VALIDATION_FAILED, "name: machines are placed by this tag: it stays", param="name")
    if not book.knows_tag(unit, name):
        raise Refusal(Code.NOT_FOUND, "There is no such tag.", param="name")


def _taken(param: str) -> Refusal:
    return Refusal(Code.NAME_EXISTS, "There is another of this name.", param=param)


def _unknown_tag(error: UnknownTagError) -> Refusal:
    param = f"tags.{error.place}"
    return Refusal(Code.VALIDATION_FAILED, f"{param}: there is no such tag", param=param)


def _written(data: dict[str, Any] | None) -> str | None:
    return None if data is None else msgspec.json.encode(data).decode()


def _row(name: str, summary: str, path: str, request: Any, handler: Any, example: dict[str, Any], *errors: Code) -> Any:
    """All of them are alike: admins change something, and are told its name."""
    return Operation(
        name=name,
        summary=summary,
        path=f"/api/v1/recipes/{path}",
        request=request,
        response=Named,
        permission=Permission.RECIPES_WRITE_ALL,
        rate="write",
        handler=Writes(handler),
        example=example,
        answer={"name": example.get("new_name", example["name"])},
        errors=errors,
    )


_GROUP = {"name": "Linux", "description": "Plain systems", "metadata": {"order": 1}, "tags": ["gpuvendor-driver"]}
_BOTH = (Code.NOT_FOUND, Code.NAME_EXISTS)

LABELS: tuple[Operation[Any], ...] = (
    _row("recipe_groups.add", "Add a group of recipes.", "groups/add", AddGroupRequest, add_group, _GROUP, *_BOTH[1:]),
    _row(
        "recipe_groups.change",
        "Change a group's name, description, logo, metadata or tags.",
        "groups/change",
        ChangeGroupRequest,
        change_group,
        {"name": "Linux", "new_name": "Systems"},
        *_BOTH,
    ),
    _row(
        "recipe_groups.remove",
        "Remove a group; its recipes stay.",
        "groups/remove",
        GroupRequest,
        remove_group,
        {"name": "Linux"},
        Code.NOT_FOUND,
    ),
    _row(
        "recipe_tags.add",
        "Add a tag for recipes and groups.",
        "tags/add",
        AddTagRequest,
        add_tag,
        {"name": "VM", "description": "Virtual machines"},
        Code.NAME_EXISTS,
    ),
    _row(
        "recipe_tags.change",
        "Give a tag another name or description, wherever it is.",
        "tags/change",
        ChangeTagRequest,
        change_tag,
        {"name": "VM", "new_name": "Machines"},
        *_BOTH,
    ),
    _row(
        "recipe_tags.remove",
        "Remove a tag from whatever has it.",
        "tags/remove",
        TagRequest,
        remove_tag,
        {"name": "VM"},
        Code.NOT_FOUND,
    ),
)
