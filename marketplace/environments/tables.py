"""Table of saved environments."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, CheckConstraint, Column, ForeignKey, Index, Table, Text

from marketplace.store.base import metadata

saved_environment = Table(
    "saved_environment",
    metadata,
    Column("id", Text, ForeignKey("instance.id"), primary_key=True, comment="the ended instance whose disk it is"),
    Column("node_id", Text, ForeignKey("node.id"), nullable=False),
    Column("account_id", Text, ForeignKey("account.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("variant", Text, nullable=True),
    Column("os_label", Text, nullable=False),
    Column("disk_bytes", BigInteger, nullable=False),
    Column("state", Text, nullable=False),
    Column("confirmed", Boolean, nullable=False, comment="whether the node's latest report has the disk"),
    Column("claimed_by", Text, ForeignKey("instance.id"), nullable=True),
    Column("last_used_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("ended_at", BigInteger, nullable=True),
    CheckConstraint("state IN ('Retained', 'Claimed', 'Consumed', 'Erased')", name="state_known"),
    CheckConstraint("state <> 'Claimed' OR claimed_by IS NOT NULL", name="claimed_by_somebody"),
)
Index("ix_saved_environment_account", saved_environment.c.account_id, saved_environment.c.last_used_at)
Index("ix_saved_environment_node", saved_environment.c.node_id)
