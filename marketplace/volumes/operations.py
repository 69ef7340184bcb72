"""Operations on volumes and their types. Volumes answer at two addresses: beside everything else, and below /public,
where a team's have a place of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from marketplace.catalog import datacenters
from marketplace.events.transitions import scene_of
from marketplace.http.acting import Party, party
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call, Operation, Reads, Writes
from marketplace.http.pagination import next_cursor
from marketplace.http.principal import PERSONAL
from marketplace.http.wire import Nothing
from marketplace.ledger.book import InsufficientFundsError
from marketplace.providers import service as providers
from marketplace.settings import service as settings
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.users.permissions import Permission
from marketplace.volumes import keeping, listing, types
from marketplace.volumes.keeping import Asked, NameTakenError
from marketplace.volumes.rules import rate
from marketplace.volumes.service import UnknownVolumeError, VolumeBusyError
from marketplace.volumes.wire import (
    AddTypeRequest,
    ById,
    ByName,
    CreateForTeam,
    CreateRequest,
    DeleteAnswer,
    ListAnswer,
    ListForTeam,
    ListRequest,
    TypeAnswer,
    TypeId,
    TypesAnswer,
    UpdateForTeam,
    UpdateRequest,
    VolumeAnswer,
    VolumeOfTeam,
    VolumeOne,
    VolumeRequest,
)


def create(call: Call, unit: WriteUnit, request: CreateRequest) -> VolumeOne:
    """Make a volume."""
    if request.billing_exempt and Permission.ACCOUNT_ADJUST not in call.caller.permissions:
        raise Refusal(Code.PERMISSION_DENIED, "Only admins exempt volumes from billing.", param="billing_exempt")
    mine = party(call, unit, request.team_id)
    place = _datacenter(unit, request.datacenter)
    kind = types.named(unit, place.id, request.volume_type_name)
    if kind is None:
        raise Refusal(Code.VOLUME_NOT_FOUND, "The datacenter has no such type of volume.", param="volume_type_name")
    asked = Asked(
        account_id=mine.account_id,
        owner_kind=mine.kind,
        owner_id=mine.id,
        user_id=None if call.caller.user is None else call.caller.id,
        name=request.name,
        description=request.description,
        size_gb=request.size_gb,
        type_id=kind.id,
        datacenter_id=place.id,
        provider_id=place.provider_id,
        cost_per_gb_month=kind.cost_per_gb_month,
        billing_exempt=request.billing_exempt,
    )
    try:
        volume_id = keeping.create(unit, asked, settings.current(unit).provider_share, scene_of(call))
    except NameTakenError as error:
        raise _taken() from error
    except InsufficientFundsError as error:
        raise Refusal(Code.INSUFFICIENT_FUNDS, "The balance and the credit are used up.") from error
    return _one(unit, mine, volume_id)


def list_volumes(call: Call, unit: ReadUnit, request: ListRequest) -> ListAnswer:
    """Return a page of volumes."""
    mine, selector = party(call, unit, request.team_id), request.selector
    found = listing.page(
        unit,
        mine.account_id,
        ids=selector.ids if isinstance(selector, ById) else None,
        names=selector.names if isinstance(selector, ByName) else None,
        cursor=request.cursor,
        limit=request.limit,
    )
    return ListAnswer(
        volumes=[_answer(row) for row in found[: request.limit]],
        next_cursor=next_cursor([(row.created_at, row.id) for row in found], request.limit),
    )


def get(call: Call, unit: ReadUnit, request: VolumeRequest) -> VolumeOne:
    """Return a volume."""
    return _one(unit, party(call, unit, request.team_id), request.volume_id)


def update(call: Call, unit: WriteUnit, request: UpdateRequest) -> VolumeOne:
    """Give a volume another name or description."""
    mine, row = _mine(call, unit, request)
    told = request.description if "description" in request.model_fields_set else row.description
    try:
        keeping.change(unit, row, name=request.name or row.name, description=told, now=call.now)
    except NameTakenError as error:
        raise _taken() from error
    call.record(unit, "volumes.update", owner_id=mine.id, subject_id=row.id)
    return _one(unit, mine, row.id)


def delete(call: Call, unit: WriteUnit, request: VolumeRequest) -> DeleteAnswer:
    """Delete a volume."""
    _, row = _mine(call, unit, request)
    try:
        keeping.delete(unit, row, scene_of(call))
    except VolumeBusyError as error:
        raise Refusal(Code.VOLUME_ATTACHED, "An instance has the volume.", param="volume_id") from error
    return DeleteAnswer(volume_id=row.id)


def list_types(call: Call, unit: ReadUnit, request: Nothing) -> TypesAnswer:
    """Return the types on offer."""
    return TypesAnswer(
        types=[
            TypeAnswer(id=row.id, name=row.name, datacenter=row.datacenter, cost_per_gb_per_month=row.cost_per_gb_month)
            for row in types.every(unit)
        ]
    )


def add_type(call: Call, unit: WriteUnit, request: AddTypeRequest) -> TypeId:
    """Offer a type in a datacenter."""
    place = _datacenter(unit, request.datacenter)
    _check_operator(call, unit, place.provider_id, "datacenter")
    try:
        type_id = types.add(
            unit,
            datacenter_id=place.id,
            name=request.name,
            cost_per_gb_month=request.cost_per_gb_per_month,
            now=call.now,
            random=call.context.random,
        )
    except types.NameTakenError as error:
        raise Refusal(Code.NAME_EXISTS, "The datacenter has a type of this name.", param="name") from error
    call.record(
        unit,
        "volumes.types_add",
        owner_id=place.provider_id,
        subject_id=type_id,
        nano=request.cost_per_gb_per_month,
    )
    return TypeId(id=type_id)


def remove_type(call: Call, unit: WriteUnit, request: TypeId) -> TypeId:
    """Offer a type no more."""
    found = types.find(unit, request.id)
    if found is None:
        raise Refusal(Code.VOLUME_NOT_FOUND, "There is no such type of volume.", param="id")
    _check_operator(call, unit, found.provider_id, "id")
    types.remove(unit, found.id, call.now)
    call.record(unit, "volumes.types_remove", owner_id=found.provider_id, subject_id=found.id)
    return request


def _mine(call: Call, unit: WriteUnit, request: VolumeRequest) -> tuple[Party, Any]:
    """Whose a volume is, and its row, locked. Refusal: VolumeNotFound."""
    mine = party(call, unit, request.team_id)
    try:
        return mine, keeping.lock(unit, request.volume_id, mine.account_id)
    except UnknownVolumeError as error:
        raise _unknown() from error


def _datacenter(unit: ReadUnit, name: str) -> datacenters.Datacenter:
    found = datacenters.by_name(unit, [name])
    if not found:
        raise Refusal(Code.DATACENTER_NOT_FOUND, "There is no such datacenter.", param="datacenter")
    return found[0]


def _check_operator(call: Call, unit: ReadUnit, provider_id: str, param: str) -> None:
    """Refusal: NotNodeOperator, unless the caller acts for the provider or is an admin."""
    if Permission.PROVIDERS_WRITE in call.caller.permissions:
        return
    own = providers.provider_of(unit, call.caller.id)
    if own is None or own.id != provider_id:
        raise Refusal(Code.NOT_NODE_OPERATOR, "The datacenter is another provider's.", param=param)


def _taken() -> Refusal:
    return Refusal(Code.VOLUME_NAME_EXISTS, "The account has a volume of this name.", param="name")


def _unknown() -> Refusal:
    return Refusal(Code.VOLUME_NOT_FOUND, "There is no such volume.", param="volume_id")


def _one(unit: ReadUnit, mine: Party, volume_id: str) -> VolumeOne:
    row = listing.find(unit, mine.account_id, volume_id)
    if row is None:
        raise _unknown()
    return VolumeOne(volume=_answer(row))


def _answer(row: Any) -> VolumeAnswer:
    return VolumeAnswer(
        id=row.id,
        name=row.name,
        description=row.description,
        size_gb=row.size_gb,
        disk_usage=row.disk_usage,
        status=row.status,
        volume_type_name=row.type_name,
        attached_executor_id=row.instance_id,
        mount_path=row.mount_path,
        datacenter_name=row.datacenter,
        datacenters=[row.datacenter],
        cost_per_month=rate(row.size_gb, row.cost_per_gb_month),
        billing_exempt=row.billing_exempt,
        created_at=row.created_at,
        updated_at=row.updated_at,
        delete_after=row.delete_after,
    )


_ID = "019a0f6c-2a00-7abc-8def-000000000051"
_TYPE_ID = "019a0f6c-2a00-7abc-8def-000000000050"
_TEAM_ID = "019a0f6c-2a00-7abc-8def-000000000007"
_VOLUME = {
    "id": _ID,
    "name": "data",
    "description": None,
    "size_gb": 100,
    "disk_usage": 0,
    "status": "Available",
    "volume_type_name": "standard",
    "attached_executor_id": None,
    "mount_path": None,
    "datacenter_name": "eu-1",
    "datacenters": ["eu-1"],
    "cost_per_month": 1000,
    "billing_exempt": False,
    "created_at": "2026-11-21T01:00:00Z",
    "updated_at": "2026-11-21T01:00:00Z",
    "delete_after": None,
}
_ONE = {"volume": _VOLUME}

_VOLUMES: tuple[Operation[Any], ...] = (
    Operation(
        name="volumes.list",
        summary="Volumes of the caller or of a team, newest first.",
        path="/api/v1/volumes/list",
        request=ListRequest,
        response=ListAnswer,
        permission=Permission.VOLUMES_READ,
        rate="read",
        handler=Reads(list_volumes),
        example={"selector": "All"},
        answer={"volumes": [_VOLUME], "next_cursor": None},
        errors=(Code.NOT_TEAM_MEMBER,),
    ),
    Operation(
        name="volumes.create",
        summary="Make a volume; it costs from now on until it is deleted.",
        path="/api/v1/volumes/create",
        request=CreateRequest,
        response=VolumeOne,
        permission=Permission.VOLUMES_WRITE,
        rate="write",
        success=201,
        idempotent=True,
        handler=Writes(create),
        example={"name": "data", "size_gb": 100, "datacenter": "eu-1", "volume_type_name": "standard"},
        answer=_ONE,
        errors=(
            Code.NOT_TEAM_MEMBER,
            Code.DATACENTER_NOT_FOUND,
            Code.VOLUME_NOT_FOUND,
            Code.VOLUME_NAME_EXISTS,
            Code.INSUFFICIENT_FUNDS,
        ),
    ),
    Operation(
        name="volumes.update",
        summary="Give a volume another name or description.",
        path="/api/v1/volumes/update",
        request=UpdateRequest,
        response=VolumeOne,
        permission=Permission.VOLUMES_WRITE,
        rate="write",
        handler=Writes(update),
        example={"volume_id": _ID, "name": "data"},
        answer=_ONE,
        errors=(Code.NOT_TEAM_MEMBER, Code.VOLUME_NOT_FOUND, Code.VOLUME_NAME_EXISTS),
    ),
    Operation(
        name="volumes.delete",
        summary="Delete a volume and what is on it.",
        path="/api/v1/volumes/delete",
        request=VolumeRequest,
        response=DeleteAnswer,
        permission=Permission.VOLUMES_WRITE,
        rate="write",
        handler=Writes(delete),
        example={"volume_id": _ID},
        answer={"volume_id": _ID},
        errors=(Code.NOT_TEAM_MEMBER, Code.VOLUME_NOT_FOUND, Code.VOLUME_ATTACHED),
    ),
    Operation(
        name="volumes.get",
        summary="One volume.",
        path="/api/v1/volumes/get",
        request=VolumeRequest,
        response=VolumeOne,
        permission=Permission.VOLUMES_READ,
        rate="read",
        handler=Reads(get),
        example={"volume_id": _ID},
        answer=_ONE,
        errors=(Code.NOT_TEAM_MEMBER, Code.VOLUME_NOT_FOUND),
    ),
)


def _moved(row: Operation[Any], noun: str, place: str, **changes: Any) -> Operation[Any]:
    """The same operation under another name, at another address."""
    verb = row.name.partition(".")[2]
    return replace(row, name=f"{noun}.{verb}", path=f"/public/{place}/{verb}", **changes)


_FOR_TEAMS: Mapping[type[BaseModel], type[BaseModel]] = {
    ListRequest: ListForTeam,
    CreateRequest: CreateForTeam,
    UpdateRequest: UpdateForTeam,
    VolumeRequest: VolumeOfTeam,
}
_PUBLIC = tuple(_moved(row, "public_volumes", "volumes") for row in _VOLUMES)
_TEAMS = tuple(
    _moved(
        row,
        "team_volumes",
        "team-volumes",
        request=_FOR_TEAMS[row.request],
        example={**row.example, "team_id": _TEAM_ID},
    )
    for row in _VOLUMES[:4]
)
_TYPES: tuple[Operation[Any], ...] = (
    Operation(
        name="volumes.types_list",
        summary="The types of volumes that datacenters offer, with their prices.",
        path="/api/v1/volumes/types/list",
        request=Nothing,
        response=TypesAnswer,
        permission=Permission.VOLUMES_READ,
        rate="read",
        handler=Reads(list_types),
        example={},
        answer={"types": [{"id": _TYPE_ID, "name": "standard", "datacenter": "eu-1", "cost_per_gb_per_month": 10}]},
    ),
    Operation(
        name="volumes.types_add",
        summary="Offer a type of volume in a datacenter.",
        path="/api/v1/volumes/types/add",
        request=AddTypeRequest,
        response=TypeId,
        permission=Permission.VOLUMES_TYPES,
        credentials=PERSONAL,
        rate="write",
        handler=Writes(add_type),
        example={"datacenter": "eu-1", "name": "standard", "cost_per_gb_per_month": 10},
        answer={"id": _TYPE_ID},
        errors=(Code.DATACENTER_NOT_FOUND, Code.NOT_NODE_OPERATOR, Code.NAME_EXISTS),
    ),
    Operation(
        name="volumes.types_remove",
        summary="Offer a type of volume no more; volumes of it stay as they are.",
        path="/api/v1/volumes/types/remove",
        request=TypeId,
        response=TypeId,
        permission=Permission.VOLUMES_TYPES,
        credentials=PERSONAL,
        rate="write",
        handler=Writes(remove_type),
        example={"id": _TYPE_ID},
        answer={"id": _TYPE_ID},
        errors=(Code.VOLUME_NOT_FOUND, Code.NOT_NODE_OPERATOR),
    ),
)
OPERATIONS: tuple[Operation[Any], ...] = (*_VOLUMES, *_PUBLIC, *_TEAMS, *_TYPES)
