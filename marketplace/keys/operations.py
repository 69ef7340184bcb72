"""Operations on API keys: the caller's own."""

from __future__ import annotations

from typing import Any

from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call, Operation, Reads, Writes
from marketplace.http.pagination import next_cursor
from marketplace.http.principal import PERSONAL
from marketplace.keys import service as keys
from marketplace.keys.service import KeyRow, KeySettings, UnknownKeyError
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

_NEVER_NULL = ("name", "active")
_LISTS = ("allowed_models", "allowed_addresses")
_SHOWN = tuple(KeyAnswer.model_fields)
_EXAMPLE = {
    "id": "019a0f6c-2a00-7abc-8def-000000000002",
    "name": "laptop",
    "prefix": "hr_u_4fT9kQ2x",
    "active": True,
    "created_at": "2026-11-21T01:00:00Z",
    "expires_at": None,
    "allowed_models": None,
    "allowed_addresses": None,
    "requests_per_minute": None,
    "max_concurrency": None,
}


def add(call: Call, unit: WriteUnit, request: AddRequest) -> AddAnswer:
    """Make a key of the caller's."""
    _own(request.team_id)
    context, person = call.context, call.caller.person
    row, secret = keys.create(
        unit,
        kind="user",
        owner_id=person.id,
        account_id=person.account_id,
        name=request.name,
        pepper=context.pepper,
        now=call.now,
        random=context.random,
        created_by=person.id,
        expires_at=request.expires_at,
        allowed_models=request.allowed_models,
        allowed_addresses=request.allowed_addresses,
        requests_per_minute=request.requests_per_minute,
        max_concurrency=request.max_concurrency,
        active=request.active,
    )
    call.record(unit, "keys.add", owner_id=person.id, subject_id=row.id, prefix=row.prefix)
    return AddAnswer(**_shown(row), key=secret.text)


def list_keys(call: Call, unit: ReadUnit, request: ListRequest) -> ListAnswer:
    """Return a page of the caller's keys."""
    _own(request.team_id)
    rows = keys.list_page(unit, call.caller.id, request.cursor, request.limit)
    return ListAnswer(
        api_keys=[KeyAnswer(**_shown(row)) for row in rows[: request.limit]],
        next_cursor=next_cursor([(row.created_at, row.id) for row in rows], request.limit),
    )


def update(call: Call, unit: WriteUnit, request: UpdateRequest) -> KeyAnswer:
    """Change a key of the caller's."""
    key = _mine(call, unit, request.id)
    named = request.model_fields_set - {"id"} - {name for name in _NEVER_NULL if getattr(request, name) is None}
    changes: dict[str, Any] = {name: getattr(request, name) for name in named}
    for name in named.intersection(_LISTS):
        changes[name] = None if changes[name] is None else tuple(changes[name])
    row = keys.change(unit, key.id, KeySettings(**changes))
    call.record(unit, "keys.update", owner_id=call.caller.id, subject_id=row.id, changed=sorted(named))
    return KeyAnswer(**_shown(row))


def rotate(call: Call, unit: WriteUnit, request: RotateRequest) -> AddAnswer:
    """Replace a key of the caller's by one like it; both work for a while."""
    context, person = call.context, call.caller.person
    old = _mine(call, unit, request.id)
    if old.expires_at is not None and old.expires_at <= call.now:
        raise Refusal(Code.INVALID_TRANSITION, "The key has expired: make a new one.", param="id")
    row, secret = keys.rotate(
        unit,
        old,
        overlap=request.overlap_s * 1_000_000,
        pepper=context.pepper,
        now=call.now,
        random=context.random,
        created_by=person.id,
    )
    call.record(unit, "keys.rotate", owner_id=person.id, subject_id=request.id, replaced_by=row.id)
    return AddAnswer(**_shown(row), key=secret.text)


def delete(call: Call, unit: WriteUnit, request: DeleteRequest) -> DeleteAnswer:
    """Revoke a key of the caller's, for ever."""
    key = _mine(call, unit, request.id)
    keys.revoke(unit, key.id, now=call.now)
    call.record(unit, "keys.delete", owner_id=call.caller.id, subject_id=key.id, prefix=key.prefix)
    return DeleteAnswer(id=key.id)


def _own(team_id: str | None) -> None:
    if team_id is not None:
        raise Refusal(Code.NOT_TEAM_MEMBER, "You are not a member of this team.", param="team_id")


def _mine(call: Call, unit: ReadUnit, key_id: str) -> KeyRow:
    """The caller's key of that id; somebody else's looks the same as none."""
    try:
        return keys.find_own(unit, key_id, call.caller.id)
    except UnknownKeyError as error:
        raise Refusal(Code.KEY_NOT_FOUND, "You have no usable key of this id.", param="id") from error


def _shown(row: KeyRow) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in _SHOWN}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


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
        example={"name": "laptop"},
        answer={**_EXAMPLE, "key": "hr_u_4fT9kQ2x…"},
        errors=(Code.NOT_TEAM_MEMBER,),
    ),
    Operation(
        name="keys.list",
        summary="The caller's keys, newest first, without secrets.",
        path="/api/v1/api-keys/list",
        request=ListRequest,
        response=ListAnswer,
        permission=Permission.KEYS_READ,
        credentials=PERSONAL,
        rate="read",
        handler=Reads(list_keys),
        example={"limit": 50},
        answer={"api_keys": [_EXAMPLE], "next_cursor": None},
        errors=(Code.NOT_TEAM_MEMBER,),
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
