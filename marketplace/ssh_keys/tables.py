"""Table of public SSH keys."""

from __future__ import annotations

from sqlalchemy import BigInteger, CheckConstraint, Column, Index, Table, Text

from marketplace.store.base import metadata

ssh_key = Table(
    "ssh_key",
    metadata,
    Column("id", Text, primary_key=True),
    Column("owner_kind", Text, nullable=False),
    Column("owner_id", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("public_key", Text, nullable=False),
    Column("fingerprint", Text, nullable=False, comment="SHA-256 as OpenSSH writes it"),
    Column("created_at", BigInteger, nullable=False),
    CheckConstraint("owner_kind IN ('user', 'team')", name="owner_kind_known"),
)
Index("ix_ssh_key_name", ssh_key.c.owner_kind, ssh_key.c.owner_id, ssh_key.c.name, unique=True)
