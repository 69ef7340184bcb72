"""Operations on reservations and their types."""

from __future__ import annotations

from typing import Any

import msgspec

from marketplace.accounts import service as accounts
from marketplace.events.transitions import scene_of
from marketplace.http.acting import Party, party
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call, Operation, Reads, Writes
from marketplace.http.pagination import next_cursor
from marketplace.http.principal import PERSONAL
from marketplace.http.wire import Nothing
from marketplace.ledger.book import InsufficientFundsError
from marketplace.reservations import listing, running, types
from marketplace.reservations.running import BoundError, NotRunningError, SilentError, UnknownInstanceError
from marketplace.reservations.service import Resources, UnknownReservationError, UnknownTypeError
from marketplace.reservations.wire import (
    AddTypeRequest,
    CreateRequest,
    Duration,
    ListAnswer,
    ListRequest,
    ReservationAnswer,
    ReservationId,
    Shape,
    TypeAnswer,
    TypeId,
    TypeOfInstance,
    TypesAnswer,
    Variant,
)
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.teams import service as teams
from marketplace.users.permissions import Permission

_REFUSALS: dict[type[Exception], tuple[Code, str, str | None]] = {
    UnknownInstanceError: (Code.INSTANCE_NOT_FOUND, "There is no such instance.", "executor_id"),
    UnknownTypeError: (Code.RESERVATION_NOT_FOUND, "There is no such type of reservation.", "reservation_type_id"),
    UnknownReservationError: (
        Code.RESERVATION_NOT_FOUND,
        "The instance has no reservation that is not over.",
        "executor_id",
    ),
    NotRunningError: (Code.INVALID_TRANSITION, "Only an active instance is reserved.", "executor_id"),
    BoundError: (Code.RESERVATION_BOUND, "The instance has a reservation: make it longer.", "executor_id"),
    SilentError: (Code.NODE_NOT_RESPONDING, "The node of the instance does not respond.", None),
    InsufficientFundsError: (
        Code.INSUFFICIENT_FUNDS,
        "The balance and the credit do not cover it.",
        "reservation_type_id",
    ),
}


def create(call: Call, unit: WriteUnit, request: CreateRequest) -> ReservationId:
    """Reserve an instance that runs: charged at once, or not at all."""
    mine = _payer(call, unit, request)
    try:
        reservation_id = running.create(
            unit,
            instance_id=request.executor_id,
            account_id=mine.account_id,
            user_id=None if call.caller.user is None else call.caller.id,
            team_id=mine.id if mine.kind == "team" else None,
            type_id=request.reservation_type_id,
            billing_exempt=request.billing_exempt,
            scene=scene_of(call),
        )
    except tuple(_REFUSALS) as error:
        raise _refusal(error) from error
    return ReservationId(reservation_id=reservation_id)


def update(call: Call, unit: WriteUnit, request: CreateRequest) -> ReservationId:
    """Make the reservation of an instance longer: charged at once, or not at all."""
    mine = _payer(call, unit, request)
    try:
        reservation_id = running.extend(
            unit,
            instance_id=request.executor_id,
            account_id=mine.account_id,
            type_id=request.reservation_type_id,
            billing_exempt=request.billing_exempt,
            scene=scene_of(call),
        )
    except tuple(_REFUSALS) as error:
        raise _refusal(error) from error
    return ReservationId(reservation_id=reservation_id)


def list_reservations(call: Call, unit: ReadUnit, request: ListRequest) -> ListAnswer:
    """Return a page of reservations."""
    whose = _accounts(call, unit, request)
    found = listing.page(unit, whose, cursor=request.cursor, limit=request.limit)
    return ListAnswer(
        reservations=[_answer(row) for row in found[: request.limit]],
        next_cursor=next_cursor([(row.created_at, row.id) for row in found], request.limit),
    )


def list_types(call: Call, unit: ReadUnit, request: Nothing) -> TypesAnswer:
    """Return the types on offer."""
    return TypesAnswer([_type(row) for row in types.every(unit)])


