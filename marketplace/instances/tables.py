"""Tables of instances and their tags."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, CheckConstraint, Column, ForeignKey, Index, LargeBinary, Table, Text, text

from marketplace.store.base import metadata

instance = Table(
    "instance",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("account_id", Text, ForeignKey("account.id"), nullable=False, comment="who pays"),
    Column("user_id", Text, ForeignKey("users.id"), nullable=True, comment="who rented it; null for a team's key"),
    Column("team_id", Text, ForeignKey("team.id"), nullable=True),
    Column("cluster_name", Text, nullable=False),
    Column("node_id", Text, ForeignKey("node.id"), nullable=False),
    Column("provider_id", Text, ForeignKey("provider.id"), nullable=False),
    Column("kind", Text, nullable=False),
    Column("instance_type", Text, nullable=True),
    Column("variant", Text, nullable=True, comment="null for a custom shape"),
    Column("gpu_count", BigInteger, nullable=False),
    Column("vcpu", BigInteger, nullable=False),
    Column("dram", BigInteger, nullable=False),
    Column("disk", BigInteger, nullable=False),
    Column("cpu_policy", Text, nullable=False),
    Column("mig_profile", Text, nullable=True),
    Column("config", Text, nullable=False, comment="JSON of what was asked for, without anything secret"),
    Column("secret", LargeBinary, nullable=True, comment="sealed: password, environment, user data, registry"),
    Column("username", Text, nullable=False),
    Column("has_password", Boolean, nullable=False),
    Column("ssh_key_auth", Boolean, nullable=False),
    Column("status", Text, nullable=False),
    Column("failing", Boolean, nullable=False, comment="it is being taken down and will have failed"),
    Column("want", Text, nullable=False, comment="what its node should make of it"),
    Column("gen", BigInteger, nullable=False, comment="rises with every change of `want`"),
    Column("reset_seq", BigInteger, nullable=False),
    Column("gen_applied", BigInteger, nullable=False),
    Column("reset_applied", BigInteger, nullable=False),
    Column("phase", Text, nullable=False, comment="as the node told last; empty before"),
    Column("power", Text, nullable=False, comment="state of its machine as the node told last"),
    Column("missing_rounds", BigInteger, nullable=False, comment="reports in a row in which its machine was missing"),
    Column("addresses", Text, nullable=False, comment="JSON list, as the node told"),
    Column("memory_kb", BigInteger, nullable=True),
    Column("created_at", BigInteger, nullable=False),
    Column("started_at", BigInteger, nullable=True, comment="when its machine first ran: readiness is waited for"),
    Column("ready_at", BigInteger, nullable=True, comment="from here on it costs"),
    Column("stop_at", BigInteger, nullable=True, comment="when its end was asked for: it costs no more"),
    Column("ended_at", BigInteger, nullable=True),
    Column("failure_id", Text, nullable=True),
    Column("failure_cause", Text, nullable=True),
    Column("failure_message", Text, nullable=True),
    Column("failed_at", BigInteger, nullable=True),
    Column("cost_per_hour", BigInteger, nullable=False, comment="nano-units, as it was rented"),
    Column("provider_share", BigInteger, nullable=False, comment="basis points, as it was rented"),
    Column("billing_exempt", Boolean, nullable=False),
    Column("reservation_id", Text, nullable=True),
    Column("quota_id", Text, ForeignKey("quota.id"), nullable=True),
    Column("network_id", Text, ForeignKey("network.id"), nullable=True),
    Column("reuse_environment_id", Text, nullable=True),
    Column("readiness_digest", LargeBinary, nullable=True, comment="SHA-256 of the token that says it is ready"),
    Column("erase_after_s", BigInteger, nullable=True),
    CheckConstraint("status IN ('Initializing', 'Active', 'Deactivating', 'Inactive', 'Failed')", name="status_known"),
    CheckConstraint("kind IN ('VirtualMachine', 'Container')", name="kind_known"),
    CheckConstraint("want IN ('Running', 'Stopped', 'Paused', 'Absent')", name="want_known"),
    CheckConstraint("(failed_at IS NULL) = (failure_id IS NULL)", name="failure_whole"),
    CheckConstraint("(status IN ('Inactive', 'Failed')) = (ended_at IS NOT NULL)", name="ended_when_over"),
    CheckConstraint("status <> 'Active' OR ready_at IS NOT NULL", name="active_when_ready"),
)
_LIVE = text("ended_at IS NULL")
Index("ix_instance_node", instance.c.node_id, sqlite_where=_LIVE, postgresql_where=_LIVE)
Index("ix_instance_live", instance.c.account_id, sqlite_where=_LIVE, postgresql_where=_LIVE)
Index("ix_instance_account", instance.c.account_id, instance.c.created_at, instance.c.id)
Index("ix_instance_created", instance.c.created_at, instance.c.id)

instance_tag = Table(
    "instance_tag",
    metadata,
    Column("instance_id", Text, ForeignKey("instance.id"), primary_key=True),
    Column("tag", Text, primary_key=True),
)
Index("ix_instance_tag_tag", instance_tag.c.tag)
