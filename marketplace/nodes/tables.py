"""Tables of nodes: the machines, their GPUs, what they are asked to do once, and what they measure."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from marketplace.store.base import metadata

node = Table(
    "node",
    metadata,
    Column("id", Text, primary_key=True),
    # SQLite reads a row from its beginning, and only as far as it is asked: what placement looks for comes first, what
    # is long comes last.
    Column("instance_type", Text, ForeignKey("instance_type.name"), nullable=True),
    Column("status", Text, nullable=False, comment="whether its agent is heard"),
    Column("drain_state", Text, nullable=False),
    Column("hibernated", Boolean, nullable=False, comment="whether it asked for no new work"),
    Column("generation", BigInteger, nullable=False, comment="rises with every claim: who placed on an older one lost"),
    Column("deleted_at", BigInteger, nullable=True),
    Column("provider_id", Text, ForeignKey("provider.id"), nullable=False),
    Column("datacenter_id", Text, ForeignKey("datacenter.id"), nullable=False),
    Column(
        "machine_id", Text, nullable=False, comment="what the machine calls itself; survives reinstalling the agent"
    ),
    Column("boot_id", Text, nullable=False),
    Column("hostname", Text, nullable=False),
    Column("ip_address", Text, nullable=False),
    Column(
        "health", Text, nullable=False, comment="JSON: error_code, error_message, last_healthy_at; empty is healthy"
    ),
    Column("listed", Boolean, nullable=False, comment="whether its people offer it on the market"),
    Column("drain_id", Text, nullable=True, comment="of the latest drain: its mails are sent once"),
    Column("drain_started_at", BigInteger, nullable=True),
    Column("drain_deadline", BigInteger, nullable=True, comment="when what still runs is ended; null never"),
    Column("drain_grace_s", BigInteger, nullable=True),
    Column("drain_reason", Text, nullable=True),
    Column("drain_notified", Boolean, nullable=False),
    Column("cpu_mode", Text, nullable=False),
    Column("overcommit_percent", BigInteger, nullable=False, comment="vCPUs per shared thread, in hundredths"),
    Column("inventory_digest", Text, nullable=False),
    Column("agent_version", Text, nullable=False),
    Column("session_id", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False, comment="rises with every registration"),
    Column("last_seen", BigInteger, nullable=False, comment="its last sign of life: nothing is charged beyond it"),
    Column("desired_rev", BigInteger, nullable=False, comment="rises with every change of what it should do"),
    Column("observed_digest", Text, nullable=False, comment="of the report that was taken last; empty for none"),
    Column("erase_grace_s", BigInteger, nullable=True, comment="null is the platform's setting"),
    Column("dram_reserve", BigInteger, nullable=False, comment="bytes that its own system keeps"),
    Column("inference_floor", BigInteger, nullable=False, comment="GPUs that rentals may never take"),
    Column("reclaim_notice_s", BigInteger, nullable=False),
    Column("next_fence", BigInteger, nullable=False, comment="fence of its next lease"),
    Column("ssh_host", Text, nullable=True),
    Column("ssh_port", BigInteger, nullable=True),
    Column("ssh_user", Text, nullable=True),
    Column("proxy_jump", Text, nullable=True),
    Column("proxy_user", Text, nullable=True),
    Column("proxy_port", BigInteger, nullable=True),
    Column("registered_at", BigInteger, nullable=False),
    Column("capabilities", Text, nullable=False, comment="JSON as the agent sent it"),
    Column("inventory", Text, nullable=False, comment="JSON as the agent sent it"),
    CheckConstraint("status IN ('Ready', 'NotResponding', 'Offline')", name="status_known"),
    CheckConstraint("drain_state IN ('None', 'Draining', 'Drained')", name="drain_state_known"),
    CheckConstraint("cpu_mode IN ('Legacy', 'Pinned', 'Mixed')", name="cpu_mode_known"),
    CheckConstraint("overcommit_percent >= 100", name="overcommit_possible"),
)
Index(
    "ix_node_machine",
    node.c.machine_id,
    unique=True,
    sqlite_where=text("deleted_at IS NULL"),
    postgresql_where=text("deleted_at IS NULL"),
)
Index("ix_node_provider", node.c.provider_id)
Index("ix_node_type", node.c.instance_type, node.c.datacenter_id)
# All that a rental asks of every node. PostgreSQL does without: there a row that changes in no index is cheaper.
Index(
    "ix_node_taking",
    node.c.instance_type,
    node.c.status,
    node.c.drain_state,
    node.c.hibernated,
    node.c.deleted_at,
    node.c.generation,
    node.c.id,
).ddl_if(dialect="sqlite")

gpu = Table(
    "gpu",
    metadata,
    Column("id", Text, primary_key=True),
    Column("node_id", Text, ForeignKey("node.id"), nullable=False),
    Column("pci_slot", Text, nullable=False, comment="its identity: indices shift"),
    Column("uuid", Text, nullable=True, comment="last known: not to be seen while a virtual machine has it"),
    Column("number", BigInteger, nullable=False, comment="its place among the node's slots; what masks count"),
    Column("numa", BigInteger, nullable=False),
    Column("brand", Text, nullable=False),
    Column("architecture", Text, nullable=False),
    Column("kernel_modules", Text, nullable=False),
    Column("vram", BigInteger, nullable=False),
    Column("pci_valid", Boolean, nullable=False),
    Column("present", Boolean, nullable=False, comment="whether the latest inventory has it"),
    Column("healthy", Boolean, nullable=False),
    Column("problem", Text, nullable=True),
    Column("enabled", Boolean, nullable=False, comment="set by people alone: no registration changes it"),
    Column("mig_enabled", Boolean, nullable=False),
    Column("mig", Text, nullable=False, comment="JSON: its MIG profiles with their placements, and its instances"),
    Column("fabric_partition", BigInteger, nullable=True),
    UniqueConstraint("node_id", "pci_slot"),
)

node_command = Table(
    "node_command",
    metadata,
    Column("id", Text, primary_key=True),
    Column("node_id", Text, ForeignKey("node.id"), nullable=False),
    Column("kind", Text, nullable=False),
    Column("args", Text, nullable=False, comment="JSON object of texts"),
    Column("issued_at", BigInteger, nullable=False),
    Column("deadline", BigInteger, nullable=True),
    Column("session_id", Text, nullable=True, comment="that it was sent in"),
    Column("status", Text, nullable=False),
    Column("finished_at", BigInteger, nullable=True),
    Column("output", Text, nullable=False),
    CheckConstraint("status IN ('Queued', 'Processing', 'Completed', 'Failed', 'Lost')", name="status_known"),
)
Index(
    "ix_node_command_open",
    node_command.c.node_id,
    node_command.c.issued_at,
    sqlite_where=text("finished_at IS NULL"),
    postgresql_where=text("finished_at IS NULL"),
)

node_event = Table(
    "node_event",
    metadata,
    Column("node_id", Text, ForeignKey("node.id"), primary_key=True),
    Column("id", Text, primary_key=True, comment="as the node named it: sent until it is answered, kept once"),
    Column("at", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("instance_id", Text, nullable=True),
    Column("data", Text, nullable=False, comment="JSON object"),
)
Index("ix_node_event_at", node_event.c.node_id, node_event.c.at)

gpu_sample = Table(
    "gpu_sample",
    metadata,
    Column("node_id", Text, ForeignKey("node.id"), primary_key=True),
    Column("at", BigInteger, primary_key=True),
    Column("pci_slot", Text, primary_key=True),
    Column("uuid", Text, primary_key=True, comment="of the GPU or MIG instance; empty where it is not known"),
    Column("utilization", BigInteger, nullable=True, comment="percent"),
    Column("temperature", BigInteger, nullable=True, comment="degrees Celsius"),
    Column("vram_used", BigInteger, nullable=True, comment="bytes"),
    Column("vram_total", BigInteger, nullable=True),
    Column("power", BigInteger, nullable=True, comment="watts"),
)

instance_sample = Table(
    "instance_sample",
    metadata,
    Column("instance_id", Text, primary_key=True),
    Column("at", BigInteger, nullable=False, comment="only the latest is kept"),
    Column("node_id", Text, ForeignKey("node.id"), nullable=False),
    Column("cpu_us", BigInteger, nullable=True, comment="CPU time used since it started"),
    Column("memory", BigInteger, nullable=True, comment="bytes"),
)
