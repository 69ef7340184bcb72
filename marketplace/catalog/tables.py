"""Tables of what is on offer: datacenters, types of machines and their variants."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, CheckConstraint, Column, ForeignKey, Index, LargeBinary, Table, Text

from marketplace.store.base import metadata

datacenter = Table(
    "datacenter",
    metadata,
    Column("id", Text, primary_key=True),
    Column("provider_id", Text, ForeignKey("provider.id"), nullable=False),
    Column("name", Text, nullable=False, comment="as it was written"),
    Column("name_key", Text, nullable=False, unique=True, comment="case-folded, for comparing"),
    Column("country_code", Text, nullable=False, comment="ISO 3166-1 alpha-2"),
    Column("tunnel", Text, nullable=False, comment="how ports of instances are reached"),
    Column("tunnel_host", Text, nullable=True, comment="address of published ports; null is that of each node"),
    Column("relay_port", BigInteger, nullable=True, comment="where nodes connect to the relay of tunnel_host"),
    Column("relay_sealed", LargeBinary, nullable=True, comment="the secret shared with the relay, encrypted at rest"),
    Column("port_from", BigInteger, nullable=False, comment="ports that may be published: first and last"),
    Column("port_to", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    CheckConstraint("tunnel IN ('none', 'nat', 'relay')", name="tunnel_known"),
    CheckConstraint(
        "tunnel <> 'relay' OR (tunnel_host IS NOT NULL AND relay_port IS NOT NULL AND relay_sealed IS NOT NULL)",
        name="relay_whole",
    ),
    CheckConstraint("0 < port_from AND port_from <= port_to AND port_to <= 65535", name="ports_possible"),
)
Index("ix_datacenter_provider", datacenter.c.provider_id)

instance_type = Table(
    "instance_type",
    metadata,
    Column("name", Text, primary_key=True),
    Column("brand_short", Text, nullable=False, comment="GPU or, without one, processor, as people call it"),
    Column("manufacturer", Text, nullable=False),
    Column("cost_per_hour", BigInteger, nullable=False, comment="nano-units: of one GPU, or of a node without GPUs"),
    Column("kernel_modules", Text, nullable=True, comment="what drivers its GPUs can load; null without a GPU"),
    Column(
        "vcpu_weight", BigInteger, nullable=False, comment="millionths: what part of a node's price the threads are"
    ),
    Column("ram_weight", BigInteger, nullable=False),
    Column("disk_weight", BigInteger, nullable=False),
    Column("gpu_weight", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("removed_at", BigInteger, nullable=True),
    CheckConstraint("cost_per_hour >= 0", name="cost_not_negative"),
    CheckConstraint("vcpu_weight + ram_weight + disk_weight + gpu_weight = 1000000", name="weights_sum"),
)

instance_variant = Table(
    "instance_variant",
    metadata,
    Column("name", Text, primary_key=True),
    Column("type_name", Text, ForeignKey("instance_type.name"), nullable=False),
    Column("gpu_count", BigInteger, nullable=False, comment="whole GPUs, or MIG instances where it has a profile"),
    Column("mig_profile", Text, nullable=True),
    Column("vcpu", BigInteger, nullable=False),
    Column("dram", BigInteger, nullable=False, comment="bytes"),
    Column("disk", BigInteger, nullable=False, comment="bytes"),
    Column("vram", BigInteger, nullable=False, comment="bytes, of all its GPUs"),
    Column("cpu_policy", Text, nullable=False),
    Column("overcommit", Boolean, nullable=False, comment="whether it may share threads beyond their number"),
    Column("services", Text, nullable=False, comment="JSON list of vm and container"),
    Column("cost_per_hour", BigInteger, nullable=False, comment="nano-units"),
    Column("created_at", BigInteger, nullable=False),
    Column("removed_at", BigInteger, nullable=True),
    CheckConstraint("gpu_count >= 0 AND vcpu > 0 AND dram > 0 AND disk >= 0 AND vram >= 0", name="shape_possible"),
    CheckConstraint("cost_per_hour >= 0", name="cost_not_negative"),
    CheckConstraint("cpu_policy IN ('Dedicated', 'Packed', 'Shared')", name="cpu_policy_known"),
)
Index("ix_instance_variant_type", instance_variant.c.type_name)
