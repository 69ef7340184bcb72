"""Tables of networks: their ranges of addresses, and which address and which port belongs to which instance."""

from __future__ import annotations

from sqlalchemy import BigInteger, CheckConstraint, Column, ForeignKey, Index, Table, Text, text

from marketplace.store.base import metadata

_LIVE = text("released_at IS NULL")
_THERE = text("deleted_at IS NULL")

network = Table(
    "network",
    metadata,
    Column("id", Text, primary_key=True),
    Column("datacenter_id", Text, ForeignKey("datacenter.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("team_id", Text, ForeignKey("team.id"), nullable=True, comment="null is for everybody"),
    Column("gateway", Text, nullable=True),
    Column("netmask", BigInteger, nullable=False, comment="bits of the prefix"),
    Column("iface", Text, nullable=False, comment="bridge of the nodes that carries it"),
    Column("server_address", Text, nullable=True),
    Column("proxy", Text, nullable=True, comment="JSON: http_proxy, https_proxy and what goes past them"),
    Column("created_at", BigInteger, nullable=False),
    Column("deleted_at", BigInteger, nullable=True),
    CheckConstraint("netmask >= 0 AND netmask <= 128", name="netmask_possible"),
)
Index(
    "ix_network_name",
    network.c.datacenter_id,
    network.c.name,
    unique=True,
    sqlite_where=_THERE,
    postgresql_where=_THERE,
)

ip_range = Table(
    "ip_range",
    metadata,
    Column("network_id", Text, ForeignKey("network.id"), primary_key=True),
    Column("first", Text, primary_key=True),
    Column("last", Text, nullable=False),
    Column("external_first", Text, nullable=True, comment="public addresses of the same number"),
    Column("external_last", Text, nullable=True),
)

ip_lease = Table(
    "ip_lease",
    metadata,
    Column("id", Text, primary_key=True),
    Column("network_id", Text, ForeignKey("network.id"), nullable=False),
    Column("ip", Text, nullable=False),
    Column("external_ip", Text, nullable=True),
    Column("instance_id", Text, ForeignKey("instance.id"), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("released_at", BigInteger, nullable=True),
)
Index("ix_ip_lease_ip", ip_lease.c.network_id, ip_lease.c.ip, unique=True, sqlite_where=_LIVE, postgresql_where=_LIVE)
Index("ix_ip_lease_instance", ip_lease.c.instance_id)

port_lease = Table(
    "port_lease",
    metadata,
    Column("id", Text, primary_key=True),
    Column("gateway_ip", Text, nullable=False, comment="address that it is published on"),
    Column("proto", Text, nullable=False),
    Column("host_port", BigInteger, nullable=False),
    Column("guest_port", BigInteger, nullable=False),
    Column("instance_id", Text, ForeignKey("instance.id"), nullable=False),
    Column("node_id", Text, ForeignKey("node.id"), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("released_at", BigInteger, nullable=True),
    CheckConstraint("proto IN ('tcp', 'udp')", name="proto_known"),
)
Index(
    "ix_port_lease_port",
    port_lease.c.gateway_ip,
    port_lease.c.proto,
    port_lease.c.host_port,
    unique=True,
    sqlite_where=_LIVE,
    postgresql_where=_LIVE,
)
Index("ix_port_lease_instance", port_lease.c.instance_id)
