"""Quotas as they stand: which are in force, and what of each is used."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import BigInteger, ColumnElement, and_, bindparam, func, or_, select

from marketplace.placement.capacity import Amount, Standing
from marketplace.placement.tables import claim
from marketplace.quotas.tables import quota
from marketplace.store.db import ReadUnit


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
_STANDINGS = (
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
    .where(in_force(), quota.c.node_id.in_(bindparam("nodes", expanding=True)))
    .order_by(quota.c.node_id, quota.c.created_at, quota.c.id)
)
_HELD_NODES = (
    select(quota.c.node_id).where(in_force(), quota.c.account_id.in_(bindparam("accounts", expanding=True))).distinct()
)


def standings(unit: ReadUnit, node_ids: Collection[str], now: int) -> dict[str, list[Standing]]:
    """Return the quotas in force on these nodes with what of them is used, by node; a node without any is absent."""
    found: dict[str, list[Standing]] = {}
    for row in unit.select(_STANDINGS, {"nodes": sorted(node_ids), "now": now}):
        node_id, quota_id, account_id, gpu, vcpu, dram, disk, exclusive, *used = row
        budget, consumed = Amount(gpu, vcpu, dram, disk), Amount(*(int(value) for value in used))
        found.setdefault(node_id, []).append(Standing(quota_id, account_id, budget, consumed, exclusive))
    return found


def held_nodes(unit: ReadUnit, account_ids: Collection[str], now: int) -> frozenset[str]:
    """Return the nodes on which any of these accounts holds a quota in force: they rent there and nowhere else."""
    return frozenset(unit.select(_HELD_NODES, {"accounts": sorted(account_ids), "now": now}).scalars())


def covered_until(unit: ReadUnit, quota_id: str) -> int | None:
    """Return when a quota ends, None for never: from then on what it covered costs."""
    found: int | None = unit.select(select(quota.c.valid_till).where(quota.c.id == quota_id)).scalar_one()
    return found
