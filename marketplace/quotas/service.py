"""Quotas as they stand: which are in force, and what of each is used."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
from sqlalchemy import BigInteger, ColumnElement, and_, bindparam, func, or_, select

from marketplace.placement.capacity import Amount, Standing
from marketplace.placement.tables import claim
from marketplace.quotas.tables import quota
from marketplace.store.db import ReadUnit
from marketplace.store.gather import Part, gather
from marketplace.store.prepared import Prepared

FOREVER = 2**62
"""The end of what has none, µs since 1970."""


def in_force() -> ColumnElement[bool]:
    """Whether a quota is neither revoked, nor over, nor still to come at the parameter `now`."""
    now = bindparam("now", type_=BigInteger)
    return and_(quota.c.active, quota.c.valid_from <= now, or_(quota.c.valid_till.is_(None), quota.c.valid_till > now))


_QUOTAS = select(
    quota.c.node_id,
    quota.c.id,
    quota.c.account_id,
    quota.c.gpu,
    quota.c.vcpu,
    quota.c.dram,
    quota.c.disk,
    quota.c.exclusive,
    quota.c.valid_from,
    quota.c.valid_till,
).order_by(quota.c.node_id, quota.c.created_at, quota.c.id)
_NOT_OVER = and_(
    quota.c.active, or_(quota.c.valid_till.is_(None), quota.c.valid_till > bindparam("now", type_=BigInteger))
)
OF_NODES = Part(_QUOTAS.where(_NOT_OVER), quota.c.node_id)
"""Rows of the quotas of nodes that are not over at the parameter `now`, as `timetables` takes them."""
_OVERLAPPING = Prepared(
    _QUOTAS.where(
        quota.c.active,
        quota.c.node_id == bindparam("node"),
        quota.c.valid_from < bindparam("till", type_=BigInteger),
        func.coalesce(quota.c.valid_till, FOREVER) > bindparam("begin", type_=BigInteger),
    )
)
_CONSUMED = (
    select(
        claim.c.quota_id,
        func.sum(claim.c.gpus),
        func.sum(claim.c.threads),
        func.sum(claim.c.dram),
        func.sum(claim.c.disk),
    )
    .where(claim.c.released_at.is_(None), claim.c.quota_id.in_(bindparam("quotas", expanding=True)))
    .group_by(claim.c.quota_id)
)
_HELD_NODES = (
    select(quota.c.node_id).where(in_force(), quota.c.account_id.in_(bindparam("accounts", expanding=True))).distinct()
)


class Timetable(msgspec.Struct, frozen=True):
    """The quotas of a node that are in force, with what of them is used, and until when that are these."""

    standings: tuple[Standing, ...] = ()
    until: int = FOREVER


def timetables(unit: ReadUnit, rows: Collection[Any], now: int) -> dict[str, Timetable]:
    """Return the quotas in force among those of OF_NODES, by node; a node without any, now or later, is absent."""
    found: dict[str, Timetable] = {}
    for node_id, begin, till, standing in _standings(unit, rows):
        known = found.get(node_id, Timetable())
        held = known.standings if begin > now else (*known.standings, standing)
        turn = begin if begin > now else FOREVER if till is None else till
        found[node_id] = Timetable(held, min(known.until, turn))
    return found


def standings(unit: ReadUnit, node_ids: Collection[str], now: int) -> dict[str, list[Standing]]:
    """Return the quotas in force on these nodes with what of them is used, by node; a node without any is absent."""
    (rows,) = gather(unit, (OF_NODES,), node_ids, now=now)
    tables = timetables(unit, rows, now)
    return {node_id: list(table.standings) for node_id, table in tables.items() if table.standings}


def overlapping(unit: ReadUnit, node_id: str, begin: int, till: int | None) -> list[Standing]:
    """Return the quotas of a node that are not revoked and in force at some time between two others."""
    times = {"node": node_id, "begin": begin, "till": FOREVER if till is None else till}
    return [standing for _, _, _, standing in _standings(unit, unit.rows(_OVERLAPPING, times))]


def _standings(unit: ReadUnit, rows: Collection[Any]) -> list[tuple[str, int, int | None, Standing]]:
    """Node, begin and end of quotas, and how they stand."""
    if not rows:
        return []
    used = {
        quota_id: Amount(*map(int, amounts))
        for quota_id, *amounts in unit.select(_CONSUMED, {"quotas": [row[1] for row in rows]})
    }
    return [
        (
            node_id,
            begin,
            till,
            Standing(quota_id, account_id, Amount(gpu, vcpu, dram, disk), used.get(quota_id, Amount()), exclusive),
        )
        for node_id, quota_id, account_id, gpu, vcpu, dram, disk, exclusive, begin, till in rows
    ]


def held_nodes(unit: ReadUnit, account_ids: Collection[str], now: int) -> frozenset[str]:
    """Return the nodes on which any of these accounts holds a quota in force: they rent there and nowhere else."""
    return frozenset(unit.select(_HELD_NODES, {"accounts": sorted(account_ids), "now": now}).scalars())


def covered_until(unit: ReadUnit, quota_id: str) -> int:
    """Return when a quota ends, FOREVER where nothing ends it: from then on what it covered costs."""
    wanted = select(quota.c.valid_till, quota.c.revoked_at).where(quota.c.id == quota_id)
    till, revoked_at = unit.select(wanted).one()
    return min(FOREVER if till is None else till, FOREVER if revoked_at is None else revoked_at)
