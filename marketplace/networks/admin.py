"""Networks as their operators keep them, and who may see which.

The row of a datacenter is locked while its networks change: of two that want a name, or the same addresses, the second
sees the first. The row of a network is locked while addresses of it are given away, and while it is removed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, false, insert, or_, select, true, update

from marketplace.catalog.tables import datacenter
from marketplace.http.pagination import newest_first
from marketplace.instances.tables import instance
from marketplace.networks.rules import Range, overlap, read_range
from marketplace.networks.service import Proxy
from marketplace.networks.tables import ip_lease, ip_range, network
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random, new_id
from marketplace.teams.tables import team, team_member
from marketplace.users.tables import users


class NameTakenError(ValueError):
    """Another network of the datacenter has this name."""


class AddressesTakenError(ValueError):
    """Another network on the same interface gives these addresses away."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A network to be made."""

    datacenter_id: str
    name: str
    team_id: str | None
    gateway: str | None
    netmask: int
    iface: str
    server_address: str | None
    ranges: tuple[Range, ...]
    proxy: Proxy | None


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Which networks somebody may see: all, or those for everybody, for their teams, and in their datacenters."""

    everything: bool = False
    user_id: str | None = None
    team_id: str | None = None
    provider_id: str | None = None

    def operates(self, provider_id: str) -> bool:
        """Whether they see everything about networks in a provider's datacenters."""
        return self.everything or self.provider_id == provider_id


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which of those a list is about: the ones to which all of it applies; None does not narrow."""

    team_id: str | None = None
    provider_id: str | None = None
    datacenters: tuple[str, ...] | None = None
    renter_team: str | None = None
    renter_user: str | None = None


class Executor(msgspec.Struct, frozen=True):
    """A live instance with an address in a network."""

    id: str
    ip: str
    owner_email: str | None


_ROW = select(
    network,
    datacenter.c.name.label("datacenter"),
    datacenter.c.provider_id,
    team.c.name.label("team_name"),
).select_from(
    network.join(datacenter, datacenter.c.id == network.c.datacenter_id).join(
        team, team.c.id == network.c.team_id, isouter=True
    )
)
_THERE = network.c.deleted_at.is_(None)


def add(unit: WriteUnit, plan: Plan, *, now: int, random: Random) -> str:
    """Add a network and return its id. NameTakenError, AddressesTakenError."""
    unit.select(select(datacenter.c.id).where(datacenter.c.id == plan.datacenter_id).with_for_update()).one()
    others = unit.select(select(network).where(network.c.datacenter_id == plan.datacenter_id, _THERE)).all()
    if any(row.name == plan.name for row in others):
        raise NameTakenError(plan.name)
    beside = [row.id for row in others if row.iface == plan.iface]
    given = [one for found in ranges_of(unit, beside).values() for one in found]
    if any(overlap(one, other) for one in plan.ranges for other in given):
        raise AddressesTakenError(plan.iface)
    network_id = new_id(now, random)
    unit.execute(
        insert(network).values(
            id=network_id,
            datacenter_id=plan.datacenter_id,
            name=plan.name,
            team_id=plan.team_id,
            gateway=plan.gateway,
            netmask=plan.netmask,
            iface=plan.iface,
            server_address=plan.server_address,
            proxy=_written(plan.proxy),
            created_at=now,
            deleted_at=None,
        )
    )
    rows = [
        {
            "network_id": network_id,
            "first": str(one.first),
            "last": str(one.last),
            "external_first": None if one.external_first is None else str(one.external_first),
            "external_last": None if one.external_last is None else str(one.external_last),
        }
        for one in plan.ranges
    ]
    if rows:
        unit.insert_rows(ip_range, rows)
    return network_id


def named(unit: ReadUnit, datacenter_name: str, name: str) -> Any:
    """Return the row of a network, with its datacenter and provider, or None."""
    wanted = _ROW.where(datacenter.c.name_key == datacenter_name.casefold(), network.c.name == name, _THERE)
    return unit.select(wanted).one_or_none()


def of_ids(unit: ReadUnit, ids: Collection[str]) -> list[Any]:
    """Return the rows of networks, with their datacenters and providers; those that are not there are absent."""
    return list(unit.select(_ROW.where(network.c.id.in_(sorted(ids)), _THERE).order_by(network.c.id)).all())


def lock(unit: WriteUnit, ids: Collection[str]) -> list[str]:
    """Keep networks as they are until the unit ends; return which of them there are."""
    wanted = select(network.c.id).where(network.c.id.in_(sorted(ids)), _THERE).order_by(network.c.id).with_for_update()
    return list(unit.select(wanted).scalars())


def change(unit: WriteUnit, ids: Collection[str], values: Mapping[str, Any]) -> None:
    """Write who may use networks (`team_id`), and their way out (`proxy`)."""
    written = {name: _written(value) if name == "proxy" else value for name, value in values.items()}
    if written:
        unit.execute(update(network).where(network.c.id.in_(sorted(ids))).values(**written))


def remove(unit: WriteUnit, ids: Collection[str], now: int) -> None:
    """Remove networks that nothing is in. They are locked."""
    unit.execute(update(network).where(network.c.id.in_(sorted(ids))).values(deleted_at=now))


def page(unit: ReadUnit, view: View, selection: Selection, *, cursor: str | None, limit: int) -> list[Any]:
    """Return rows of networks, newest first, one more than `limit` when there are more."""
    wanted = _ROW.where(_THERE, _visible(view), *_selected(selection))
    return list(unit.select(newest_first(wanted, network.c.created_at, network.c.id, cursor, limit)).all())


def visible(unit: ReadUnit, view: View, ids: Collection[str]) -> set[str]:
    """Return which of these networks somebody may see."""
    return set(unit.select(select(network.c.id).where(network.c.id.in_(sorted(ids)), _THERE, _visible(view))).scalars())


def ranges_of(unit: ReadUnit, ids: Collection[str]) -> dict[str, list[Range]]:
    """Return the ranges of networks, by network, in the order of their addresses."""
    found: dict[str, list[Range]] = {}
    for row in unit.select(select(ip_range).where(ip_range.c.network_id.in_(sorted(ids)))):
        one = read_range("", row.first, row.last, row.external_first, row.external_last)
        found.setdefault(row.network_id, []).append(one)
    return {key: sorted(ranges, key=lambda one: int(one.first)) for key, ranges in found.items()}


def executors_of(unit: ReadUnit, ids: Collection[str]) -> dict[str, list[Executor]]:
    """Return the instances in networks that are not over, by network, in the order of their addresses."""
    wanted = (
        select(ip_lease.c.network_id, ip_lease.c.instance_id, ip_lease.c.ip, users.c.email)
        .join(instance, instance.c.id == ip_lease.c.instance_id)
        .join(users, users.c.id == instance.c.user_id, isouter=True)
        .where(ip_lease.c.network_id.in_(sorted(ids)), ip_lease.c.released_at.is_(None), instance.c.ended_at.is_(None))
    )
    found: dict[str, list[Executor]] = {}
    for network_id, *rest in unit.select(wanted):
        found.setdefault(network_id, []).append(Executor(*rest))
    return {key: sorted(inside, key=lambda one: int(ipaddress.ip_address(one.ip))) for key, inside in found.items()}


def read_proxy(text: str | None) -> Proxy | None:
    """Read the way out of a network as its row has it."""
    return None if text is None else msgspec.json.decode(text, type=Proxy)


def _written(proxy: Proxy | None) -> str | None:
    return None if proxy is None else msgspec.json.encode(proxy).decode()


def _visible(view: View) -> ColumnElement[bool]:
    if view.everything:
        return true()
    mine = _of_user(view.user_id) if view.user_id is not None else network.c.team_id == view.team_id
    there = false() if view.provider_id is None else datacenter_of(view.provider_id)
    return or_(network.c.team_id.is_(None), mine, there)


def datacenter_of(provider_id: str) -> ColumnElement[bool]:
    """Whether a network is in a datacenter of a provider."""
    return network.c.datacenter_id.in_(select(datacenter.c.id).where(datacenter.c.provider_id == provider_id))


def _of_user(user_id: str) -> ColumnElement[bool]:
    return network.c.team_id.in_(select(team_member.c.team_id).where(team_member.c.user_id == user_id))


def _selected(selection: Selection) -> Sequence[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    if selection.team_id is not None:
        found.append(network.c.team_id == selection.team_id)
    if selection.provider_id is not None:
        found.append(datacenter_of(selection.provider_id))
    if selection.datacenters is not None:
        keys = [name.casefold() for name in selection.datacenters]
        found.append(network.c.datacenter_id.in_(select(datacenter.c.id).where(datacenter.c.name_key.in_(keys))))
    if selection.renter_team is not None:
        found.append(or_(network.c.team_id.is_(None), network.c.team_id == selection.renter_team))
    if selection.renter_user is not None:
        found.append(or_(network.c.team_id.is_(None), _of_user(selection.renter_user)))
    return found