def add_type(call: Call, unit: WriteUnit, request: AddTypeRequest) -> TypeId:
    """Offer a type."""
    type_id = types.add(
        unit,
        duration_s=request.duration_secs,
        price_factor=request.price_factor,
        now=call.now,
        random=call.context.random,
    )
    call.record(
        unit,
        "reservations.types_add",
        owner_id=call.caller.id,
        subject_id=type_id,
        duration_s=request.duration_secs,
        price_factor_ppm=request.price_factor,
    )
    return TypeId(id=type_id)


def remove_type(call: Call, unit: WriteUnit, request: TypeId) -> TypeId:
    """Offer a type no more."""
    if not types.remove(unit, request.id, call.now):
        raise Refusal(Code.RESERVATION_NOT_FOUND, "There is no such type of reservation.", param="id")
    call.record(unit, "reservations.types_remove", owner_id=call.caller.id, subject_id=request.id)
    return request


def _payer(call: Call, unit: WriteUnit, request: CreateRequest) -> Party:
    """Who pays. Refusal: NotTeamMember; PermissionDenied for somebody else than an admin who would be charged
    nothing."""
    if request.billing_exempt and Permission.ACCOUNT_ADJUST not in call.caller.permissions:
        raise Refusal(Code.PERMISSION_DENIED, "Only admins reserve without being charged.", param="billing_exempt")
    return party(call, unit, request.team_id)


def _accounts(call: Call, unit: ReadUnit, request: ListRequest) -> set[str] | None:
    """Whose reservations are asked for, None for everybody's. Refusal: NotTeamMember, TeamNotFound."""
    everything = Permission.RESERVATIONS_READ_ALL in call.caller.permissions
    if request.selector == "All":
        if everything:
            return None
        known = teams.teams_of(unit, call.caller.id)
        return {call.caller.account_id, *(team.account_id for team in known)}
    if not everything:
        return {party(call, unit, request.selector.team_id, param="selector.ByTeamId").account_id}
    found = accounts.of_owner(unit, "team", request.selector.team_id)
    if found is None:
        raise Refusal(Code.TEAM_NOT_FOUND, "There is no such team.", param="selector.ByTeamId")
    return {found}


def _refusal(error: Exception) -> Refusal:
    code, message, param = next(told for kind, told in _REFUSALS.items() if isinstance(error, kind))
    headers = (("Retry-After", "30"),) if code is Code.NODE_NOT_RESPONDING else ()
    return Refusal(code, message, param=param, headers=headers)


def _type(row: Any) -> TypeAnswer:
    return TypeAnswer(id=row.id, duration=Duration(secs=row.duration_s, nanos=0), price_factor=row.price_factor)


def _answer(row: Any) -> ReservationAnswer:
    kind = None
    if row.type_name is not None:
        kind = TypeOfInstance(name=row.type_name, gpuvendor_kernel_module_support=row.kernel_modules)
    shape = None if row.resources is None else msgspec.json.decode(row.resources, type=Resources)
    return ReservationAnswer(
        id=row.id,
        created_at=row.created_at,
        valid_till=row.valid_till,
        bound_resource=row.instance_id if row.state in ("Held", "Bound") else None,
        state=row.state,
        billing_exempt=row.billing_exempt,
        instance_type=kind,
        instance_variant=None if row.variant is None else Variant(name=row.variant, gpu_count=row.gpu_count),
        node_id=row.node_id,
        resources=None
        if shape is None
        else Shape(cpu_count=shape.vcpu, gpu_count=shape.gpu, dram=shape.dram, disk=shape.disk),
    )


