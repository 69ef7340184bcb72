"""Operations on API keys: the caller's own, its teams', and those of nodes and services."""

from __future__ import annotations

from typing import Any

from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call, Operation, Reads, Tool, Writes
from marketplace.http.pagination import next_cursor
from marketplace.http.principal import PERSONAL
from marketplace.keys import service as keys
from marketplace.keys.reach import LIMITS, check_unbound, holder, reachable
from marketplace.keys.rules import KeyKind
from marketplace.keys.service import KeyRow, KeySettings
from marketplace.keys.wire import (
    AddAnswer,
    AddRequest,
    DeleteAnswer,
    DeleteRequest,
    KeyAnswer,
    ListAnswer,
    ListRequest,
    RotateRequest,
    UpdateRequest,
)
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.users.permissions import Permission

_NEVER_NULL = ("name", "active", "budget_period")
_LISTS = ("allowed_models", "allowed_addresses")
_SHOWN = tuple(KeyAnswer.model_fields)
_EXAMPLE = {
    "id": "019a0f6c-2a00-7abc-8def-000000000002",
    "kind": "user",
    "owner_id": "019a0f6c-2a00-7abc-8def-000000000001",
    "service": None,
    "name": "laptop",
    "prefix": "hr_u_4fT9kQ2x",
    "active": True,
    "created_at": "2026-11-21T01:00:00Z",
    "expires_at": None,
    "allowed_models": None,
    "allowed_addresses": None,
    "budget": 500,
    "budget_period": "month",
    "requests_per_minute": None,
    "tokens_per_minute": None,
    "max_concurrency": None,
}


def add(call: Call, unit: WriteUnit, request: AddRequest) -> AddAnswer:
    """Make a key for the caller, a team of its, or a provider that it answers for."""
    check_unbound(call, unit)
    whose = holder(call, unit, request.kind, request.team_id, request.provider)
    _check_kind(whose.kind, request)
    context = call.context
    row, secret = keys.create(
        unit,
        kind=whose.kind,
        owner_id=whose.id,
        account_id=whose.account_id,
        name=request.name,
        pepper=context.pepper,
        now=call.now,
        random=context.random,
        created_by=call.caller.person.id,
        expires_at=request.expires_at,
        allowed_models=request.allowed_models,
        allowed_addresses=request.allowed_addresses,
        budget=request.budget,
        budget_period=request.budget_period,
        requests_per_minute=request.requests_per_minute,
        tokens_per_minute=request.tokens_per_minute,
        max_concurrency=request.max_concurrency,
        active=request.active,
        service=request.service,
        provider=whose.provider,
    )
    call.record(unit, "keys.add", owner_id=row.owner_id, subject_id=row.id, prefix=row.prefix, kind=row.kind)
    return AddAnswer(**_shown(row), key=secret.text)


def list_keys(call: Call, unit: ReadUnit, request: ListRequest) -> ListAnswer:
    """Return a page of keys of one holder."""
    if _every_provider(call, request):
        kind, owner_id = request.kind or "service", None
    else:
        whose = holder(call, unit, request.kind, request.team_id, request.provider)
        kind, owner_id = whose.kind, whose.id
    rows = keys.list_page(unit, kind, owner_id, request.cursor, request.limit)
    return ListAnswer(
        api_keys=[KeyAnswer(**_shown(row)) for row in rows[: request.limit]],
        next_cursor=next_cursor([(row.created_at, row.id) for row in rows], request.limit),
    )


def update(call: Call, unit: WriteUnit, request: UpdateRequest) -> KeyAnswer:
    """Change a key that the caller may handle."""
    check_unbound(call, unit)
    key = reachable(call, unit, request.id)
    _check_kind(key.kind, request)
    named = request.model_fields_set - {"id"} - {name for name in _NEVER_NULL if getattr(request, name) is None}
    changes: dict[str, Any] = {name: getattr(request, name) for name in named}
    for name in named.intersection(_LISTS):
        changes[name] = None if changes[name] is None else tuple(changes[name])
    row = keys.change(unit, key.id, KeySettings(**changes))
    call.record(unit, "keys.update", owner_id=row.owner_id, subject_id=row.id, changed=sorted(named))
    return KeyAnswer(**_shown(row))


def rotate(call: Call, unit: WriteUnit, request: RotateRequest) -> AddAnswer:
    """Replace a key by one like it; both work for a while and share a budget."""
    context = call.context
    if request.id != call.caller.credential_id:
        check_unbound(call, unit)
    old = reachable(call, unit, request.id)
    if old.expires_at is not None and old.expires_at <= call.now:
        raise Refusal(Code.INVALID_TRANSITION, "The key has expired: make a new one.", param="id")
    row, secret = keys.rotate(
        unit,
        old,
        overlap=request.overlap_s * 1_000_000,
        pepper=context.pepper,
        now=call.now,
        random=context.random,
        created_by=call.caller.person.id,
    )
    call.record(unit, "keys.rotate", owner_id=row.owner_id, subject_id=request.id, replaced_by=row.id)
    return AddAnswer(**_shown(row), key=secret.text)


