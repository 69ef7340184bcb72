"""Write and read the audit log. Whoever changes something records it in the same transaction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import select

from marketplace.events.tables import event
from marketplace.http.pagination import newest_first
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random, new_id


class Event(msgspec.Struct, frozen=True):
    """One change: when, what, by whom, whose matter it is, and what it was done to."""

    id: str
    at: int
    action: str
    actor_kind: str
    actor_id: str
    credential_id: str
    owner_id: str
    subject_id: str
    detail: dict[str, Any]
    request_id: str


def record(
    unit: WriteUnit,
    *,
    action: str,
    actor_kind: str,
    actor_id: str,
    credential_id: str,
    owner_id: str,
    subject_id: str,
    detail: Mapping[str, Any],
    request_id: str,
    now: int,
    random: Random,
) -> None:
    """Add one line."""
    row = {
        "id": new_id(now, random),
        "at": now,
        "action": action,
        "actor_kind": actor_kind,
        "actor_id": actor_id,
        "credential_id": credential_id,
        "owner_id": owner_id,
        "subject_id": subject_id,
        "detail": msgspec.json.encode(detail).decode(),
        "request_id": request_id,
    }
    unit.insert_rows(event, [row])


def list_events(unit: ReadUnit, *, owner_id: str | None, cursor: str | None, limit: int) -> list[Event]:
    """Return an owner's events, or everybody's for None, newest first: one more than `limit` when there are more."""
    wanted = select(event)
    if owner_id is not None:
        wanted = wanted.where(event.c.owner_id == owner_id)
    rows = unit.select(newest_first(wanted, event.c.at, event.c.id, cursor, limit)).all()
    return [_event(*row) for row in rows]


def _event(*columns: Any) -> Event:
    *before, detail, request_id = columns
    values: tuple[Any, ...] = (*before, msgspec.json.decode(detail), request_id)
    return Event(*values)
