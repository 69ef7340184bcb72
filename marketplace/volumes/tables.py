"""Tables of volumes, of what they may be, and of where they are attached."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, CheckConstraint, Column, ForeignKey, Index, Table, Text, text

from marketplace.store.base import metadata

volume_type = Table(
    "volume_type",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("datacenter_id", Text, ForeignKey("datacenter.id"), nullable=False),
    Column("cost_per_gb_month", BigInteger, nullable=False, comment="nano-units"),
    Column("created_at", BigInteger, nullable=False),
    Column("removed_at", BigInteger, nullable=True),
    CheckConstraint("cost_per_gb_month >= 0", name="cost_not_negative"),
)
Index(
    "ix_volume_type_name",
    volume_type.c.datacenter_id,
    volume_type.c.name,
    unique=True,
    sqlite_where=text("removed_at IS NULL"),
    postgresql_where=text("removed_at IS NULL"),
)

volume = Table(
    "volume",
    metadata,
    Column("id", Text, primary_key=True),
    Column("account_id", Text, ForeignKey("account.id"), nullable=False),
    Column("user_id", Text, ForeignKey("users.id"), nullable=True, comment="who made it; null for a team's key"),
    Column("team_id", Text, ForeignKey("team.id"), nullable=True),
    Column("name", Text, nullable=False),
    Column("description", Text, nullable=True),
    Column("size_gb", BigInteger, nullable=False),
    Column("disk_usage", BigInteger, nullable=False, comment="bytes, as last told"),
    Column("type_id", Text, ForeignKey("volume_type.id"), nullable=False),
    Column("datacenter_id", Text, ForeignKey("datacenter.id"), nullable=False),
    Column("node_id", Text, ForeignKey("node.id"), nullable=True, comment="that has its file; null before it was used"),
    Column("status", Text, nullable=False),
    Column("billing_exempt", Boolean, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Column("delete_after", BigInteger, nullable=True, comment="set while its account is empty"),
    Column("deleted_at", BigInteger, nullable=True),
    CheckConstraint(
        "status IN ('Creating', 'Available', 'Attached', 'Error', 'Deleting', 'Deleted')", name="status_known"
    ),
    CheckConstraint("size_gb > 0", name="size_possible"),
)
_THERE = text("status <> 'Deleted'")
Index("ix_volume_name", volume.c.account_id, volume.c.name, unique=True, sqlite_where=_THERE, postgresql_where=_THERE)
Index("ix_volume_account", volume.c.account_id, volume.c.created_at, volume.c.id)

volume_attachment = Table(
    "volume_attachment",
    metadata,
    Column("volume_id", Text, ForeignKey("volume.id"), primary_key=True),
    Column("instance_id", Text, ForeignKey("instance.id"), primary_key=True),
    Column("mount_path", Text, nullable=False),
    Column("attached_at", BigInteger, nullable=False),
    Column("detached_at", BigInteger, nullable=True),
)
_ATTACHED = text("detached_at IS NULL")
Index(
    "ix_volume_attachment_live",
    volume_attachment.c.volume_id,
    unique=True,
    sqlite_where=_ATTACHED,
    postgresql_where=_ATTACHED,
)
Index("ix_volume_attachment_instance", volume_attachment.c.instance_id)
