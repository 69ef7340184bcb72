"""Table of keys. The secret itself is never stored: only a lookup prefix to show and a keyed hash to compare."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    LargeBinary,
    Table,
    Text,
    text,
    true,
)

from marketplace.store.base import metadata

api_key = Table(
    "api_key",
    metadata,
    Column("id", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("owner_id", Text, nullable=False, comment="user, team, node or service that the key speaks for"),
    Column("account_id", Text, ForeignKey("account.id"), nullable=True, comment="who pays; node keys pay nothing"),
    Column("name", Text, nullable=False),
    Column("prefix", Text, nullable=False),
    Column("digest", LargeBinary, nullable=False, unique=True, comment="HMAC-SHA256 of the secret under the pepper"),
    Column("created_at", BigInteger, nullable=False),
    Column("created_by", Text, nullable=True),
    Column("expires_at", BigInteger, nullable=True),
    Column("revoked_at", BigInteger, nullable=True),
    Column("allowed_models", Text, nullable=True, comment="JSON list; null allows every model"),
    Column("allowed_addresses", Text, nullable=True, comment="JSON list of networks; null allows every address"),
    Column("budget", BigInteger, nullable=True, comment="nano-units per period"),
    Column("budget_period", Text, nullable=True, comment="day, week, month or total"),
    Column("requests_per_minute", BigInteger, nullable=True),
    Column("tokens_per_minute", BigInteger, nullable=True),
    Column("max_concurrency", BigInteger, nullable=True),
    Column("active", Boolean, nullable=False, server_default=true(), comment="false while it is switched off"),
    Column("lineage", Text, nullable=True, comment="first key of those that replaced one another: they share a budget"),
    Column("service", Text, nullable=True, comment="of a service's key: what it may charge for"),
    Column("provider", Text, nullable=True, comment="of a node's or service's key: the provider that it belongs to"),
    CheckConstraint("kind IN ('user', 'team', 'node', 'service')", name="kind_known"),
)
Index("ix_api_key_owner", api_key.c.owner_id, api_key.c.created_at)
Index(
    "ix_api_key_lineage",
    api_key.c.lineage,
    sqlite_where=text("lineage IS NOT NULL"),
    postgresql_where=text("lineage IS NOT NULL"),
)
Index(
    "ix_api_key_machine",
    api_key.c.kind,
    api_key.c.created_at,
    api_key.c.id,
    sqlite_where=text("kind IN ('node', 'service')"),
    postgresql_where=text("kind IN ('node', 'service')"),
)
