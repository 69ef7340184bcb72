"""What nodes are made of and told to do, quotas, and the charges of rentals."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

TABLES = (
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
)


def upgrade() -> None:
    present = set(sa.inspect(op.get_bind()).get_table_names())
    assert not present & set(TABLES), f"tables of an unknown origin are in the way: {sorted(present & set(TABLES))}"
    create_tables_1()
    create_tables_2()
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


def create_tables_2() -> None:
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