_ID = "019a0f6c-2a00-7abc-8def-000000000031"
_TYPE_ID = "019a0f6c-2a00-7abc-8def-000000000030"
_INSTANCE_ID = "019a0f6c-2a00-7abc-8def-000000000040"
_TYPE = {"id": _TYPE_ID, "duration": {"secs": 2_592_000, "nanos": 0}, "price_factor": 1}
_WANTED = {
    "executor_id": _INSTANCE_ID,
    "reservation_type_id": _TYPE_ID,
    "team_id": None,
    "billing_exempt": False,
}
_PAYS = (Code.NOT_TEAM_MEMBER, Code.INSTANCE_NOT_FOUND, Code.RESERVATION_NOT_FOUND, Code.INSUFFICIENT_FUNDS)

OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="reservations.types_list",
        summary="The types of reservations: how long they are, and what part of the price on demand their time costs.",
        path="/api/v1/reservations/types/list",
        request=Nothing,
        response=TypesAnswer,
        permission=Permission.RESERVATIONS_READ,
        rate="read",
        handler=Reads(list_types),
        example={},
        answer=[_TYPE],  # type: ignore[arg-type]  # the one answer that is a list
    ),
    Operation(
        name="reservations.types_add",
        summary="Offer a type of reservation.",
        path="/api/v1/reservations/types/add",
        request=AddTypeRequest,
        response=TypeId,
        permission=Permission.RESERVATIONS_TYPES,
        credentials=PERSONAL,
        rate="write",
        handler=Writes(add_type),
        example={"duration_secs": 2_592_000, "price_factor": 1},
        answer={"id": _TYPE_ID},
    ),
    Operation(
        name="reservations.types_remove",
        summary="Offer a type of reservation no more; those that were made stay as they are.",
        path="/api/v1/reservations/types/remove",
        request=TypeId,
        response=TypeId,
        permission=Permission.RESERVATIONS_TYPES,
        credentials=PERSONAL,
        rate="write",
        handler=Writes(remove_type),
        example={"id": _TYPE_ID},
        answer={"id": _TYPE_ID},
        errors=(Code.RESERVATION_NOT_FOUND,),
    ),
    Operation(
        name="reservations.create",
        summary="Reserve an instance that runs: its price is charged at once, and its time costs nothing more.",
        path="/api/v1/reservations/create",
        request=CreateRequest,
        response=ReservationId,
        permission=Permission.RESERVATIONS_WRITE,
        rate="write",
        idempotent=True,
        handler=Writes(create),
        example=_WANTED,
        answer={"reservation_id": _ID},
        errors=(*_PAYS, Code.RESERVATION_BOUND, Code.INVALID_TRANSITION, Code.NODE_NOT_RESPONDING),
    ),
    Operation(
        name="reservations.update",
        summary="Make the reservation of an instance longer by a type's duration.",
        path="/api/v1/reservations/update",
        request=CreateRequest,
        response=ReservationId,
        permission=Permission.RESERVATIONS_WRITE,
        rate="write",
        idempotent=True,
        handler=Writes(update),
        example=_WANTED,
        answer={"reservation_id": _ID},
        errors=_PAYS,
    ),
    Operation(
        name="reservations.list",
        summary="Reservations of the caller and of its teams, newest first; everybody's for admins.",
        path="/api/v1/reservations/list",
        request=ListRequest,
        response=ListAnswer,
        permission=Permission.RESERVATIONS_READ,
        rate="read",
        handler=Reads(list_reservations),
        example={"selector": "All"},
        answer={
            "reservations": [
                {
                    "id": _ID,
                    "created_at": "2026-11-21T01:00:00Z",
                    "valid_till": "2026-12-21T01:00:00Z",
                    "bound_resource": _INSTANCE_ID,
                    "state": "Bound",
                    "billing_exempt": False,
                    "instance_type": {
                        "name": "h200-141gb",
                        "gpuvendor_kernel_module_support": "OpenOrProprietary",
                    },
                    "instance_variant": {"name": "h200-141gb.1", "gpu_count": 1},
                    "node_id": None,
                    "resources": None,
                }
            ],
            "next_cursor": None,
        },
        errors=(Code.NOT_TEAM_MEMBER, Code.TEAM_NOT_FOUND),
    ),
)
