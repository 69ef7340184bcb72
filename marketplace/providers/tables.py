"""Tables of providers: companies, the people who act for them, and the people who are their customers."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, ForeignKey, Index, Table, Text

from marketplace.store.base import metadata

provider = Table(
    "provider",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False, comment="as it was written"),
    Column("name_key", Text, nullable=False, unique=True, comment="case-folded, for comparing"),
    Column("logo_url", Text, nullable=True),
    Column("website", Text, nullable=True),
    Column("created_at", BigInteger, nullable=False),
)
Index("ix_provider_created", provider.c.created_at, provider.c.id)

provider_member = Table(
    "provider_member",
    metadata,
    Column("user_id", Text, ForeignKey("users.id"), primary_key=True, comment="a person acts for one provider at most"),
    Column("provider_id", Text, ForeignKey("provider.id"), nullable=False),
    Column("is_root", Boolean, nullable=False, comment="answers for the provider; cannot be erased"),
    Column("joined_at", BigInteger, nullable=False),
)
Index("ix_provider_member_provider", provider_member.c.provider_id, provider_member.c.joined_at)

provider_customer = Table(
    "provider_customer",
    metadata,
    Column("provider_id", Text, ForeignKey("provider.id"), primary_key=True),
    Column("user_id", Text, ForeignKey("users.id"), primary_key=True),
    Column("since", BigInteger, nullable=False),
)
Index("ix_provider_customer_user", provider_customer.c.user_id)
