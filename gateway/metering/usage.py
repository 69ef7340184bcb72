"""Reads back what was metered: totals per key and model over a time, and what keys have used of today's allowance."""

from __future__ import annotations

import msgspec
from sqlalchemy import func, select

from marketplace.ledger.rules import day_start
from marketplace.ledger.tables import usage_record
from marketplace.store.db import ReadUnit


class KeyUsage(msgspec.Struct, frozen=True):
    """Sums over one key's and model's usage records, billable or not; cost in nano-units."""

    key_id: str
    model: str
    requests: int
    prompt: int
    cached: int
    completion: int
    cost: int


def totals(unit: ReadUnit, account_id: str, *, since: int = 0, until: int = 2**62) -> list[KeyUsage]:
    """Sums of an account's records with since ≤ at < until (µs UTC), by key and model, in that order."""
    record = usage_record.c
    rows = unit.select(
        select(
            record.key_id,
            record.model,
            func.count(),
            func.sum(record.prompt),
            func.sum(record.cached),
            func.sum(record.completion),
            func.sum(record.cost),
        )
        .where(record.account_id == account_id, record.at >= since, record.at < until)
        .group_by(record.key_id, record.model)
        .order_by(record.key_id, record.model)
    )
    return [KeyUsage(row[0], row[1], *(int(value) for value in row[2:])) for row in rows]


def allowance_used(unit: ReadUnit, now: int) -> dict[str, int]:
    """Prompt tokens that each key had computed and abandoned for free since the UTC day of `now` (µs) began."""
    record = usage_record.c
    rows = unit.select(
        select(record.key_id, func.sum(record.prompt))
        .where(record.at >= day_start(now), record.reason == "prefill_allowance")
        .group_by(record.key_id)
    )
    return {row[0]: int(row[1]) for row in rows}
