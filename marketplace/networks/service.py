"""Addresses and ports of instances: which they have, and who had them is free again once they are gone."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec
from sqlalchemy import bindparam, insert, or_, select, update

from marketplace.catalog.datacenters import Datacenter
from marketplace.networks.tables import ip_lease, ip_range, network, port_lease
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random, new_id
from marketplace.store.prepared import Prepared


class NoPortError(Exception):
    """Every port that may be published is."""


class NoAddressError(Exception):
    """Every address of the network is in use."""


class NetworkGoneError(NoAddressError):
    """The network was removed a moment ago."""


class Published(msgspec.Struct, frozen=True):
    """A port of an instance, and where it is reached."""

    guest: int
    host: int
    proto: str
    gateway_ip: str


class Proxy(msgspec.Struct, frozen=True, kw_only=True):
    """The way out of a network, where there is one."""

    http_proxy: str | None = None
    https_proxy: str | None = None
    no_proxy: list[str] = []
    docker_no_proxy: list[str] = []
    curl_no_proxy: list[str] = []


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """An instance's address in a network."""

    network_id: str
    ip: str
    external_ip: str | None
    netmask: int
    gateway: str | None
    iface: str
    proxy: Proxy | None


_PUBLISHED = Prepared(
    select(port_lease.c.proto, port_lease.c.host_port).where(
        port_lease.c.gateway_ip == bindparam("address"), port_lease.c.released_at.is_(None)
    )
)


def choose_ports(
    unit: ReadUnit,
    instance_id: str,
    node_id: str,
    node_ip: str,
    home: Datacenter,
    guests: Sequence[tuple[int, str, int | None]],
    *,
    now: int,
    random: Random,
) -> list[dict[str, Any]]:
    """Return rows that publish ports of an instance, given as (port, protocol, the number wished for or None), which it
    gets where it is free. NoPortError.

    Who inserts them meets the unique index, if another instance was published at the same address meanwhile.
    """
    if not guests:
        return []
    address = home.tunnel_host or node_ip
    taken = set(unit.rows(_PUBLISHED, {"address": address}))
    rows = []
    for guest, proto, asked in guests:
        host = _free_port(home, taken, proto, asked, random)
        taken.add((proto, host))
        rows.append(
            {
                "id": new_id(now, random),
                "gateway_ip": address,
                "proto": proto,
                "host_port": host,
                "guest_port": guest,
                "instance_id": instance_id,
                "node_id": node_id,
                "created_at": now,
                "released_at": None,
            }
        )
    return rows


def _free_port(home: Datacenter, taken: set[tuple[str, int]], proto: str, asked: int | None, random: Random) -> int:
    if asked is not None and (proto, asked) not in taken and home.port_from <= asked <= home.port_to:
        return asked
    count = home.port_to - home.port_from + 1
    begin = int.from_bytes(random(4), "big") % count
    for step in range(count):
        port = home.port_from + (begin + step) % count
        if (proto, port) not in taken:
            return port
    raise NoPortError(f"all {count} ports are in use")


def ports_of(unit: ReadUnit, instance_ids: Collection[str]) -> dict[str, list[Published]]:
    """Return the ports of instances, those that are over included, by instance."""
    wanted = (
        select(port_lease)
        .where(port_lease.c.instance_id.in_(sorted(instance_ids)))
        .order_by(port_lease.c.guest_port, port_lease.c.proto)
    )
    found: dict[str, list[Published]] = {}
    for row in unit.select(wanted):
        found.setdefault(row.instance_id, []).append(
            Published(row.guest_port, row.host_port, row.proto, row.gateway_ip)
        )
    return found


def visible(unit: ReadUnit, datacenter_id: str, name: str, team_ids: Collection[str]) -> Any:
    """Return the row of a network that is everybody's or one of these teams', or None."""
    wanted = select(network).where(
        network.c.datacenter_id == datacenter_id,
        network.c.name == name,
        network.c.deleted_at.is_(None),
        or_(network.c.team_id.is_(None), network.c.team_id.in_(sorted(team_ids))),
    )
    return unit.select(wanted).one_or_none()


def join(unit: WriteUnit, network_id: str, instance_id: str, *, public: bool = False, now: int, random: Random) -> str:
    """Give an instance the lowest free address of a network; with `public`, one that has an external address. Returns
    it. NoAddressError."""
    there = select(network.c.id).where(network.c.id == network_id, network.c.deleted_at.is_(None)).with_for_update()
    if unit.select(there).one_or_none() is None:
        raise NetworkGoneError("the network was removed")
    live = select(ip_lease.c.ip).where(ip_lease.c.network_id == network_id, ip_lease.c.released_at.is_(None))
    taken = set(unit.select(live).scalars())
    ranges = unit.select(select(ip_range).where(ip_range.c.network_id == network_id)).all()
    for found in sorted(ranges, key=lambda row: int(ipaddress.ip_address(row.first))):  # as numbers, not as texts
        for ip, external in _addresses(found):
            if ip in taken or (public and external is None):
                continue
            unit.execute(
                insert(ip_lease).values(
                    id=new_id(now, random),
                    network_id=network_id,
                    ip=ip,
                    external_ip=external,
                    instance_id=instance_id,
                    created_at=now,
                    released_at=None,
                )
            )
            return ip
    raise NoAddressError("every address of the network is in use")


def _addresses(row: Any) -> Iterator[tuple[str, str | None]]:
    first, last = ipaddress.ip_address(row.first), ipaddress.ip_address(row.last)
    outside = None if row.external_first is None else ipaddress.ip_address(row.external_first)
    for step in range(int(last) - int(first) + 1):
        yield str(first + step), None if outside is None else str(outside + step)


def joined(unit: ReadUnit, instance_ids: Collection[str]) -> dict[str, Joined]:
    """Return the addresses of instances that still have one, by instance."""
    wanted = (
        select(ip_lease.c.instance_id, ip_lease.c.ip, ip_lease.c.external_ip, network)
        .join(network, network.c.id == ip_lease.c.network_id)
        .where(ip_lease.c.instance_id.in_(sorted(instance_ids)), ip_lease.c.released_at.is_(None))
    )
    return {
        row.instance_id: Joined(
            network_id=row.id,
            ip=row.ip,
            external_ip=row.external_ip,
            netmask=row.netmask,
            gateway=row.gateway,
            iface=row.iface,
            proxy=None if row.proxy is None else msgspec.json.decode(row.proxy, type=Proxy),
        )
        for row in unit.select(wanted)
    }


def release(unit: WriteUnit, instance_id: str, now: int) -> None:
    """Give back the ports and the address of an instance. Safe to repeat."""
    for table in (port_lease, ip_lease):
        mine = (table.c.instance_id == instance_id, table.c.released_at.is_(None))
        unit.execute(update(table).where(*mine).values(released_at=now))
