"""Claims are kept by owner, in the order in which they are made: a rental writes into fewer pages of the database."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

_LIVE = sa.text("released_at IS NULL")
_COVERED = sa.text("released_at IS NULL AND quota_id IS NOT NULL")
_TAKING = ["instance_type", "status", "drain_state", "hibernated", "deleted_at", "generation", "id"]


def upgrade() -> None:
    op.drop_index("ix_gpu_slice_claim_node", "gpu_slice_claim")
    op.drop_index("ix_gpu_slice_claim_owner", "gpu_slice_claim")
    op.drop_index("ix_claim_quota", "claim")
    op.create_index("ix_claim_quota", "claim", ["quota_id"], sqlite_where=_COVERED, postgresql_where=_COVERED)
    if op.get_bind().dialect.name == "postgresql":
        op.drop_constraint("pk_gpu_slice_claim", "gpu_slice_claim", type_="primary")
        op.create_primary_key("pk_gpu_slice_claim", "gpu_slice_claim", ["owner_id", "gpu_id", "slice"])
    else:
        _make_again()
        op.create_index("ix_node_taking", "node", _TAKING)


def _make_again() -> None:
    """SQLite changes no key of a table: the rows go into new ones."""
    op.drop_index("ix_cpu_claim_thread", "cpu_claim")
    op.drop_index("ix_gpu_slice_claim_live", "gpu_slice_claim")
    for table in ("cpu_claim", "gpu_slice_claim"):
        op.rename_table(table, f"{table}_before")
    op.create_table(
        "cpu_claim",
        sa.Column("instance_id", sa.Text(), nullable=False),
        sa.Column("thread", sa.BigInteger(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("released_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["instance_id"], ["instance.id"], name=op.f("fk_cpu_claim_instance_id")),
        sa.ForeignKeyConstraint(["node_id"], ["node.id"], name=op.f("fk_cpu_claim_node_id")),
        sa.PrimaryKeyConstraint("instance_id", "thread", name=op.f("pk_cpu_claim")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "gpu_slice_claim",
        sa.Column("gpu_id", sa.Text(), nullable=False),
        sa.Column("slice", sa.BigInteger(), nullable=False),
        sa.Column("owner_id", sa.Text(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("instance_id", sa.Text(), nullable=True),
        sa.Column("lease_id", sa.Text(), nullable=True),
        sa.Column("mig_start", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("released_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("(instance_id IS NULL) <> (lease_id IS NULL)", name=op.f("ck_gpu_slice_claim_one_owner")),
        sa.CheckConstraint("owner_id = coalesce(instance_id, lease_id)", name=op.f("ck_gpu_slice_claim_owner_named")),
        sa.CheckConstraint("slice >= 0 AND slice < 8", name=op.f("ck_gpu_slice_claim_slice_possible")),
        sa.ForeignKeyConstraint(["gpu_id"], ["gpu.id"], name=op.f("fk_gpu_slice_claim_gpu_id")),
        sa.ForeignKeyConstraint(["instance_id"], ["instance.id"], name=op.f("fk_gpu_slice_claim_instance_id")),
        sa.ForeignKeyConstraint(["lease_id"], ["inference_lease.id"], name=op.f("fk_gpu_slice_claim_lease_id")),
        sa.ForeignKeyConstraint(["node_id"], ["node.id"], name=op.f("fk_gpu_slice_claim_node_id")),
        sa.PrimaryKeyConstraint("owner_id", "gpu_id", "slice", name=op.f("pk_gpu_slice_claim")),
        sqlite_with_rowid=False,
    )
    for table in ("cpu_claim", "gpu_slice_claim"):
        op.execute(f"INSERT INTO {table} SELECT * FROM {table}_before")  # noqa: S608
        op.drop_table(f"{table}_before")
    for name, table, columns in (
        ("ix_cpu_claim_thread", "cpu_claim", ["node_id", "thread"]),
        ("ix_gpu_slice_claim_live", "gpu_slice_claim", ["gpu_id", "slice"]),
    ):
        op.create_index(name, table, columns, unique=True, sqlite_where=_LIVE)
