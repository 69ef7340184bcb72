"""The server's part of a relay: the secret that it shares with the relay of a datacenter, and what it signs for nodes.

A grant follows the leases of ports: what is to end is not in it any more, whether or not its machine has ended yet.
"""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Select, select

from marketplace.catalog.tables import datacenter
from marketplace.instances.tables import instance
from marketplace.networks.tables import port_lease
from marketplace.nodes.tables import node
from marketplace.relay import grants
from marketplace.relay.access import RelayGrant
from marketplace.relay.grants import SECRET_BYTES, Grant, GrantedPort
from marketplace.store.db import ReadUnit
from marketplace.store.ids import Random
from marketplace.store.vault import Vault

GRANT_US = 3600 * 1_000_000
"""How long a grant holds. Nodes ask for another one every few minutes; a relay goes on without the server so long."""


class Secret(msgspec.Struct, frozen=True):
    """What a relay and the server share: its text, for the relay's operator, and encrypted, for the database."""

    text: str
    sealed: bytes

    def __repr__(self) -> str:
        """Never show it."""
        return "Secret()"


class Home(msgspec.Struct, frozen=True):
    """The relay of a node's datacenter."""

    name: str
    host: str
    port: int
    sealed: bytes


def make_secret(vault: Vault, datacenter_name: str, random: Random) -> Secret:
    """Return a new secret for the relay of a datacenter."""
    secret = random(SECRET_BYTES)
    return Secret(secret.hex(), vault.seal(secret, _context(datacenter_name), random))


def home_of(unit: ReadUnit, node_id: str) -> Home | None:
    """Return the relay that publishes a node's ports, or None where none does."""
    wanted = (
        select(datacenter.c.name, datacenter.c.tunnel_host, datacenter.c.relay_port, datacenter.c.relay_sealed)
        .join(node, node.c.datacenter_id == datacenter.c.id)
        .where(node.c.id == node_id, datacenter.c.tunnel == "relay")
    )
    row = unit.select(wanted).one_or_none()
    return None if row is None else Home(*row)


def hosts(unit: ReadUnit) -> frozenset[str]:
    """Return the addresses at which relays publish ports."""
    return frozenset(unit.select(select(datacenter.c.tunnel_host).where(datacenter.c.tunnel == "relay")).scalars())


def publishes(unit: ReadUnit, node_id: str) -> bool:
    """Whether a relay publishes ports of machines on this node."""
    home = home_of(unit, node_id)
    return home is not None and unit.select(_leased(node_id, home.host).limit(1)).first() is not None


def _leased(node_id: str, host: str) -> Select[int, str]:
    """Ports that are leased at an address to a node, by number."""
    return (
        select(port_lease.c.host_port, port_lease.c.id)
        .where(
            port_lease.c.node_id == node_id,
            port_lease.c.gateway_ip == host,
            port_lease.c.proto == "tcp",
            port_lease.c.released_at.is_(None),
        )
        .order_by(port_lease.c.host_port)
    )


def grant(unit: ReadUnit, vault: Vault, row: Any, now: int) -> RelayGrant | None:
    """Sign what the node of this row may publish; None where it has no relay. VaultError."""
    home = home_of(unit, row.id)
    if home is None:
        return None
    live = _leased(row.id, home.host).join(instance, instance.c.id == port_lease.c.instance_id)
    wanted = live.where(instance.c.want != "Absent")
    made = Grant(
        node=row.id,
        epoch=row.epoch,
        rev=row.desired_rev,
        expires_at=now + GRANT_US,
        ports=[GrantedPort(port, lease) for port, lease in unit.select(wanted)],
    )
    text = grants.write(made)
    key = grants.key_of(vault.open(home.sealed, _context(home.name)), text)
    return RelayGrant(host=home.host, port=home.port, grant=text, key=key.hex())


def _context(datacenter_name: str) -> str:
    return f"relay of {datacenter_name.casefold()}"
