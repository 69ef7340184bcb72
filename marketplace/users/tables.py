"""Table of people."""

from __future__ import annotations

from sqlalchemy import BigInteger, CheckConstraint, Column, ForeignKey, Index, Table, Text, text

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
    Column("email_verified_at", BigInteger, nullable=True, comment="null until the address is known to be theirs"),
    Column("erased_at", BigInteger, nullable=True, comment="since when it names nobody"),
    CheckConstraint("role IN ('admin', 'readonly_admin', 'provider', 'user')", name="role_known"),
)
Index(
    "ix_users_living",
    users.c.created_at,
    users.c.id,
    users.c.email_key,  # and the name: what a search looks at
    users.c.name,
    sqlite_where=text("erased_at IS NULL"),
    postgresql_where=text("erased_at IS NULL"),
)
Index(
    "ix_users_erased",
    users.c.account_id,
    sqlite_where=text("erased_at IS NOT NULL"),
    postgresql_where=text("erased_at IS NOT NULL"),
)
