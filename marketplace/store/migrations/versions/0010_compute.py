"""Compute that is on offer: types, datacenters, recipes, networks, nodes and meters."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

TABLES = (
    "instance_type",
    "recipe_group",
    "recipe_label",
    "reservation_type",
    "ssh_key",
    "datacenter",
    "instance_variant",
    "recipe",
    "recipe_group_tag",
    "rental_meter",
    "instance_preset",
    "network",
    "node",
    "recipe_tag",
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
        "instance_type",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column(
            "brand_short", sa.Text(), nullable=False, comment="GPU or, without one, processor, as people call it"
        ),
        sa.Column("manufacturer", sa.Text(), nullable=False),
        sa.Column(
            "cost_per_hour",
            sa.BigInteger(),
            nullable=False,
            comment="nano-units: of one GPU, or of a node without GPUs",
        ),
        sa.Column(
            "kernel_modules", sa.Text(), nullable=True, comment="what drivers its GPUs can load; null without a GPU"
        ),
        sa.Column(
            "vcpu_weight",
            sa.BigInteger(),
            nullable=False,
            comment="millionths: what part of a node's price the threads are",
        ),
        sa.Column("ram_weight", sa.BigInteger(), nullable=False),
        sa.Column("disk_weight", sa.BigInteger(), nullable=False),
        sa.Column("gpu_weight", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("removed_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("cost_per_hour >= 0", name=op.f("ck_instance_type_cost_not_negative")),
        sa.CheckConstraint(
            "vcpu_weight + ram_weight + disk_weight + gpu_weight = 1000000", name=op.f("ck_instance_type_weights_sum")
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_instance_type")),
    )
    op.create_table(
        "recipe_group",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("logo_url", sa.Text(), nullable=True),
        sa.Column("data", sa.Text(), nullable=True, comment="JSON for clients; nothing here reads it"),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_recipe_group")),
        sa.UniqueConstraint("name", name=op.f("uq_recipe_group_name")),
    )
    op.create_table(
        "recipe_label",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_recipe_label")),
    )
    op.create_table(
        "reservation_type",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("duration_s", sa.BigInteger(), nullable=False),
        sa.Column(
            "price_factor", sa.BigInteger(), nullable=False, comment="millionths of what the time costs on demand"
        ),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("removed_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("duration_s > 0 AND price_factor >= 0", name=op.f("ck_reservation_type_possible")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_reservation_type")),
    )
    op.create_table(
        "ssh_key",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("owner_kind", sa.Text(), nullable=False),
        sa.Column("owner_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("public_key", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False, comment="SHA-256 as OpenSSH writes it"),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("owner_kind IN ('user', 'team')", name=op.f("ck_ssh_key_owner_kind_known")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ssh_key")),
    )
    op.create_index("ix_ssh_key_name", "ssh_key", ["owner_kind", "owner_id", "name"], unique=True)
    op.create_table(
        "datacenter",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("provider_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False, comment="as it was written"),
        sa.Column("name_key", sa.Text(), nullable=False, comment="case-folded, for comparing"),
        sa.Column("country_code", sa.Text(), nullable=False, comment="ISO 3166-1 alpha-2"),
        sa.Column("tunnel", sa.Text(), nullable=False, comment="how ports of instances are reached"),
        sa.Column(
            "tunnel_host", sa.Text(), nullable=True, comment="address of published ports; null is that of each node"
        ),
        sa.Column(
            "relay_port", sa.BigInteger(), nullable=True, comment="where nodes connect to the relay of tunnel_host"
        ),
        sa.Column(
            "relay_sealed",
            sa.LargeBinary(),
            nullable=True,
            comment="the secret shared with the relay, encrypted at rest",
        ),
        sa.Column("port_from", sa.BigInteger(), nullable=False, comment="ports that may be published: first and last"),
        sa.Column("port_to", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("tunnel IN ('none', 'nat', 'relay')", name=op.f("ck_datacenter_tunnel_known")),
        sa.CheckConstraint(
            "tunnel <> 'relay' OR (tunnel_host IS NOT NULL AND relay_port IS NOT NULL AND relay_sealed IS NOT NULL)",
            name=op.f("ck_datacenter_relay_whole"),
        ),
        sa.CheckConstraint(
            "0 < port_from AND port_from <= port_to AND port_to <= 65535", name=op.f("ck_datacenter_ports_possible")
        ),
        sa.ForeignKeyConstraint(["provider_id"], ["provider.id"], name=op.f("fk_datacenter_provider_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_datacenter")),
        sa.UniqueConstraint("name_key", name=op.f("uq_datacenter_name_key")),
    )
    op.create_index("ix_datacenter_provider", "datacenter", ["provider_id"], unique=False)
    op.create_table(
        "instance_variant",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("type_name", sa.Text(), nullable=False),
        sa.Column(
            "gpu_count", sa.BigInteger(), nullable=False, comment="whole GPUs, or MIG instances where it has a profile"
        ),
        sa.Column("mig_profile", sa.Text(), nullable=True),
        sa.Column("vcpu", sa.BigInteger(), nullable=False),
        sa.Column("dram", sa.BigInteger(), nullable=False, comment="bytes"),
        sa.Column("disk", sa.BigInteger(), nullable=False, comment="bytes"),
        sa.Column("vram", sa.BigInteger(), nullable=False, comment="bytes, of all its GPUs"),
        sa.Column("cpu_policy", sa.Text(), nullable=False),
        sa.Column(
            "overcommit", sa.Boolean(), nullable=False, comment="whether it may share threads beyond their number"
        ),
        sa.Column("services", sa.Text(), nullable=False, comment="JSON list of vm and container"),
        sa.Column("cost_per_hour", sa.BigInteger(), nullable=False, comment="nano-units"),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("removed_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "cpu_policy IN ('Dedicated', 'Packed', 'Shared')", name=op.f("ck_instance_variant_cpu_policy_known")
        ),
        sa.CheckConstraint("cost_per_hour >= 0", name=op.f("ck_instance_variant_cost_not_negative")),
        sa.CheckConstraint(
            "gpu_count >= 0 AND vcpu > 0 AND dram > 0 AND disk >= 0 AND vram >= 0",
            name=op.f("ck_instance_variant_shape_possible"),
        ),
        sa.ForeignKeyConstraint(["type_name"], ["instance_type.name"], name=op.f("fk_instance_variant_type_name")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_instance_variant")),
    )
    op.create_index("ix_instance_variant_type", "instance_variant", ["type_name"], unique=False)


def create_tables_2() -> None:
    op.create_table(
        "recipe",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("group_id", sa.Text(), nullable=True),
        sa.Column("owner_kind", sa.Text(), nullable=False, comment="none is everybody's"),
        sa.Column("owner_id", sa.Text(), nullable=False, comment="of the user, team or provider; empty for none"),
        sa.Column("logo_url", sa.Text(), nullable=True),
        sa.Column("instructions_url", sa.Text(), nullable=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("image_url", sa.Text(), nullable=True, comment="of a virtual machine; null in a container's"),
        sa.Column("details", sa.Text(), nullable=False, comment="JSON as it was given"),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("removed_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("(owner_kind = 'none') = (owner_id = '')", name=op.f("ck_recipe_owner_named")),
        sa.CheckConstraint("kind IN ('VirtualMachine', 'Docker')", name=op.f("ck_recipe_kind_known")),
        sa.CheckConstraint(
            "owner_kind IN ('none', 'user', 'team', 'provider')", name=op.f("ck_recipe_owner_kind_known")
        ),
        sa.ForeignKeyConstraint(["group_id"], ["recipe_group.id"], name=op.f("fk_recipe_group_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_recipe")),
    )
    op.create_index(
        "ix_recipe_image",
        "recipe",
        ["image_url"],
        unique=False,
        sqlite_where=sa.text("removed_at IS NULL"),
        postgresql_where=sa.text("removed_at IS NULL"),
    )
    op.create_index(
        "ix_recipe_name",
        "recipe",
        ["owner_kind", "owner_id", "name"],
        unique=True,
        sqlite_where=sa.text("removed_at IS NULL"),
        postgresql_where=sa.text("removed_at IS NULL"),
    )
    op.create_table(
        "recipe_group_tag",
        sa.Column("group_id", sa.Text(), nullable=False),
        sa.Column("tag", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["group_id"], ["recipe_group.id"], name=op.f("fk_recipe_group_tag_group_id")),
        sa.PrimaryKeyConstraint("group_id", "tag", name=op.f("pk_recipe_group_tag")),
    )
    op.create_table(
        "rental_meter",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("resource_type", sa.Text(), nullable=False),
        sa.Column("resource_id", sa.Text(), nullable=False),
        sa.Column("resource_name", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("provider_id", sa.Text(), nullable=True, comment="null where all is the platform's"),
        sa.Column("share", sa.BigInteger(), nullable=False, comment="the provider's part in basis points"),
        sa.Column("rate", sa.BigInteger(), nullable=False, comment="nano-units per `per_us`"),
        sa.Column("per_us", sa.BigInteger(), nullable=False),
        sa.Column("exempt", sa.Boolean(), nullable=False, comment="its time is counted, and costs nothing"),
        sa.Column(
            "free_until", sa.BigInteger(), nullable=True, comment="up to here it is paid, or covered, by something else"
        ),
        sa.Column("started_at", sa.BigInteger(), nullable=False),
        sa.Column("metered_to", sa.BigInteger(), nullable=False),
        sa.Column("stopped_at", sa.BigInteger(), nullable=True),
        sa.Column(
            "remainder", sa.BigInteger(), nullable=False, comment="of the division by `per_us`: carried, never lost"
        ),
        sa.Column("charged_us", sa.BigInteger(), nullable=False, comment="time that was charged for"),
        sa.Column("charged", sa.BigInteger(), nullable=False, comment="nano-units of all its charges"),
        sa.Column(
            "unpaid_since", sa.BigInteger(), nullable=True, comment="since when its account could not pay all of it"
        ),
        sa.CheckConstraint("resource_type IN ('Compute', 'Volume')", name=op.f("ck_rental_meter_resource_type_known")),
        sa.CheckConstraint(
            "metered_to >= started_at AND (stopped_at IS NULL OR stopped_at >= started_at)",
            name=op.f("ck_rental_meter_forward"),
        ),
        sa.CheckConstraint(
            "rate >= 0 AND per_us > 0 AND remainder >= 0 AND remainder < per_us",
            name=op.f("ck_rental_meter_rate_possible"),
        ),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name=op.f("fk_rental_meter_account_id")),
        sa.ForeignKeyConstraint(["provider_id"], ["provider.id"], name=op.f("fk_rental_meter_provider_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rental_meter")),
    )
    op.create_index(
        "ix_rental_meter_account",
        "rental_meter",
        ["account_id"],
        unique=False,
        sqlite_where=sa.text("stopped_at IS NULL"),
        postgresql_where=sa.text("stopped_at IS NULL"),
    )
    op.create_index(
        "ix_rental_meter_resource",
        "rental_meter",
        ["resource_id"],
        unique=True,
        sqlite_where=sa.text("stopped_at IS NULL"),
        postgresql_where=sa.text("stopped_at IS NULL"),
    )
    op.create_index(
        "ix_rental_meter_running",
        "rental_meter",
        ["metered_to"],
        unique=False,
        sqlite_where=sa.text("stopped_at IS NULL"),
        postgresql_where=sa.text("stopped_at IS NULL"),
    )
    op.create_table(
        "instance_preset",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("shape_hash", sa.Text(), nullable=False, comment="of the values: the same shape is kept once"),
        sa.Column("instance_type", sa.Text(), nullable=True),
        sa.Column("gpu_count", sa.BigInteger(), nullable=False),
        sa.Column("vcpu", sa.BigInteger(), nullable=False),
        sa.Column("dram", sa.BigInteger(), nullable=False),
        sa.Column("disk", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("last_used_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_instance_preset_user_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_instance_preset")),
    )
    op.create_index("ix_instance_preset_shape", "instance_preset", ["user_id", "shape_hash"], unique=True)
    op.create_table(
        "network",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("datacenter_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("team_id", sa.Text(), nullable=True, comment="null is for everybody"),
        sa.Column("gateway", sa.Text(), nullable=True),
        sa.Column("netmask", sa.BigInteger(), nullable=False, comment="bits of the prefix"),
        sa.Column("iface", sa.Text(), nullable=False, comment="bridge of the nodes that carries it"),
        sa.Column("server_address", sa.Text(), nullable=True),
        sa.Column("proxy", sa.Text(), nullable=True, comment="JSON: http_proxy, https_proxy and what goes past them"),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("netmask >= 0 AND netmask <= 128", name=op.f("ck_network_netmask_possible")),
        sa.ForeignKeyConstraint(["datacenter_id"], ["datacenter.id"], name=op.f("fk_network_datacenter_id")),
        sa.ForeignKeyConstraint(["team_id"], ["team.id"], name=op.f("fk_network_team_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_network")),
    )
    op.create_index(
        "ix_network_name",
        "network",
        ["datacenter_id", "name"],
        unique=True,
        sqlite_where=sa.text("deleted_at IS NULL"),
        postgresql_where=sa.text("deleted_at IS NULL"),
    )


def create_tables_3() -> None:
    op.create_table(
        "node",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("instance_type", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False, comment="whether its agent is heard"),
        sa.Column("drain_state", sa.Text(), nullable=False),
        sa.Column("hibernated", sa.Boolean(), nullable=False, comment="whether it asked for no new work"),
        sa.Column(
            "generation",
            sa.BigInteger(),
            nullable=False,
            comment="rises with every claim: who placed on an older one lost",
        ),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
        sa.Column("provider_id", sa.Text(), nullable=False),
        sa.Column("datacenter_id", sa.Text(), nullable=False),
        sa.Column(
            "machine_id",
            sa.Text(),
            nullable=False,
            comment="what the machine calls itself; survives reinstalling the agent",
        ),
        sa.Column("boot_id", sa.Text(), nullable=False),
        sa.Column("hostname", sa.Text(), nullable=False),
        sa.Column("ip_address", sa.Text(), nullable=False),
        sa.Column(
            "health",
            sa.Text(),
            nullable=False,
            comment="JSON: error_code, error_message, last_healthy_at; empty is healthy",
        ),
        sa.Column("listed", sa.Boolean(), nullable=False, comment="whether its people offer it on the market"),
        sa.Column("drain_id", sa.Text(), nullable=True, comment="of the latest drain: its mails are sent once"),
        sa.Column("drain_started_at", sa.BigInteger(), nullable=True),
        sa.Column(
            "drain_deadline", sa.BigInteger(), nullable=True, comment="when what still runs is ended; null never"
        ),
        sa.Column("drain_grace_s", sa.BigInteger(), nullable=True),
        sa.Column("drain_reason", sa.Text(), nullable=True),
        sa.Column("drain_notified", sa.Boolean(), nullable=False),
        sa.Column("cpu_mode", sa.Text(), nullable=False),
        sa.Column(
            "overcommit_percent", sa.BigInteger(), nullable=False, comment="vCPUs per shared thread, in hundredths"
        ),
        sa.Column("inventory_digest", sa.Text(), nullable=False),
        sa.Column("agent_version", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False, comment="rises with every registration"),
        sa.Column(
            "last_seen", sa.BigInteger(), nullable=False, comment="its last sign of life: nothing is charged beyond it"
        ),
        sa.Column(
            "desired_rev", sa.BigInteger(), nullable=False, comment="rises with every change of what it should do"
        ),
        sa.Column(
            "observed_digest", sa.Text(), nullable=False, comment="of the report that was taken last; empty for none"
        ),
        sa.Column("erase_grace_s", sa.BigInteger(), nullable=True, comment="null is the platform's setting"),
        sa.Column("dram_reserve", sa.BigInteger(), nullable=False, comment="bytes that its own system keeps"),
        sa.Column("inference_floor", sa.BigInteger(), nullable=False, comment="GPUs that rentals may never take"),
        sa.Column("reclaim_notice_s", sa.BigInteger(), nullable=False),
        sa.Column("next_fence", sa.BigInteger(), nullable=False, comment="fence of its next lease"),
        sa.Column("ssh_host", sa.Text(), nullable=True),
        sa.Column("ssh_port", sa.BigInteger(), nullable=True),
        sa.Column("ssh_user", sa.Text(), nullable=True),
        sa.Column("proxy_jump", sa.Text(), nullable=True),
        sa.Column("proxy_user", sa.Text(), nullable=True),
        sa.Column("proxy_port", sa.BigInteger(), nullable=True),
        sa.Column("registered_at", sa.BigInteger(), nullable=False),
        sa.Column("capabilities", sa.Text(), nullable=False, comment="JSON as the agent sent it"),
        sa.Column("inventory", sa.Text(), nullable=False, comment="JSON as the agent sent it"),
        sa.CheckConstraint("cpu_mode IN ('Legacy', 'Pinned', 'Mixed')", name=op.f("ck_node_cpu_mode_known")),
        sa.CheckConstraint("drain_state IN ('None', 'Draining', 'Drained')", name=op.f("ck_node_drain_state_known")),
        sa.CheckConstraint("status IN ('Ready', 'NotResponding', 'Offline')", name=op.f("ck_node_status_known")),
        sa.CheckConstraint("overcommit_percent >= 100", name=op.f("ck_node_overcommit_possible")),
        sa.ForeignKeyConstraint(["datacenter_id"], ["datacenter.id"], name=op.f("fk_node_datacenter_id")),
        sa.ForeignKeyConstraint(["instance_type"], ["instance_type.name"], name=op.f("fk_node_instance_type")),
        sa.ForeignKeyConstraint(["provider_id"], ["provider.id"], name=op.f("fk_node_provider_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_node")),
    )
    op.create_index(
        "ix_node_machine",
        "node",
        ["machine_id"],
        unique=True,
        sqlite_where=sa.text("deleted_at IS NULL"),
        postgresql_where=sa.text("deleted_at IS NULL"),
    )
    op.create_index("ix_node_provider", "node", ["provider_id"], unique=False)
    op.create_index("ix_node_type", "node", ["instance_type", "datacenter_id"], unique=False)
    op.create_table(
        "recipe_tag",
        sa.Column("recipe_id", sa.Text(), nullable=False),
        sa.Column("tag", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["recipe_id"], ["recipe.id"], name=op.f("fk_recipe_tag_recipe_id")),
        sa.PrimaryKeyConstraint("recipe_id", "tag", name=op.f("pk_recipe_tag")),
    )
    op.create_index("ix_recipe_tag_tag", "recipe_tag", ["tag"], unique=False)
