"""Table of events: append-only, like everything that says what happened."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, Table, Text

from marketplace.store.base import metadata

event = Table(
    "event",
    metadata,
    Column("id", Text, primary_key=True),
    Column("at", BigInteger, nullable=False),
    Column("action", Text, nullable=False),
    Column("actor_kind", Text, nullable=False),
    Column("actor_id", Text, nullable=False),
    Column("credential_id", Text, nullable=False, comment="session or key that was used"),
    Column("owner_id", Text, nullable=False, comment="whose matter it is: they may read it"),
    Column("subject_id", Text, nullable=False),
    Column("detail", Text, nullable=False, comment="JSON object without secrets and without personal data"),
    Column("request_id", Text, nullable=False),
)
Index("ix_event_owner", event.c.owner_id, event.c.at, event.c.id)
Index("ix_event_at", event.c.at, event.c.id)

APPEND_ONLY = ("event",)
