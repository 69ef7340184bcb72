"""Table of people."""

from __future__ import annotations

from sqlalchemy import BigInteger, CheckConstraint, Column, ForeignKey, Table, Text

from marketplace.store.base import metadata

users = Table(
    "users",
    metadata,
    Column("id", Text, primary_key=True),
    Column("email", Text, nullable=False, comment="as it was written"),
    Column("email_key", Text, nullable=False, unique=True, comment="case-folded, for comparing"),
    Column("name", Text, nullable=False),
    Column("role", Text, nullable=False),
    Column("password_hash", Text, nullable=True, comment="argon2id; null for people without a password"),
    Column("account_id", Text, ForeignKey("account.id"), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("last_login_at", BigInteger, nullable=True),
    CheckConstraint("role IN ('admin', 'readonly_admin', 'provider', 'user')", name="role_known"),
)
