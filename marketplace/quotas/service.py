"""Quotas as they stand: which are in force, and what of each is used."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Select, and_, bindparam, func, or_, select

from marketplace.placement.capacity import Amount, Standing
from marketplace.placement.tables import claim
from marketplace.quotas.tables import quota
from marketplace.store.db import ReadUnit

FOREVER = 2**62
"""The end of what has none, µs since 1970."""


def in_force() -> ColumnElement[bool]:
    """Whether a quota is neither revoked, nor over, nor still to come at the parameter `now`."""
    now = bindparam("now", type_=BigInteger)
    return and_(quota.c.active, quota.c.valid_from <= now, or_(quota.c.valid_till.is_(None), quota.c.valid_till > now))


_CONSUMED = (
    select(
        claim.c.quota_id,
        func.sum(claim.c.gpus).label("gpu"),
        func.sum(claim.c.threads).label("threads"),
        func.sum(claim.c.dram).label("dram"),
        func.sum(claim.c.disk).label("disk"),
    )
    .where(claim.c.released_at.is_(None), claim.c.quota_id.is_not(None))
    .group_by(claim.c.quota_id)
    .subquery()
)
_ALL = (
    select(
        quota.c.node_id,
        quota.c.id,
        quota.c.account_id,
        quota.c.gpu,
        quota.c.vcpu,
        quota.c.dram,
        quota.c.disk,
        quota.c.exclusive,
        func.coalesce(_CONSUMED.c.gpu, 0),
        func.coalesce(_CONSUMED.c.threads, 0),
        func.coalesce(_CONSUMED.c.dram, 0),
        func.coalesce(_CONSUMED.c.disk, 0),
    )
    .join(_CONSUMED, _CONSUMED.c.quota_id == quota.c.id, isouter=True)
    .order_by(quota.c.node_id, quota.c.created_at, quota.c.id)
)
_STANDINGS = _ALL.where(in_force(), quota.c.node_id.in_(bindparam("nodes", expanding=True)))
_OVERLAPPING = _ALL.where(
    quota.c.active,
    quota.c.node_id == bindparam("node"),
    quota.c.valid_from < bindparam("till", type_=BigInteger),
    func.coalesce(quota.c.valid_till, FOREVER) > bindparam("begin", type_=BigInteger),
)
_HELD_NODES = (
    select(quota.c.node_id).where(in_force(), quota.c.account_id.in_(bindparam("accounts", expanding=True))).distinct()
)


def standings(unit: ReadUnit, node_ids: Collection[str], now: int) -> dict[str, list[Standing]]:
    """Return the quotas in force on these nodes with what of them is used, by node; a node without any is absent."""
    return _read(unit, _STANDINGS, {"nodes": sorted(node_ids), "now": now})


def overlapping(unit: ReadUnit, node_id: str, begin: int, till: int | None) -> list[Standing]:
    """Return the quotas of a node that are not revoked and in force at some time between two others."""
    times = {"node": node_id, "begin": begin, "till": FOREVER if till is None else till}
    return _read(unit, _OVERLAPPING, times).get(node_id, [])


def _read(unit: ReadUnit, wanted: Select[*tuple[Any, ...]], values: dict[str, Any]) -> dict[str, list[Standing]]:
    found: dict[str, list[Standing]] = {}
    for row in unit.select(wanted, values):
        node_id, quota_id, account_id, gpu, vcpu, dram, disk, exclusive, *used = row
        budget, consumed = Amount(gpu, vcpu, dram, disk), Amount(*(int(value) for value in used))
        found.setdefault(node_id, []).append(Standing(quota_id, account_id, budget, consumed, exclusive))
    return found


def held_nodes(unit: ReadUnit, account_ids: Collection[str], now: int) -> frozenset[str]:
    """Return the nodes on which any of these accounts holds a quota in force: they rent there and nowhere else."""
    return frozenset(unit.select(_HELD_NODES, {"accounts": sorted(account_ids), "now": now}).scalars())


def covered_until(unit: ReadUnit, quota_id: str) -> int:
    """Return when a quota ends, FOREVER where nothing ends it: from then on what it covered costs."""
    wanted = select(quota.c.valid_till, quota.c.revoked_at).where(quota.c.id == quota_id)
    till, revoked_at = unit.select(wanted).one()
    return min(FOREVER if till is None else till, FOREVER if revoked_at is None else revoked_at)
