"""Operations on public SSH keys."""

from __future__ import annotations

from typing import Any

import msgspec

from marketplace.http.acting import party
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call, Operation, Reads, Writes
from marketplace.http.pagination import next_cursor
from marketplace.ssh_keys import service
from marketplace.ssh_keys.service import NameTakenError, SshKey, TooManyKeysError
from marketplace.ssh_keys.wire import (
    AddRequest,
    ById,
    ByName,
    DeleteAnswer,
    DeleteRequest,
    KeyAnswer,
    ListAnswer,
    ListRequest,
)
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.users.permissions import Permission


def add(call: Call, unit: WriteUnit, request: AddRequest) -> KeyAnswer:
    """Keep a key."""
    whose = party(call, unit, request.team_id)
    try:
        made = service.add(
            unit,
            whose.kind,
            whose.id,
            name=request.name,
            public_key=request.public_key,
            now=call.now,
            random=call.context.random,
        )
    except NameTakenError as error:
        raise Refusal(Code.NAME_EXISTS, "There is another key of this name.", param="name") from error
    except TooManyKeysError as error:
        raise Refusal(
            Code.VALIDATION_FAILED, f"name: at most {service.MAX_KEYS} keys are kept", param="name"
        ) from error
    call.record(unit, "ssh_keys.add", owner_id=whose.id, subject_id=made.id, fingerprint=made.fingerprint)
    return _shown(made)


def list_keys(call: Call, unit: ReadUnit, request: ListRequest) -> ListAnswer:
    """Return a page of keys of the caller's or of a team."""
    whose = party(call, unit, request.team_id)
    found = service.page(unit, whose.kind, whose.id, cursor=request.cursor, limit=request.limit)
    return ListAnswer(
        ssh_keys=[_shown(one) for one in found[: request.limit]],
        next_cursor=next_cursor([(one.created_at, one.id) for one in found], request.limit),
    )


def delete(call: Call, unit: WriteUnit, request: DeleteRequest) -> DeleteAnswer:
    """Forget keys of the caller's or of a team; ids and names that there are none of are absent from the answer."""
    whose = party(call, unit, request.team_id)
    ids = request.selector.ids if isinstance(request.selector, ById) else None
    names = request.selector.names if isinstance(request.selector, ByName) else None
    gone = service.remove(unit, whose.kind, whose.id, ids=ids, names=names)
    for key_id in gone:
        call.record(unit, "ssh_keys.delete", owner_id=whose.id, subject_id=key_id)
    return DeleteAnswer(deleted_ids=gone)


def _shown(one: SshKey) -> KeyAnswer:
    return KeyAnswer(**msgspec.structs.asdict(one))


_PUBLIC = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPEabPmBQcQoPeXnLfnG8ZmdTo9rAaU0Zr3pZ9xK1h4b ada@laptop"
_KEY = {
    "id": "019a0f6c-2a00-7abc-8def-000000000041",
    "name": "laptop",
    "public_key": _PUBLIC,
    "fingerprint": "SHA256:5JMxFCCeACqkdSEWzgh9IYTtcMY0Lek1X/7tmgdwwM4",
    "created_at": "2026-11-21T01:00:00Z",
}

OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="ssh_keys.add",
        summary="Keep a public SSH key under a name, to give machines by that name.",
        path="/api/v1/ssh-keys/add",
        request=AddRequest,
        response=KeyAnswer,
        permission=Permission.SSH_KEYS_WRITE,
        rate="write",
        handler=Writes(add),
        example={"name": "laptop", "public_key": _PUBLIC},
        answer=_KEY,
        errors=(Code.NOT_TEAM_MEMBER, Code.NAME_EXISTS),
    ),
    Operation(
        name="ssh_keys.list",
        summary="Public SSH keys of the caller, or of a team.",
        path="/api/v1/ssh-keys/list",
        request=ListRequest,
        response=ListAnswer,
        permission=Permission.SSH_KEYS_READ,
        rate="read",
        handler=Reads(list_keys),
        example={},
        answer={"ssh_keys": [_KEY], "next_cursor": None},
        errors=(Code.NOT_TEAM_MEMBER,),
    ),
    Operation(
        name="ssh_keys.delete",
        summary="Forget public SSH keys; machines that have them keep them.",
        path="/api/v1/ssh-keys/delete",
        request=DeleteRequest,
        response=DeleteAnswer,
        permission=Permission.SSH_KEYS_WRITE,
        rate="write",
        handler=Writes(delete),
        example={"selector": {"ByName": ["laptop"]}},
        answer={"deleted_ids": [_KEY["id"]]},
        errors=(Code.NOT_TEAM_MEMBER,),
    ),
)
