"""What an account used, request by request or summed: every query is bound to one account.

Pages are by keyset over (time, request), equally fast to the last; the index over (account, time) serves both.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from sqlalchemy import ColumnElement, Select, func, or_, select

from marketplace.http.pagination import Position
from marketplace.keys.tables import api_key
from marketplace.ledger.rules import DAY_US
from marketplace.ledger.tables import account, usage_record
from marketplace.store.db import ReadUnit

Grouping = Literal["model", "key", "day"]
_of = usage_record.c


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it was metered. Cost in nano-units, times in µs UTC."""

    request_id: str
    at: int
    opened_at: int
    model: str
    key_id: str
    key_name: str | None
    prompt: int
    cached: int
    completion: int
    cost: int
    outcome: str
    billable: bool
    reason: str
    ttft_us: int
    duration_us: int


class UsageSum(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that have something in common: `name` is a model, a key's id, or the beginning of a UTC day in µs."""

    name: str | int
    key_name: str | None
    requests: int
    prompt: int
    cached: int
    completion: int
    cost: int


def records(
    unit: ReadUnit, account_id: str, *, since: int, until: int, after: Position | None = None, limit: int
) -> list[UsageRecord]:
    """Return records with since ≤ time < until, newest first, that follow the position `after`."""
    return [UsageRecord(**row._mapping) for row in unit.select(query(account_id, since, until, after, limit))]


def query(account_id: str, since: int, until: int, after: Position | None, limit: int) -> Select[*tuple[Any, ...]]:
    """The query behind `records`. It has one upper bound of the time, where the page begins: of several, SQLite would
    take any and read from there."""
    newest = until - 1 if after is None else min(until - 1, after[0])
    wanted = (
        select(
            _of.request_id,
            _of.at,
            _of.opened_at,
            _of.model,
            _of.key_id,
            api_key.c.name.label("key_name"),
            _of.prompt,
            _of.cached,
            _of.completion,
            _of.cost,
            _of.outcome,
            _of.billable,
            _of.reason,
            _of.ttft_us,
            _of.duration_us,
        )
        .join(api_key, api_key.c.id == _of.key_id, isouter=True)
        .where(_of.account_id == account_id, _of.at >= since, _of.at <= newest)
        .order_by(_of.at.desc(), _of.request_id.desc())
        .limit(limit)
    )
    if after is None:
        return wanted
    # Of the microsecond at which the last page ended, only what follows.
    return wanted.where(or_(_of.at < after[0], _of.request_id < str(after[1])))


def sums(unit: ReadUnit, account_id: str, by: Grouping, *, since: int, until: int) -> list[UsageSum]:
    """Return sums over records with since ≤ time < until: days newest first, models and keys by name."""
    name: ColumnElement[Any] = {"model": _of.model, "key": _of.key_id, "day": _of.at - _of.at % DAY_US}[by]
    grouped = (
        select(
            name.label("name"),
            func.count().label("requests"),
            func.sum(_of.prompt).label("prompt"),
            func.sum(_of.cached).label("cached"),
            func.sum(_of.completion).label("completion"),
            func.sum(_of.cost).label("cost"),
        )
        .where(_of.account_id == account_id, _of.at >= since, _of.at < until)
        .group_by(name)
        .order_by(name.desc() if by == "day" else name)
    )
    rows = unit.select(grouped).all()
    names = _key_names(unit, [row.name for row in rows]) if by == "key" else {}
    return [
        UsageSum(
            name=row.name if isinstance(row.name, str) else int(row.name),
            key_name=names.get(row.name),
            requests=row.requests,
            prompt=int(row.prompt),
            cached=int(row.cached),
            completion=int(row.completion),
            cost=int(row.cost),
        )
        for row in rows
    ]


def _key_names(unit: ReadUnit, key_ids: list[str]) -> dict[str, str]:
    found = unit.select(select(api_key.c.id, api_key.c.name).where(api_key.c.id.in_(key_ids)))
    return {row.id: row.name for row in found}


def charged(unit: ReadUnit, key_id: str, *, since: list[int]) -> list[int]:
    """What a key was charged since each of some times, in nano-units."""
    columns = [func.coalesce(func.sum(_of.cost).filter(_of.at >= begin), 0) for begin in since]
    row = unit.select(select(*columns).where(_of.key_id == key_id, _of.at >= min(since))).one()
    return [int(value) for value in row]


def spent(unit: ReadUnit, account_id: str) -> int:
    """Return what an account paid for use, less refunds; nano-units."""
    return int(unit.select(select(account.c.spent).where(account.c.id == account_id)).scalar_one())