def delete(call: Call, unit: WriteUnit, request: DeleteRequest) -> DeleteAnswer:
    """Revoke a key that the caller may handle, for ever."""
    check_unbound(call, unit)
    key = reachable(call, unit, request.id)
    keys.revoke(unit, key.id, now=call.now)
    call.record(unit, "keys.delete", owner_id=key.owner_id, subject_id=key.id, prefix=key.prefix)
    return DeleteAnswer(id=key.id)


def _every_provider(call: Call, request: ListRequest) -> bool:
    """Whether all keys of nodes or services are asked for, by somebody who may see them."""
    machines = request.kind in ("node", "service") and request.provider is None and request.team_id is None
    return machines and Permission.KEYS_SERVICE in call.caller.permissions


def _check_kind(kind: KeyKind, request: AddRequest | UpdateRequest) -> None:
    """Refuse limits that say nothing on a key that may not ask for inference, and a service where there is none."""
    if kind in ("node", "service"):
        senseless = [name for name in LIMITS if getattr(request, name) is not None]
        if senseless:
            raise Refusal(
                Code.VALIDATION_FAILED, f"{senseless[0]}: a {kind}'s key asks for no inference", param=senseless[0]
            )
    if isinstance(request, AddRequest) and (request.service is not None) != (kind == "service"):
        what = "it is missing" if kind == "service" else "only of a service's key"
        raise Refusal(Code.VALIDATION_FAILED, f"service: {what}", param="service")


def _shown(row: KeyRow) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in _SHOWN}
    for name in _LISTS:
        values[name] = None if values[name] is None else list(values[name])
    return values


OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="keys.add",
        summary="Make an API key; its secret is shown this once.",
        path="/api/v1/api-keys/add",
        request=AddRequest,
        response=AddAnswer,
        permission=Permission.KEYS_WRITE,
        credentials=PERSONAL,
        rate="write",
        handler=Writes(add),
        example={"name": "laptop", "budget": 500, "budget_period": "month"},
        answer={**_EXAMPLE, "key": "hr_u_4fT9kQ2x…"},
        errors=(Code.NOT_TEAM_MEMBER, Code.PROVIDER_NOT_FOUND),
    ),
    Operation(
        name="keys.list",
        summary="Keys of the caller, a team, or a provider's nodes or services, newest first, without secrets.",
        path="/api/v1/api-keys/list",
        request=ListRequest,
        response=ListAnswer,
        permission=Permission.KEYS_READ,
        credentials=PERSONAL,
        rate="read",
        handler=Reads(list_keys),
        example={"limit": 50},
        answer={"api_keys": [_EXAMPLE], "next_cursor": None},
        errors=(Code.NOT_TEAM_MEMBER, Code.PROVIDER_NOT_FOUND),
        tool=Tool(
            name="list_api_keys",
            description="API keys, newest first, with their limits and when they end; never their secrets.",
            arguments=ListRequest,
        ),
    ),
    Operation(
        name="keys.update",
        summary="Rename a key, switch it off or on, or change its limits.",
        path="/api/v1/api-keys/update",
        request=UpdateRequest,
        response=KeyAnswer,
        permission=Permission.KEYS_WRITE,
        credentials=PERSONAL,
        rate="write",
        handler=Writes(update),
        example={"id": _EXAMPLE["id"], "active": False},
        answer={**_EXAMPLE, "active": False},
        errors=(Code.KEY_NOT_FOUND,),
    ),
    Operation(
        name="keys.rotate",
        summary="Replace a key by one like it; the old one still works for a while.",
        path="/api/v1/api-keys/rotate",
        request=RotateRequest,
        response=AddAnswer,
        permission=Permission.KEYS_WRITE,
        credentials=PERSONAL,
        rate="write",
        handler=Writes(rotate),
        example={"id": _EXAMPLE["id"], "overlap_s": 3600},
        answer={**_EXAMPLE, "key": "hr_u_4fT9kQ2x…"},
        errors=(Code.KEY_NOT_FOUND, Code.INVALID_TRANSITION),
    ),
    Operation(
        name="keys.delete",
        summary="Revoke a key for ever.",
        path="/api/v1/api-keys/delete",
        request=DeleteRequest,
        response=DeleteAnswer,
        permission=Permission.KEYS_WRITE,
        credentials=PERSONAL,
        rate="write",
        handler=Writes(delete),
        example={"id": _EXAMPLE["id"]},
        answer={"id": _EXAMPLE["id"]},
        errors=(Code.KEY_NOT_FOUND,),
    ),
)
