"""An account's transactions as its owner reads them: usage summed per key, model and settlement batch, the rest line
by line.

Entries of an account are numbered without a gap, and those of one batch are neighbours, because a batch holds the
account's lock. So a page walks down the numbers, and a batch is summed from a run of neighbours. A cursor names the
number at which the last batch begins to be read and how many of its lines were already given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import msgspec
from sqlalchemy import Row, Select, func, select

from marketplace.http.pagination import Position
from marketplace.keys.tables import api_key
from marketplace.ledger.tables import account, entry, ledger_tx, usage_record
from marketplace.store.db import ReadUnit

_CHUNK = 512
"""Most entries read at a time; the first time as many as a page has lines, then twice as many each time."""
LATE = 4096
"""Entries may be numbered later than they happened: what a crash left in a journal is entered at the next start. So the
end of a range is only believed when this many of the account's entries beyond it lie outside of it, too."""


class Usage(msgspec.Struct, frozen=True):
    """What one key used of one model in one batch."""

    model: str
    key_name: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    requests: int
    begin: int
    end: int


class Line(msgspec.Struct, frozen=True):
    """One line: its newest transaction, what kind it is, the signed amount in nano-units, and when."""

    tx_id: str
    kind: str
    memo: str
    amount: int
    at: int
    usage: Usage | None


@dataclass(slots=True)
class _Sum:
    tx_id: str
    kind: str
    memo: str
    at: int
    amount: int = 0
    usage: Usage | None = None


def page(
    unit: ReadUnit, account_id: str, *, since: int | None, until: int | None, position: Position | None, limit: int
) -> tuple[list[Line], Position | None]:
    """Return lines, newest first, of transactions with `since` ≤ time < `until` (µs), and where to go on.

    What lies outside of the range is passed over without being read, however much there is.
    """
    before, skip = (None, 0) if position is None else (position[0], int(position[1]))
    if before is None and until is not None:
        before = _end(unit, account_id, until)
    lines: list[Line] = []
    positions: list[Position] = []
    for top, batch in _batches(unit, account_id, before, limit + 1):
        fitting = [row for row in batch if (since is None or row.at >= since) and (until is None or row.at < until)]
        for given, line in enumerate(_sums(fitting), start=1):
            if given > skip:
                lines.append(line)
                positions.append((top + 1, given))
        if len(lines) > limit:
            return lines[:limit], positions[limit - 1]
        oldest = batch[-1].ordinal
        if since is not None and not fitting and not _any_since(unit, account_id, oldest, since):
            break
        skip = 0
    return lines, None


def _end(unit: ReadUnit, account_id: str, until: int) -> int | None:
    """The number of an entry from which on everything happened at `until` or later; None when there is none.

    Found by halving, because numbers and times rise together, but for what was entered late.
    """
    top = unit.select(select(account.c.entries).where(account.c.id == account_id)).scalar_one()
    low, high = 0, top
    while low < high:
        middle = high if high == top else (low + high + 1) // 2
        at = unit.select(_times(account_id).where(entry.c.ordinal == middle)).one().at
        low, high = (middle, high) if at < until else (low, middle - 1)
    near = _times(account_id).where(entry.c.ordinal > low, entry.c.ordinal <= low + LATE).subquery()
    late = unit.select(select(func.max(near.c.ordinal)).where(near.c.at < until)).scalar()
    end = max(low, late or 0)
    return None if end == top else end + 1


def _any_since(unit: ReadUnit, account_id: str, before: int, since: int) -> bool:
    """Whether anything among the entries just below a number happened at `since` or later."""
    near = _times(account_id).where(entry.c.ordinal < before, entry.c.ordinal >= before - LATE).subquery()
    return bool(unit.select(select(func.count()).where(near.c.at >= since)).scalar_one())


def _times(account_id: str) -> Select[tuple[int, int]]:
    """Numbers and times of an account's entries."""
    return (
        select(entry.c.ordinal, ledger_tx.c.occurred_at.label("at"))
        .join(ledger_tx, ledger_tx.c.id == entry.c.tx_id)
        .where(entry.c.account_id == account_id)
    )


def _batches(
    unit: ReadUnit, account_id: str, before: int | None, first: int
) -> Iterator[tuple[int, list[Row[*tuple[object, ...]]]]]:
    """Runs of neighbouring entries that one batch posted, newest first, each with the number of its newest entry."""
    for _, run in groupby(_entries(unit, account_id, before, first), key=lambda row: (row.node, row.batch)):
        rows = list(run)
        yield rows[0].ordinal, rows


def _entries(unit: ReadUnit, account_id: str, before: int | None, size: int) -> Iterator[Row[*tuple[object, ...]]]:
    wanted = (
        select(
            entry.c.ordinal,
            entry.c.amount,
            ledger_tx.c.id,
            ledger_tx.c.kind,
            ledger_tx.c.memo,
            ledger_tx.c.occurred_at.label("at"),
            ledger_tx.c.node,
            ledger_tx.c.batch,
            usage_record.c.key_id,
            usage_record.c.model,
            usage_record.c.prompt,
            usage_record.c.cached,
            usage_record.c.completion,
            usage_record.c.opened_at,
            api_key.c.name.label("key_name"),
        )
        .join(ledger_tx, ledger_tx.c.id == entry.c.tx_id)
        .join(usage_record, usage_record.c.request_id == ledger_tx.c.id, isouter=True)
        .join(api_key, api_key.c.id == usage_record.c.key_id, isouter=True)
        .where(entry.c.account_id == account_id)
        .order_by(entry.c.ordinal.desc())
    )
    while True:
        size = min(size, _CHUNK)
        chunk = wanted if before is None else wanted.where(entry.c.ordinal < before)
        rows = unit.select(chunk.limit(size)).all()
        yield from rows
        if len(rows) < size:
            return
        before = rows[-1].ordinal
        size *= 2


def _sums(rows: list[Row[*tuple[object, ...]]]) -> list[Line]:
    """The lines of one batch, newest first."""
    sums: dict[tuple[object, ...], _Sum] = {}
    for row in rows:
        metered = row.kind == "usage" and row.model is not None
        name = (row.key_id, row.model) if metered else (row.id,)
        line = sums.setdefault(name, _Sum(row.id, row.kind, row.memo, row.at))
        line.amount += row.amount
        line.at = max(line.at, row.at)
        if metered:
            line.usage = _add(line.usage, row)
    return [Line(item.tx_id, item.kind, item.memo, item.amount, item.at, item.usage) for item in sums.values()]


def _add(usage: Usage | None, row: Row[*tuple[object, ...]]) -> Usage:
    one = Usage(row.model, row.key_name or "", row.prompt, row.cached, row.completion, 1, row.opened_at, row.at)
    if usage is None:
        return one
    return Usage(
        usage.model,
        usage.key_name,
        usage.prompt_tokens + one.prompt_tokens,
        usage.cached_tokens + one.cached_tokens,
        usage.completion_tokens + one.completion_tokens,
        usage.requests + 1,
        min(usage.begin, one.begin),
        max(usage.end, one.end),
    )
