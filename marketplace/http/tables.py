"""Table of answers to repeatable writes."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, LargeBinary, Table, Text

from marketplace.store.base import metadata

idempotency = Table(
    "idempotency",
    metadata,
    Column("principal_id", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("request_hash", LargeBinary, nullable=False),
    Column("answer", Text, nullable=True, comment="JSON of the answer; null while the first one is being made"),
    Column("created_at", BigInteger, nullable=False),
)
Index("ix_idempotency_created", idempotency.c.created_at)
