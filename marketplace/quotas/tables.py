"""Table of quotas. What of one is used is never stored: it follows from the claims that name it."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, CheckConstraint, Column, ForeignKey, Index, Table, Text, text

from marketplace.store.base import metadata

quota = Table(
    "quota",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("node_id", Text, ForeignKey("node.id"), nullable=False),
    Column("account_id", Text, ForeignKey("account.id"), nullable=False, comment="of its holder"),
    Column("holder_kind", Text, nullable=False),
    Column("holder_id", Text, nullable=False),
    Column("gpu", BigInteger, nullable=False),
    Column("vcpu", BigInteger, nullable=False),
    Column("dram", BigInteger, nullable=False, comment="bytes"),
    Column("disk", BigInteger, nullable=False, comment="bytes"),
    Column("exclusive", Boolean, nullable=False, comment="whether nobody else may use the rest of the node"),
    Column("valid_from", BigInteger, nullable=False),
    Column("valid_till", BigInteger, nullable=True),
    Column("active", Boolean, nullable=False, comment="false once it is revoked"),
    Column("created_by", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("revoked_at", BigInteger, nullable=True),
    CheckConstraint("gpu >= 0 AND vcpu >= 0 AND dram >= 0 AND disk >= 0", name="not_negative"),
    CheckConstraint("gpu > 0 OR vcpu > 0 OR dram > 0 OR disk > 0", name="grants_something"),
    CheckConstraint("holder_kind IN ('user', 'team')", name="holder_kind_known"),
    CheckConstraint("active = (revoked_at IS NULL)", name="revoked_when_not_active"),
)
Index("ix_quota_node", quota.c.node_id, sqlite_where=text("active"), postgresql_where=text("active"))
Index("ix_quota_account", quota.c.account_id, sqlite_where=text("active"), postgresql_where=text("active"))
