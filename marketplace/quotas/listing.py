"""Quotas as lists show them: with their holders, their nodes, and what of them is used."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Select, false, func, or_, select, true

from marketplace.http.pagination import newest_first
from marketplace.nodes.tables import gpu, node
from marketplace.placement.capacity import NOTHING, Amount
from marketplace.placement.tables import claim
from marketplace.quotas.tables import quota
from marketplace.store.db import ReadUnit
from marketplace.teams.tables import team
from marketplace.users.tables import users


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Which quotas somebody may see: all, or those of these accounts and those of a provider's nodes."""

    everything: bool = False
    accounts: frozenset[str] = frozenset()
    provider_id: str | None = None

    def operates(self, provider_id: str) -> bool:
        """Whether nodes of this provider are theirs to look after."""
        return self.everything or self.provider_id == provider_id


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of a quota's node."""

    cpu_brand: str
    gpu_brand: str | None
    vram: int | None
    modules: str | None


class _Cpu(msgspec.Struct):
    brand: str = ""


class _Inventory(msgspec.Struct):
    cpu: _Cpu = msgspec.field(default_factory=_Cpu)


_creator = users.alias("creator")
_ROWS = (
    select(
        quota,
        func.coalesce(team.c.name, users.c.name, "").label("holder_name"),
        _creator.c.email.label("created_by_email"),
        node.c.provider_id,
        node.c.hostname,
        node.c.ip_address,
        node.c.instance_type,
    )
    .join(node, node.c.id == quota.c.node_id)
    .join(team, (quota.c.holder_kind == "team") & (team.c.id == quota.c.holder_id), isouter=True)
    .join(users, (quota.c.holder_kind == "user") & (users.c.id == quota.c.holder_id), isouter=True)
    .join(_creator, _creator.c.id == quota.c.created_by, isouter=True)
)


def page(
    unit: ReadUnit,
    view: View,
    *,
    team_id: str | None = None,
    node_id: str | None = None,
    cursor: str | None,
    limit: int,
) -> list[Any]:
    """Return quotas, newest first, one more than `limit` when there are more."""
    wanted = _ROWS.where(_visible(view))
    if team_id is not None:
        wanted = wanted.where(quota.c.holder_kind == "team", quota.c.holder_id == team_id)
    if node_id is not None:
        wanted = wanted.where(quota.c.node_id == node_id)
    return list(unit.select(newest_first(wanted, quota.c.created_at, quota.c.id, cursor, limit)))


def find(unit: ReadUnit, view: View, quota_id: str) -> Any:
    """Return one that may be seen, or None."""
    wanted: Select[*tuple[Any, ...]] = _ROWS.where(_visible(view), quota.c.id == quota_id)
    return unit.select(wanted).one_or_none()


def consumed(unit: ReadUnit, quota_ids: Collection[str]) -> dict[str, Amount]:
    """Return what of quotas is used; one without any use is absent."""
    wanted = (
        select(
            claim.c.quota_id,
            func.sum(claim.c.gpus),
            func.sum(claim.c.threads),
            func.sum(claim.c.dram),
            func.sum(claim.c.disk),
        )
        .where(claim.c.quota_id.in_(sorted(quota_ids)), claim.c.released_at.is_(None))
        .group_by(claim.c.quota_id)
    )
    return {str(row[0]): Amount(*(int(value) for value in row[1:])) for row in unit.select(wanted)}


def machines(unit: ReadUnit, node_ids: Collection[str]) -> dict[str, Machine]:
    """Return what is said of nodes, by id. Their GPUs are alike; the first one stands for all."""
    inventories = select(node.c.id, node.c.inventory).where(node.c.id.in_(sorted(node_ids)))
    gpus: dict[str, Any] = {}
    boards = select(gpu.c.node_id, gpu.c.brand, gpu.c.vram, gpu.c.kernel_modules).where(
        gpu.c.node_id.in_(sorted(node_ids)), gpu.c.present
    )
    for row in unit.select(boards.order_by(gpu.c.number.desc())):
        gpus[row.node_id] = row
    found = {}
    for node_id, text in unit.select(inventories):
        first = gpus.get(node_id)
        known = msgspec.json.decode(text, type=_Inventory) if text else _Inventory()
        found[node_id] = Machine(
            cpu_brand=known.cpu.brand,
            gpu_brand=None if first is None else first.brand,
            vram=None if first is None else first.vram,
            modules=None if first is None else first.kernel_modules,
        )
    return found


def budget(row: Any) -> Amount:
    """What a quota grants."""
    return Amount(row.gpu, row.vcpu, row.dram, row.disk)


def used(known: dict[str, Amount], quota_id: str) -> Amount:
    """What of a quota is used."""
    return known.get(quota_id, NOTHING)


def _visible(view: View) -> ColumnElement[bool]:
    if view.everything:
        return true()
    mine = quota.c.account_id.in_(sorted(view.accounts)) if view.accounts else false()
    return mine if view.provider_id is None else or_(mine, node.c.provider_id == view.provider_id)
