"""Operations on the audit log: it can only be read."""

from __future__ import annotations

from typing import Any

from marketplace.events import service as events
from marketplace.events.wire import EventAnswer, ListAnswer, ListRequest
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call, Operation, Reads
from marketplace.http.pagination import next_cursor
from marketplace.store.db import ReadUnit
from marketplace.users.permissions import Permission


def list_events(call: Call, unit: ReadUnit, request: ListRequest) -> ListAnswer:
    """Return a page of what was changed."""
    everybody = request.selector == "All"
    if everybody and Permission.EVENTS_READ_ALL not in call.caller.permissions:
        raise Refusal(Code.PERMISSION_DENIED, "Everybody's events are for admins.", param="selector")
    owner_id = None if everybody else call.caller.id
    found = events.list_events(unit, owner_id=owner_id, cursor=request.cursor, limit=request.limit)
    return ListAnswer(
        events=[
            EventAnswer(
                id=item.id,
                created_at=item.at,
                action=item.action,
                actor_kind=item.actor_kind,
                actor_id=item.actor_id,
                credential_id=item.credential_id,
                owner_id=item.owner_id,
                subject_id=item.subject_id,
                detail=item.detail,
                request_id=item.request_id,
            )
            for item in found[: request.limit]
        ],
        next_cursor=next_cursor([(item.at, item.id) for item in found], request.limit),
    )


OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="events.list",
        summary="The audit log, newest first: the caller's own matters, or everybody's for admins.",
        path="/api/v1/events/list",
        request=ListRequest,
        response=ListAnswer,
        permission=Permission.EVENTS_READ,
        rate="read",
        handler=Reads(list_events),
        example={"selector": "Mine", "limit": 20},
        answer={
            "events": [
                {
                    "id": "019a0f6c-2a00-7abc-8def-000000000003",
                    "created_at": "2026-11-21T01:00:00Z",
                    "action": "keys.add",
                    "actor_kind": "user",
                    "actor_id": "019a0f6c-2a00-7abc-8def-000000000001",
                    "credential_id": "019a0f6c-2a00-7abc-8def-000000000004",
                    "owner_id": "019a0f6c-2a00-7abc-8def-000000000001",
                    "subject_id": "019a0f6c-2a00-7abc-8def-000000000002",
                    "detail": {"prefix": "hr_u_4fT9kQ2x"},
                    "request_id": "019a0f6c-2a00-7abc-8def-000000000005",
                }
            ],
            "next_cursor": None,
        },
    ),
)
