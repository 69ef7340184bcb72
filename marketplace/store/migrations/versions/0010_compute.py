"""Compute: what is on offer, nodes, claims, instances, and all that is rented or paid with them."""

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
    "volume_type",
    "deposit",
    "gpu",
    "gpu_sample",
    "inference_lease",
    "instance_sample",
    "ip_range",
    "node_command",
    "node_event",
    "quota",
    "rental_charge",
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
    create_tables_4()
    create_tables_5()
    create_tables_6()
    create_tables_7()
    create_tables_8()
    create_guards()
    present = set(sa.inspect(op.get_bind()).get_table_names())
    assert present >= set(TABLES), f"tables missing: {sorted(set(TABLES) - present)}"


def create_guards() -> None:
    """Charges are final like what posted them."""
    if op.get_bind().dialect.name == "sqlite":
        for change in ("update", "delete"):
            op.execute(
                f"CREATE TRIGGER rental_charge_refuse_{change} BEFORE {change.upper()} ON rental_charge "
                "BEGIN SELECT RAISE(ABORT, 'rental_charge is append-only'); END"
            )
        return
    for change, events in (("update", "UPDATE"), ("delete", "DELETE OR TRUNCATE")):
        op.execute(
            f"CREATE TRIGGER rental_charge_refuse_{change} BEFORE {events} ON rental_charge "
            "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
        )


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
        sa.Column("port_from", sa.BigInteger(), nullable=False, comment="ports that may be published: first and last"),
        sa.Column("port_to", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("tunnel IN ('none', 'nat', 'relay')", name=op.f("ck_datacenter_tunnel_known")),
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
        sa.Column("status", sa.Text(), nullable=False, comment="whether its agent is heard"),
        sa.Column(
            "health",
            sa.Text(),
            nullable=False,
            comment="JSON: error_code, error_message, last_healthy_at; empty is healthy",
        ),
        sa.Column("hibernated", sa.Boolean(), nullable=False, comment="whether it asked for no new work"),
        sa.Column("listed", sa.Boolean(), nullable=False, comment="whether its people offer it on the market"),
        sa.Column("drain_state", sa.Text(), nullable=False),
        sa.Column("drain_id", sa.Text(), nullable=True, comment="of the latest drain: its mails are sent once"),
        sa.Column("drain_started_at", sa.BigInteger(), nullable=True),
        sa.Column(
            "drain_deadline", sa.BigInteger(), nullable=True, comment="when what still runs is ended; null never"
        ),
        sa.Column("drain_grace_s", sa.BigInteger(), nullable=True),
        sa.Column("drain_reason", sa.Text(), nullable=True),
        sa.Column("drain_notified", sa.Boolean(), nullable=False),
        sa.Column("instance_type", sa.Text(), nullable=True),
        sa.Column("cpu_mode", sa.Text(), nullable=False),
        sa.Column(
            "overcommit_percent", sa.BigInteger(), nullable=False, comment="vCPUs per shared thread, in hundredths"
        ),
        sa.Column("inventory", sa.Text(), nullable=False, comment="JSON as the agent sent it"),
        sa.Column("inventory_digest", sa.Text(), nullable=False),
        sa.Column("capabilities", sa.Text(), nullable=False, comment="JSON as the agent sent it"),
        sa.Column("agent_version", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False, comment="rises with every registration"),
        sa.Column(
            "last_seen", sa.BigInteger(), nullable=False, comment="its last sign of life: nothing is charged beyond it"
        ),
        sa.Column(
            "generation",
            sa.BigInteger(),
            nullable=False,
            comment="rises with every claim: who placed on an older one lost",
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
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
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


def create_tables_4() -> None:
    op.create_table(
        "volume_type",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("datacenter_id", sa.Text(), nullable=False),
        sa.Column("cost_per_gb_month", sa.BigInteger(), nullable=False, comment="nano-units"),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("removed_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("cost_per_gb_month >= 0", name=op.f("ck_volume_type_cost_not_negative")),
        sa.ForeignKeyConstraint(["datacenter_id"], ["datacenter.id"], name=op.f("fk_volume_type_datacenter_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_volume_type")),
    )
    op.create_index(
        "ix_volume_type_name",
        "volume_type",
        ["datacenter_id", "name"],
        unique=True,
        sqlite_where=sa.text("removed_at IS NULL"),
        postgresql_where=sa.text("removed_at IS NULL"),
    )
    op.create_table(
        "deposit",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("subject_id", sa.Text(), nullable=False, comment="the reservation"),
        sa.Column("amount", sa.BigInteger(), nullable=False, comment="nano-units set aside, all of them or none"),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("resolved_at", sa.BigInteger(), nullable=True),
        sa.Column("tx_id", sa.Text(), nullable=True, comment="what captured it"),
        sa.CheckConstraint("(state = 'held') = (resolved_at IS NULL)", name=op.f("ck_deposit_resolved_when_not_held")),
        sa.CheckConstraint("state IN ('held', 'captured', 'released')", name=op.f("ck_deposit_state_known")),
        sa.CheckConstraint("amount > 0", name=op.f("ck_deposit_amount_positive")),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name=op.f("fk_deposit_account_id")),
        sa.ForeignKeyConstraint(["tx_id"], ["ledger_tx.id"], name=op.f("fk_deposit_tx_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deposit")),
    )
    op.create_index(
        "ix_deposit_account",
        "deposit",
        ["account_id"],
        unique=False,
        sqlite_where=sa.text("state = 'held'"),
        postgresql_where=sa.text("state = 'held'"),
    )
    op.create_index(
        "ix_deposit_subject",
        "deposit",
        ["subject_id"],
        unique=True,
        sqlite_where=sa.text("state = 'held'"),
        postgresql_where=sa.text("state = 'held'"),
    )
    op.create_table(
        "gpu",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("pci_slot", sa.Text(), nullable=False, comment="its identity: indices shift"),
        sa.Column(
            "uuid", sa.Text(), nullable=True, comment="last known: not to be seen while a virtual machine has it"
        ),
        sa.Column(
            "number", sa.BigInteger(), nullable=False, comment="its place among the node's slots; what masks count"
        ),
        sa.Column("numa", sa.BigInteger(), nullable=False),
        sa.Column("brand", sa.Text(), nullable=False),
        sa.Column("architecture", sa.Text(), nullable=False),
        sa.Column("kernel_modules", sa.Text(), nullable=False),
        sa.Column("vram", sa.BigInteger(), nullable=False),
        sa.Column("pci_valid", sa.Boolean(), nullable=False),
        sa.Column("present", sa.Boolean(), nullable=False, comment="whether the latest inventory has it"),
        sa.Column("healthy", sa.Boolean(), nullable=False),
        sa.Column("problem", sa.Text(), nullable=True),
        sa.Column("enabled", sa.Boolean(), nullable=False, comment="set by people alone: no registration changes it"),
        sa.Column("mig_enabled", sa.Boolean(), nullable=False),
        sa.Column(
            "mig", sa.Text(), nullable=False, comment="JSON: its MIG profiles with their placements, and its instances"
        ),
        sa.Column("fabric_partition", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["node_id"], ["node.id"], name=op.f("fk_gpu_node_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gpu")),
        sa.UniqueConstraint("node_id", "pci_slot", name=op.f("uq_gpu_node_id_pci_slot")),
    )
    op.create_table(
        "gpu_sample",
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("pci_slot", sa.Text(), nullable=False),
        sa.Column("uuid", sa.Text(), nullable=False, comment="of the GPU or MIG instance; empty where it is not known"),
        sa.Column("utilization", sa.BigInteger(), nullable=True, comment="percent"),
        sa.Column("temperature", sa.BigInteger(), nullable=True, comment="degrees Celsius"),
        sa.Column("vram_used", sa.BigInteger(), nullable=True, comment="bytes"),
        sa.Column("vram_total", sa.BigInteger(), nullable=True),
        sa.Column("power", sa.BigInteger(), nullable=True, comment="watts"),
        sa.ForeignKeyConstraint(["node_id"], ["node.id"], name=op.f("fk_gpu_sample_node_id")),
        sa.PrimaryKeyConstraint("node_id", "at", "pci_slot", "uuid", name=op.f("pk_gpu_sample")),
    )
    op.create_table(
        "inference_lease",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False, comment="as the node named it when it asked"),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("preemptible", sa.Boolean(), nullable=False),
        sa.Column("notice_s", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column(
            "revoke_at", sa.BigInteger(), nullable=True, comment="by when it must be gone; null while nobody needs it"
        ),
        sa.Column("refused", sa.Text(), nullable=True, comment="why it has no GPUs"),
        sa.Column("released_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["node_id"], ["node.id"], name=op.f("fk_inference_lease_node_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_inference_lease")),
    )
    op.create_index(
        "ix_inference_lease_name",
        "inference_lease",
        ["node_id", "name"],
        unique=True,
        sqlite_where=sa.text("released_at IS NULL"),
        postgresql_where=sa.text("released_at IS NULL"),
    )


def create_tables_5() -> None:
    op.create_table(
        "instance_sample",
        sa.Column("instance_id", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False, comment="only the latest is kept"),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("cpu_us", sa.BigInteger(), nullable=True, comment="CPU time used since it started"),
        sa.Column("memory", sa.BigInteger(), nullable=True, comment="bytes"),
        sa.ForeignKeyConstraint(["node_id"], ["node.id"], name=op.f("fk_instance_sample_node_id")),
        sa.PrimaryKeyConstraint("instance_id", name=op.f("pk_instance_sample")),
    )
    op.create_table(
        "ip_range",
        sa.Column("network_id", sa.Text(), nullable=False),
        sa.Column("first", sa.Text(), nullable=False),
        sa.Column("last", sa.Text(), nullable=False),
        sa.Column("external_first", sa.Text(), nullable=True, comment="public addresses of the same number"),
        sa.Column("external_last", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["network_id"], ["network.id"], name=op.f("fk_ip_range_network_id")),
        sa.PrimaryKeyConstraint("network_id", "first", name=op.f("pk_ip_range")),
    )
    op.create_table(
        "node_command",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("args", sa.Text(), nullable=False, comment="JSON object of texts"),
        sa.Column("issued_at", sa.BigInteger(), nullable=False),
        sa.Column("deadline", sa.BigInteger(), nullable=True),
        sa.Column("session_id", sa.Text(), nullable=True, comment="that it was sent in"),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.Column("output", sa.Text(), nullable=False),
        sa.CheckConstraint(
            "status IN ('Queued', 'Processing', 'Completed', 'Failed', 'Lost')",
            name=op.f("ck_node_command_status_known"),
        ),
        sa.ForeignKeyConstraint(["node_id"], ["node.id"], name=op.f("fk_node_command_node_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_node_command")),
    )
    op.create_index(
        "ix_node_command_open",
        "node_command",
        ["node_id", "issued_at"],
        unique=False,
        sqlite_where=sa.text("finished_at IS NULL"),
        postgresql_where=sa.text("finished_at IS NULL"),
    )
    op.create_table(
        "node_event",
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column(
            "id", sa.Text(), nullable=False, comment="as the node named it: sent until it is answered, kept once"
        ),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("instance_id", sa.Text(), nullable=True),
        sa.Column("data", sa.Text(), nullable=False, comment="JSON object"),
        sa.ForeignKeyConstraint(["node_id"], ["node.id"], name=op.f("fk_node_event_node_id")),
        sa.PrimaryKeyConstraint("node_id", "id", name=op.f("pk_node_event")),
    )
    op.create_index("ix_node_event_at", "node_event", ["node_id", "at"], unique=False)
    op.create_table(
        "quota",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False, comment="of its holder"),
        sa.Column("holder_kind", sa.Text(), nullable=False),
        sa.Column("holder_id", sa.Text(), nullable=False),
        sa.Column("gpu", sa.BigInteger(), nullable=False),
        sa.Column("vcpu", sa.BigInteger(), nullable=False),
        sa.Column("dram", sa.BigInteger(), nullable=False, comment="bytes"),
        sa.Column("disk", sa.BigInteger(), nullable=False, comment="bytes"),
        sa.Column(
            "exclusive", sa.Boolean(), nullable=False, comment="whether nobody else may use the rest of the node"
        ),
        sa.Column("valid_from", sa.BigInteger(), nullable=False),
        sa.Column("valid_till", sa.BigInteger(), nullable=True),
        sa.Column("active", sa.Boolean(), nullable=False, comment="false once it is revoked"),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("revoked_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("holder_kind IN ('user', 'team')", name=op.f("ck_quota_holder_kind_known")),
        sa.CheckConstraint("active = (revoked_at IS NULL)", name=op.f("ck_quota_revoked_when_not_active")),
        sa.CheckConstraint("gpu > 0 OR vcpu > 0 OR dram > 0 OR disk > 0", name=op.f("ck_quota_grants_something")),
        sa.CheckConstraint("gpu >= 0 AND vcpu >= 0 AND dram >= 0 AND disk >= 0", name=op.f("ck_quota_not_negative")),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name=op.f("fk_quota_account_id")),
        sa.ForeignKeyConstraint(["node_id"], ["node.id"], name=op.f("fk_quota_node_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_quota")),
    )
    op.create_index(
        "ix_quota_account",
        "quota",
        ["account_id"],
        unique=False,
        sqlite_where=sa.text("active"),
        postgresql_where=sa.text("active"),
    )
    op.create_index(
        "ix_quota_node",
        "quota",
        ["node_id"],
        unique=False,
        sqlite_where=sa.text("active"),
        postgresql_where=sa.text("active"),
    )
    op.create_table(
        "rental_charge",
        sa.Column("tx_id", sa.Text(), nullable=False),
        sa.Column("meter_id", sa.Text(), nullable=False),
        sa.Column("begin_at", sa.BigInteger(), nullable=False),
        sa.Column("end_at", sa.BigInteger(), nullable=False),
        sa.Column("carried", sa.BigInteger(), nullable=False, comment="remainder before it"),
        sa.Column("remainder", sa.BigInteger(), nullable=False, comment="remainder after it"),
        sa.Column("amount", sa.BigInteger(), nullable=False, comment="nano-units"),
        sa.Column("payable", sa.BigInteger(), nullable=False, comment="the part of it that is the provider's"),
        sa.Column(
            "written_off", sa.BigInteger(), nullable=False, comment="the part of it that the account could not pay"
        ),
        sa.CheckConstraint("begin_at <= end_at AND amount > 0", name=op.f("ck_rental_charge_possible")),
        sa.CheckConstraint("payable >= 0 AND payable <= amount", name=op.f("ck_rental_charge_shares_possible")),
        sa.CheckConstraint(
            "written_off >= 0 AND written_off <= amount", name=op.f("ck_rental_charge_written_off_possible")
        ),
        sa.ForeignKeyConstraint(["meter_id"], ["rental_meter.id"], name=op.f("fk_rental_charge_meter_id")),
        sa.ForeignKeyConstraint(["tx_id"], ["ledger_tx.id"], name=op.f("fk_rental_charge_tx_id")),
        sa.PrimaryKeyConstraint("tx_id", name=op.f("pk_rental_charge")),
    )
    op.create_index("ix_rental_charge_meter", "rental_charge", ["meter_id", "begin_at"], unique=False)


def create_tables_6() -> None:
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


def create_tables_7() -> None:
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


def create_tables_8() -> None:
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
