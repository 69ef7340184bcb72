"""Tables of claims: what of a node belongs to whom.

`gpu_slice_claim` is the one place where a GPU has an owner: a rental of the whole GPU has all of its eight slices, a
MIG instance its memory slices, an inference lease all eight. One unique index over the live rows makes any double
claim impossible, whatever the code does.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    PrimaryKeyConstraint,
    Table,
    Text,
    text,
)

from marketplace.store.base import metadata

SLICES = 8
"""Memory slices that a GPU is counted in."""
_LIVE = text("released_at IS NULL")

claim = Table(
    "claim",
    metadata,
    Column("instance_id", Text, ForeignKey("instance.id"), primary_key=True),
    Column("node_id", Text, ForeignKey("node.id"), nullable=False),
    Column("gpus", BigInteger, nullable=False, comment="GPUs that it has slices of"),
    Column("threads", BigInteger, nullable=False, comment="hardware threads that its vCPUs take"),
    Column("dram", BigInteger, nullable=False, comment="bytes, rounded up to whole pages where it has any"),
    Column("disk", BigInteger, nullable=False, comment="bytes"),
    Column("cpu_policy", Text, nullable=False),
    Column("hugepages", Text, nullable=False, comment="JSON: NUMA node to 1 GiB pages"),
    Column("cpus", Text, nullable=False, comment="JSON: NUMA node to threads, as they are in cpu_claim"),
    Column("quota_id", Text, ForeignKey("quota.id"), nullable=True, comment="the quota that covers it"),
    Column("zombie", Boolean, nullable=False, comment="its owner is over, but its node never said that it is gone"),
    Column("created_at", BigInteger, nullable=False),
    Column("released_at", BigInteger, nullable=True),
)
Index("ix_claim_node", claim.c.node_id, sqlite_where=_LIVE, postgresql_where=_LIVE)
_COVERED = text("released_at IS NULL AND quota_id IS NOT NULL")
Index("ix_claim_quota", claim.c.quota_id, sqlite_where=_COVERED, postgresql_where=_COVERED)

cpu_claim = Table(
    "cpu_claim",
    metadata,
    Column("instance_id", Text, ForeignKey("instance.id"), primary_key=True),
    Column("thread", BigInteger, primary_key=True),
    Column("node_id", Text, ForeignKey("node.id"), nullable=False),
    Column("released_at", BigInteger, nullable=True),
    sqlite_with_rowid=False,
)
Index(
    "ix_cpu_claim_thread",
    cpu_claim.c.node_id,
    cpu_claim.c.thread,
    unique=True,
    sqlite_where=_LIVE,
    postgresql_where=_LIVE,
)

inference_lease = Table(
    "inference_lease",
    metadata,
    Column("id", Text, primary_key=True),
    Column("node_id", Text, ForeignKey("node.id"), nullable=False),
    Column("name", Text, nullable=False, comment="as the node named it when it asked"),
    Column("holder", Text, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("preemptible", Boolean, nullable=False),
    Column("notice_s", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("revoke_at", BigInteger, nullable=True, comment="by when it must be gone; null while nobody needs it"),
    Column("refused", Text, nullable=True, comment="why it has no GPUs"),
    Column("released_at", BigInteger, nullable=True),
)
Index(
    "ix_inference_lease_name",
    inference_lease.c.node_id,
    inference_lease.c.name,
    unique=True,
    sqlite_where=_LIVE,
    postgresql_where=_LIVE,
)

gpu_slice_claim = Table(
    "gpu_slice_claim",
    metadata,
    Column("gpu_id", Text, ForeignKey("gpu.id")),
    Column("slice", BigInteger),
    Column("owner_id", Text, comment="the instance or lease"),
    Column("node_id", Text, ForeignKey("node.id"), nullable=False),
    Column("instance_id", Text, ForeignKey("instance.id"), nullable=True),
    Column("lease_id", Text, ForeignKey("inference_lease.id"), nullable=True),
    Column("mig_start", BigInteger, nullable=True, comment="first slice of its MIG instance; null for a whole GPU"),
    Column("created_at", BigInteger, nullable=False),
    Column("released_at", BigInteger, nullable=True),
    # Owners come one after another: what is claimed together is kept together, beside what was claimed last.
    PrimaryKeyConstraint("owner_id", "gpu_id", "slice"),
    CheckConstraint(f"slice >= 0 AND slice < {SLICES}", name="slice_possible"),
    CheckConstraint("(instance_id IS NULL) <> (lease_id IS NULL)", name="one_owner"),
    CheckConstraint("owner_id = coalesce(instance_id, lease_id)", name="owner_named"),
    sqlite_with_rowid=False,
)
Index(
    "ix_gpu_slice_claim_live",
    gpu_slice_claim.c.gpu_id,
    gpu_slice_claim.c.slice,
    unique=True,
    sqlite_where=_LIVE,
    postgresql_where=_LIVE,
)
