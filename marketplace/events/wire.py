"""Requests and answers of the audit log."""

from __future__ import annotations

from typing import Any, Literal

from marketplace.accounts.wire import ByTeam
from marketplace.http.pagination import DEFAULT_LIMIT
from marketplace.http.wire import CursorText, Instant, Limit, Wire


class ListRequest(Wire):
    """A page of events, newest first: those about the caller, about a team that it belongs to, or everybody's."""

    selector: Literal["Mine", "All"] | ByTeam = "Mine"
    limit: Limit = DEFAULT_LIMIT
    cursor: CursorText | None = None


class EventAnswer(Wire):
    """One change."""

    id: str
    created_at: Instant
    action: str
    actor_kind: str
    actor_id: str
    credential_id: str
    owner_id: str
    subject_id: str
    detail: dict[str, Any]
    request_id: str


class ListAnswer(Wire):
    """Events, and where to go on."""

    events: list[EventAnswer]
    next_cursor: str | None
