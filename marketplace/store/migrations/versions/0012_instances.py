"""Instances, volumes, and what they hold: claims, addresses, ports, reservations, saved disks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

TABLES = (
    "volume",
    "instance",
    "claim",
    "cpu_claim",
    "gpu_slice_claim",
    "instance_tag",
    "ip_lease",
    "port_lease",
    "reservation",
    "saved_environment",
    "volume_attachment",
)


def upgrade() -> None:
    present = set(sa.inspect(op.get_bind()).get_table_names())
    assert not present & set(TABLES), f"tables of an unknown origin are in the way: {sorted(present & set(TABLES))}"
    create_tables_1()
    create_tables_2()
    create_tables_3()
    present = set(sa.inspect(op.get_bind()).get_table_names())
    assert present >= set(TABLES), f"tables missing: {sorted(set(TABLES) - present)}"


def create_tables_1() -> None:
    op.create_table(
        "volume",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=True, comment="who made it; null for a team's key"),
        sa.Column("team_id", sa.Text(), nullable=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=True),
        sa.Column("size_gb", sa.BigInteger(), nullable=False),
        sa.Column("disk_usage", sa.BigInteger(), nullable=False, comment="bytes, as last told"),
        sa.Column("type_id", sa.Text(), nullable=False),
        sa.Column("datacenter_id", sa.Text(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=True, comment="that has its file; null before it was used"),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("billing_exempt", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("delete_after", sa.BigInteger(), nullable=True, comment="set while its account is empty"),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "status IN ('Creating', 'Available', 'Attached', 'Error', 'Deleting', 'Deleted')",
            name=op.f("ck_volume_status_known"),
        ),
        sa.CheckConstraint("size_gb > 0", name=op.f("ck_volume_size_possible")),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name=op.f("fk_volume_account_id")),
        sa.ForeignKeyConstraint(["datacenter_id"], ["datacenter.id"], name=op.f("fk_volume_datacenter_id")),
        sa.ForeignKeyConstraint(["node_id"], ["node.id"], name=op.f("fk_volume_node_id")),
        sa.ForeignKeyConstraint(["team_id"], ["team.id"], name=op.f("fk_volume_team_id")),
        sa.ForeignKeyConstraint(["type_id"], ["volume_type.id"], name=op.f("fk_volume_type_id")),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_volume_user_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_volume")),
    )
    op.create_index("ix_volume_account", "volume", ["account_id", "created_at", "id"], unique=False)
    op.create_index(
        "ix_volume_name",
        "volume",
        ["account_id", "name"],
        unique=True,
        sqlite_where=sa.text("status <> 'Deleted'"),
        postgresql_where=sa.text("status <> 'Deleted'"),
    )
    op.create_table(
        "instance",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False, comment="who pays"),
        sa.Column("user_id", sa.Text(), nullable=True, comment="who rented it; null for a team's key"),
        sa.Column("team_id", sa.Text(), nullable=True),
        sa.Column("cluster_name", sa.Text(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("provider_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("instance_type", sa.Text(), nullable=True),
        sa.Column("variant", sa.Text(), nullable=True, comment="null for a custom shape"),
        sa.Column("gpu_count", sa.BigInteger(), nullable=False),
        sa.Column("vcpu", sa.BigInteger(), nullable=False),
        sa.Column("dram", sa.BigInteger(), nullable=False),
        sa.Column("disk", sa.BigInteger(), nullable=False),
        sa.Column("cpu_policy", sa.Text(), nullable=False),
        sa.Column("mig_profile", sa.Text(), nullable=True),
        sa.Column("config", sa.Text(), nullable=False, comment="JSON of what was asked for, without anything secret"),
        sa.Column(
            "secret", sa.LargeBinary(), nullable=True, comment="sealed: password, environment, user data, registry"
        ),
        sa.Column("username", sa.Text(), nullable=False),
        sa.Column("has_password", sa.Boolean(), nullable=False),
        sa.Column("ssh_key_auth", sa.Boolean(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("failing", sa.Boolean(), nullable=False, comment="it is being taken down and will have failed"),
        sa.Column("want", sa.Text(), nullable=False, comment="what its node should make of it"),
        sa.Column("gen", sa.BigInteger(), nullable=False, comment="rises with every change of `want`"),
        sa.Column("reset_seq", sa.BigInteger(), nullable=False),
        sa.Column("gen_applied", sa.BigInteger(), nullable=False),
        sa.Column("reset_applied", sa.BigInteger(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False, comment="as the node told last; empty before"),
        sa.Column("power", sa.Text(), nullable=False, comment="state of its machine as the node told last"),
        sa.Column(
            "missing_rounds",
            sa.BigInteger(),
            nullable=False,
            comment="reports in a row in which its machine was missing",
        ),
        sa.Column("addresses", sa.Text(), nullable=False, comment="JSON list, as the node told"),
        sa.Column("memory_kb", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column(
            "started_at", sa.BigInteger(), nullable=True, comment="when its machine first ran: readiness is waited for"
        ),
        sa.Column("ready_at", sa.BigInteger(), nullable=True, comment="from here on it costs"),
        sa.Column("stop_at", sa.BigInteger(), nullable=True, comment="when its end was asked for: it costs no more"),
        sa.Column("ended_at", sa.BigInteger(), nullable=True),
        sa.Column("failure_id", sa.Text(), nullable=True),
        sa.Column("failure_cause", sa.Text(), nullable=True),
        sa.Column("failure_message", sa.Text(), nullable=True),
        sa.Column("failed_at", sa.BigInteger(), nullable=True),
        sa.Column("cost_per_hour", sa.BigInteger(), nullable=False, comment="nano-units, as it was rented"),
        sa.Column("provider_share", sa.BigInteger(), nullable=False, comment="basis points, as it was rented"),
        sa.Column("billing_exempt", sa.Boolean(), nullable=False),
        sa.Column("reservation_id", sa.Text(), nullable=True),
        sa.Column("quota_id", sa.Text(), nullable=True),
        sa.Column("network_id", sa.Text(), nullable=True),
        sa.Column("reuse_environment_id", sa.Text(), nullable=True),
        sa.Column(
            "readiness_digest", sa.LargeBinary(), nullable=True, comment="SHA-256 of the token that says it is ready"
        ),
        sa.Column("erase_after_s", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "(status IN ('Inactive', 'Failed')) = (ended_at IS NOT NULL)", name=op.f("ck_instance_ended_when_over")
        ),
        sa.CheckConstraint("kind IN ('VirtualMachine', 'Container')", name=op.f("ck_instance_kind_known")),
        sa.CheckConstraint("status <> 'Active' OR ready_at IS NOT NULL", name=op.f("ck_instance_active_when_ready")),
        sa.CheckConstraint(
            "status IN ('Initializing', 'Active', 'Deactivating', 'Inactive', 'Failed')",
            name=op.f("ck_instance_status_known"),
        ),
        sa.CheckConstraint("want IN ('Running', 'Stopped', 'Paused', 'Absent')", name=op.f("ck_instance_want_known")),
        sa.CheckConstraint("(failed_at IS NULL) = (failure_id IS NULL)", name=op.f("ck_instance_failure_whole")),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name=op.f("fk_instance_account_id")),
        sa.ForeignKeyConstraint(["network_id"], ["network.id"], name=op.f("fk_instance_network_id")),
        sa.ForeignKeyConstraint(["node_id"], ["node.id"], name=op.f("fk_instance_node_id")),
        sa.ForeignKeyConstraint(["provider_id"], ["provider.id"], name=op.f("fk_instance_provider_id")),
        sa.ForeignKeyConstraint(["quota_id"], ["quota.id"], name=op.f("fk_instance_quota_id")),
        sa.ForeignKeyConstraint(["team_id"], ["team.id"], name=op.f("fk_instance_team_id")),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_instance_user_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_instance")),
    )
    op.create_index("ix_instance_account", "instance", ["account_id", "created_at", "id"], unique=False)
    op.create_index("ix_instance_created", "instance", ["created_at", "id"], unique=False)
    op.create_index(
        "ix_instance_live",
        "instance",
        ["account_id"],
        unique=False,
        sqlite_where=sa.text("ended_at IS NULL"),
        postgresql_where=sa.text("ended_at IS NULL"),
    )
    op.create_index(
        "ix_instance_node",
        "instance",
        ["node_id"],
        unique=False,
        sqlite_where=sa.text("ended_at IS NULL"),
        postgresql_where=sa.text("ended_at IS NULL"),
    )


def create_tables_2() -> None:
    op.create_table(
        "claim",
        sa.Column("instance_id", sa.Text(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("gpus", sa.BigInteger(), nullable=False, comment="GPUs that it has slices of"),
        sa.Column("threads", sa.BigInteger(), nullable=False, comment="hardware threads that its vCPUs take"),
        sa.Column("dram", sa.BigInteger(), nullable=False, comment="bytes, rounded up to whole pages where it has any"),
        sa.Column("disk", sa.BigInteger(), nullable=False, comment="bytes"),
        sa.Column("cpu_policy", sa.Text(), nullable=False),
        sa.Column("hugepages", sa.Text(), nullable=False, comment="JSON: NUMA node to 1 GiB pages"),
        sa.Column("cpus", sa.Text(), nullable=False, comment="JSON: NUMA node to threads, as they are in cpu_claim"),
        sa.Column("quota_id", sa.Text(), nullable=True, comment="the quota that covers it"),
        sa.Column(
            "zombie", sa.Boolean(), nullable=False, comment="its owner is over, but its node never said that it is gone"
        ),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("released_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["instance_id"], ["instance.id"], name=op.f("fk_claim_instance_id")),
        sa.ForeignKeyConstraint(["node_id"], ["node.id"], name=op.f("fk_claim_node_id")),
        sa.ForeignKeyConstraint(["quota_id"], ["quota.id"], name=op.f("fk_claim_quota_id")),
        sa.PrimaryKeyConstraint("instance_id", name=op.f("pk_claim")),
    )
    op.create_index(
        "ix_claim_node",
        "claim",
        ["node_id"],
        unique=False,
        sqlite_where=sa.text("released_at IS NULL"),
        postgresql_where=sa.text("released_at IS NULL"),
    )
    op.create_index(
        "ix_claim_quota",
        "claim",
        ["quota_id"],
        unique=False,
        sqlite_where=sa.text("released_at IS NULL"),
        postgresql_where=sa.text("released_at IS NULL"),
    )
    op.create_table(
        "cpu_claim",
        sa.Column("instance_id", sa.Text(), nullable=False),
        sa.Column("thread", sa.BigInteger(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("released_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["instance_id"], ["instance.id"], name=op.f("fk_cpu_claim_instance_id")),
        sa.ForeignKeyConstraint(["node_id"], ["node.id"], name=op.f("fk_cpu_claim_node_id")),
        sa.PrimaryKeyConstraint("instance_id", "thread", name=op.f("pk_cpu_claim")),
    )
    op.create_index(
        "ix_cpu_claim_thread",
        "cpu_claim",
        ["node_id", "thread"],
        unique=True,
        sqlite_where=sa.text("released_at IS NULL"),
        postgresql_where=sa.text("released_at IS NULL"),
    )
    op.create_table(
        "gpu_slice_claim",
        sa.Column("gpu_id", sa.Text(), nullable=False),
        sa.Column("slice", sa.BigInteger(), nullable=False),
        sa.Column("owner_id", sa.Text(), nullable=False, comment="the instance or lease"),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("instance_id", sa.Text(), nullable=True),
        sa.Column("lease_id", sa.Text(), nullable=True),
        sa.Column(
            "mig_start", sa.BigInteger(), nullable=True, comment="first slice of its MIG instance; null for a whole GPU"
        ),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("released_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("(instance_id IS NULL) <> (lease_id IS NULL)", name=op.f("ck_gpu_slice_claim_one_owner")),
        sa.CheckConstraint("owner_id = coalesce(instance_id, lease_id)", name=op.f("ck_gpu_slice_claim_owner_named")),
        sa.CheckConstraint("slice >= 0 AND slice < 8", name=op.f("ck_gpu_slice_claim_slice_possible")),
        sa.ForeignKeyConstraint(["gpu_id"], ["gpu.id"], name=op.f("fk_gpu_slice_claim_gpu_id")),
        sa.ForeignKeyConstraint(["instance_id"], ["instance.id"], name=op.f("fk_gpu_slice_claim_instance_id")),
        sa.ForeignKeyConstraint(["lease_id"], ["inference_lease.id"], name=op.f("fk_gpu_slice_claim_lease_id")),
        sa.ForeignKeyConstraint(["node_id"], ["node.id"], name=op.f("fk_gpu_slice_claim_node_id")),
        sa.PrimaryKeyConstraint("gpu_id", "slice", "owner_id", name=op.f("pk_gpu_slice_claim")),
    )
    op.create_index(
        "ix_gpu_slice_claim_live",
        "gpu_slice_claim",
        ["gpu_id", "slice"],
        unique=True,
        sqlite_where=sa.text("released_at IS NULL"),
        postgresql_where=sa.text("released_at IS NULL"),
    )
    op.create_index(
        "ix_gpu_slice_claim_node",
        "gpu_slice_claim",
        ["node_id"],
        unique=False,
        sqlite_where=sa.text("released_at IS NULL"),
        postgresql_where=sa.text("released_at IS NULL"),
    )
    op.create_index(
        "ix_gpu_slice_claim_owner",
        "gpu_slice_claim",
        ["owner_id"],
        unique=False,
        sqlite_where=sa.text("released_at IS NULL"),
        postgresql_where=sa.text("released_at IS NULL"),
    )
    op.create_table(
        "instance_tag",
        sa.Column("instance_id", sa.Text(), nullable=False),
        sa.Column("tag", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["instance_id"], ["instance.id"], name=op.f("fk_instance_tag_instance_id")),
        sa.PrimaryKeyConstraint("instance_id", "tag", name=op.f("pk_instance_tag")),
    )
    op.create_index("ix_instance_tag_tag", "instance_tag", ["tag"], unique=False)
    op.create_table(
        "ip_lease",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("network_id", sa.Text(), nullable=False),
        sa.Column("ip", sa.Text(), nullable=False),
        sa.Column("external_ip", sa.Text(), nullable=True),
        sa.Column("instance_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("released_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["instance_id"], ["instance.id"], name=op.f("fk_ip_lease_instance_id")),
        sa.ForeignKeyConstraint(["network_id"], ["network.id"], name=op.f("fk_ip_lease_network_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ip_lease")),
    )
    op.create_index("ix_ip_lease_instance", "ip_lease", ["instance_id"], unique=False)
    op.create_index(
        "ix_ip_lease_ip",
        "ip_lease",
        ["network_id", "ip"],
        unique=True,
        sqlite_where=sa.text("released_at IS NULL"),
        postgresql_where=sa.text("released_at IS NULL"),
    )
    op.create_table(
        "port_lease",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("gateway_ip", sa.Text(), nullable=False, comment="address that it is published on"),
        sa.Column("proto", sa.Text(), nullable=False),
        sa.Column("host_port", sa.BigInteger(), nullable=False),
        sa.Column("guest_port", sa.BigInteger(), nullable=False),
        sa.Column("instance_id", sa.Text(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("released_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("proto IN ('tcp', 'udp')", name=op.f("ck_port_lease_proto_known")),
        sa.ForeignKeyConstraint(["instance_id"], ["instance.id"], name=op.f("fk_port_lease_instance_id")),
        sa.ForeignKeyConstraint(["node_id"], ["node.id"], name=op.f("fk_port_lease_node_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_port_lease")),
    )
    op.create_index("ix_port_lease_instance", "port_lease", ["instance_id"], unique=False)
    op.create_index(
        "ix_port_lease_port",
        "port_lease",
        ["gateway_ip", "proto", "host_port"],
        unique=True,
        sqlite_where=sa.text("released_at IS NULL"),
        postgresql_where=sa.text("released_at IS NULL"),
    )
    op.create_table(
        "reservation",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=True, comment="who made it; null for a team's key"),
        sa.Column("team_id", sa.Text(), nullable=True),
        sa.Column("type_id", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("instance_id", sa.Text(), nullable=True, comment="that it is bound to, or held for"),
        sa.Column("variant", sa.Text(), nullable=True),
        sa.Column("node_id", sa.Text(), nullable=True, comment="where a custom shape belongs"),
        sa.Column("resources", sa.Text(), nullable=True, comment="JSON of a custom shape"),
        sa.Column("cost_per_hour", sa.BigInteger(), nullable=False, comment="nano-units on demand, as it was made"),
        sa.Column("billing_exempt", sa.Boolean(), nullable=False),
        sa.Column("prepaid", sa.BigInteger(), nullable=False, comment="nano-units charged for it so far"),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("valid_from", sa.BigInteger(), nullable=True, comment="when it was first bound"),
        sa.Column("valid_till", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "state IN ('Held', 'Bound', 'Unbound', 'Expired', 'Cancelled')", name=op.f("ck_reservation_state_known")
        ),
        sa.CheckConstraint(
            "state NOT IN ('Held', 'Bound') OR instance_id IS NOT NULL", name=op.f("ck_reservation_bound_to_something")
        ),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name=op.f("fk_reservation_account_id")),
        sa.ForeignKeyConstraint(["instance_id"], ["instance.id"], name=op.f("fk_reservation_instance_id")),
        sa.ForeignKeyConstraint(["node_id"], ["node.id"], name=op.f("fk_reservation_node_id")),
        sa.ForeignKeyConstraint(["team_id"], ["team.id"], name=op.f("fk_reservation_team_id")),
        sa.ForeignKeyConstraint(["type_id"], ["reservation_type.id"], name=op.f("fk_reservation_type_id")),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_reservation_user_id")),
        sa.ForeignKeyConstraint(["variant"], ["instance_variant.name"], name=op.f("fk_reservation_variant")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_reservation")),
    )
    op.create_index("ix_reservation_account", "reservation", ["account_id", "created_at", "id"], unique=False)
    op.create_index(
        "ix_reservation_instance",
        "reservation",
        ["instance_id"],
        unique=True,
        sqlite_where=sa.text("state IN ('Held', 'Bound')"),
        postgresql_where=sa.text("state IN ('Held', 'Bound')"),
    )
    op.create_index(
        "ix_reservation_running",
        "reservation",
        ["valid_till"],
        unique=False,
        sqlite_where=sa.text("state IN ('Bound', 'Unbound')"),
        postgresql_where=sa.text("state IN ('Bound', 'Unbound')"),
    )


def create_tables_3() -> None:
    op.create_table(
        "saved_environment",
        sa.Column("id", sa.Text(), nullable=False, comment="the ended instance whose disk it is"),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("variant", sa.Text(), nullable=True),
        sa.Column("os_label", sa.Text(), nullable=False),
        sa.Column("disk_bytes", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("confirmed", sa.Boolean(), nullable=False, comment="whether the node's latest report has the disk"),
        sa.Column("claimed_by", sa.Text(), nullable=True),
        sa.Column("last_used_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("ended_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "state <> 'Claimed' OR claimed_by IS NOT NULL", name=op.f("ck_saved_environment_claimed_by_somebody")
        ),
        sa.CheckConstraint(
            "state IN ('Retained', 'Claimed', 'Consumed', 'Erased')", name=op.f("ck_saved_environment_state_known")
        ),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name=op.f("fk_saved_environment_account_id")),
        sa.ForeignKeyConstraint(["claimed_by"], ["instance.id"], name=op.f("fk_saved_environment_claimed_by")),
        sa.ForeignKeyConstraint(["id"], ["instance.id"], name=op.f("fk_saved_environment_id")),
        sa.ForeignKeyConstraint(["node_id"], ["node.id"], name=op.f("fk_saved_environment_node_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_saved_environment")),
    )
    op.create_index("ix_saved_environment_account", "saved_environment", ["account_id", "last_used_at"], unique=False)
    op.create_index("ix_saved_environment_node", "saved_environment", ["node_id"], unique=False)
    op.create_table(
        "volume_attachment",
        sa.Column("volume_id", sa.Text(), nullable=False),
        sa.Column("instance_id", sa.Text(), nullable=False),
        sa.Column("mount_path", sa.Text(), nullable=False),
        sa.Column("attached_at", sa.BigInteger(), nullable=False),
        sa.Column("detached_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["instance_id"], ["instance.id"], name=op.f("fk_volume_attachment_instance_id")),
        sa.ForeignKeyConstraint(["volume_id"], ["volume.id"], name=op.f("fk_volume_attachment_volume_id")),
        sa.PrimaryKeyConstraint("volume_id", "instance_id", name=op.f("pk_volume_attachment")),
    )
    op.create_index("ix_volume_attachment_instance", "volume_attachment", ["instance_id"], unique=False)
    op.create_index(
        "ix_volume_attachment_live",
        "volume_attachment",
        ["volume_id"],
        unique=True,
        sqlite_where=sa.text("detached_at IS NULL"),
        postgresql_where=sa.text("detached_at IS NULL"),
    )
