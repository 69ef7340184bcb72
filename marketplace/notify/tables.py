"""Table of mail that waits to be sent, or was."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, CheckConstraint, Column, ForeignKey, Index, Table, Text, text

from marketplace.store.base import metadata

outbox = Table(
    "outbox",
    metadata,
    Column("id", Text, primary_key=True),
    Column("template", Text, nullable=False),
    Column("recipient", Text, nullable=False, comment="address; emptied when the mail is finished"),
    Column("payload", Text, nullable=False, comment="JSON object of texts; emptied when the mail is finished"),
    Column("user_id", Text, ForeignKey("users.id"), nullable=True, comment="the person it goes to, where known"),
    Column("dedupe", Text, nullable=True, unique=True, comment="mails of one such name are sent once"),
    Column("created_at", BigInteger, nullable=False),
    Column("due_at", BigInteger, nullable=True, comment="next attempt, or the end of a lease; null when finished"),
    Column("attempts", BigInteger, nullable=False),
    Column("claim", Text, nullable=False, comment="who holds the lease"),
    Column("finished_at", BigInteger, nullable=True),
    Column("outcome", Text, nullable=True, comment="sent, dropped or given up"),
    Column("trouble", Text, nullable=False, comment="why the last attempt failed"),
    CheckConstraint("(due_at IS NULL) = (finished_at IS NOT NULL)", name="finished_when_not_due"),
    CheckConstraint("(outcome IS NULL) = (finished_at IS NULL)", name="outcome_when_finished"),
    CheckConstraint("outcome IN ('sent', 'dropped', 'given up')", name="outcome_known"),
)
Index(
    "ix_outbox_due",
    outbox.c.due_at,
    outbox.c.id,
    sqlite_where=text("due_at IS NOT NULL"),
    postgresql_where=text("due_at IS NOT NULL"),
)
Index(
    "ix_outbox_finished",
    outbox.c.finished_at,
    sqlite_where=text("dedupe IS NULL"),
    postgresql_where=text("dedupe IS NULL"),
)
Index("ix_outbox_user", outbox.c.user_id)

low_balance = Table(
    "low_balance",
    metadata,
    Column("account_id", Text, ForeignKey("account.id"), primary_key=True),
    Column("armed", Boolean, nullable=False, comment="whether a fall below the threshold is still to be told"),
    Column("changed_at", BigInteger, nullable=False),
)
