"""Table of presets."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, ForeignKey, Index, Table, Text

from marketplace.store.base import metadata

instance_preset = Table(
    "instance_preset",
    metadata,
    Column("id", Text, primary_key=True),
    Column("user_id", Text, ForeignKey("users.id"), nullable=False),
    Column("shape_hash", Text, nullable=False, comment="of the values: the same shape is kept once"),
    Column("instance_type", Text, nullable=True),
    Column("gpu_count", BigInteger, nullable=False),
    Column("vcpu", BigInteger, nullable=False),
    Column("dram", BigInteger, nullable=False),
    Column("disk", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("last_used_at", BigInteger, nullable=False),
)
Index("ix_instance_preset_shape", instance_preset.c.user_id, instance_preset.c.shape_hash, unique=True)
