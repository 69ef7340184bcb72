"""Operations on the audit log: it can only be read."""

from __future__ import annotations

from typing import Any

from marketplace.accounts.wire import ByTeam
from marketplace.events import service as events
from marketplace.events.wire import EventAnswer, ListAnswer, ListRequest
from marketplace.http.acting import party
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call, Operation, Reads
from marketplace.http.pagination import next_cursor
from marketplace.store.db import ReadUnit
from marketplace.users.permissions import Permission


def list_events(call: Call, unit: ReadUnit, request: ListRequest) -> ListAnswer:
    """Return a page of what was changed."""
    found = events.list_events(
        unit, owner_id=_owner(call, unit, request.selector), cursor=request.cursor, limit=request.limit
    )
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


def _owner(call: Call, unit: ReadUnit, selector: str | ByTeam) -> str | None:
    """Whose events are asked for, None for everybody's. Refusal: PermissionDenied, NotTeamMember."""
    everything = Permission.EVENTS_READ_ALL in call.caller.permissions
    if isinstance(selector, ByTeam):
        return selector.team_id if everything else party(call, unit, selector.team_id, param="selector.ByTeam").id
    if selector == "Mine":
        return call.caller.id
    if not everything:
        raise Refusal(Code.PERMISSION_DENIED, "Everybody's events are for admins.", param="selector")
    return None


OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="events.list",
        summary="The audit log, newest first: the caller's own matters, a team's for its members, all for admins.",
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
        errors=(Code.NOT_TEAM_MEMBER,),
    ),
)
