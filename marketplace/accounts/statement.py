"""An account's transactions as its owner reads them: usage summed per key, model and settlement batch, the rest line
by line.

The ledger writes the lines with the batch and they never change, so a page is a run of neighbours in their table,
newest first, wherever it begins. Lines are ordered by when they happened, not by when they were entered: what a crash
left in a journal is entered at the next start, and takes its place among the older ones. A line lies in the range that
its newest transaction lies in, so ranges that touch share no line and lose none.
"""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Row, Select, select, tuple_

from marketplace.http.pagination import Position
from marketplace.keys.tables import api_key
from marketplace.ledger.tables import statement_line
from marketplace.store.db import ReadUnit

_of = statement_line.c


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


def page(
    unit: ReadUnit, account_id: str, *, since: int | None, until: int | None, position: Position | None, limit: int
) -> tuple[list[Line], Position | None]:
    """Return lines, newest first, with `since` ≤ time < `until` (µs), and where to go on."""
    rows = unit.select(query(account_id, since, until, position, limit)).all()
    shown = rows[:limit]
    more = (shown[-1].at, shown[-1].ordinal) if len(rows) > limit else None
    return [_line(row) for row in shown], more


def query(
    account_id: str, since: int | None, until: int | None, position: Position | None, limit: int
) -> Select[*tuple[Any, ...]]:
    """The query behind `page`, for one line more than it shows. It has one upper bound, where the page begins: of
    several, a database would take any and read from there."""
    wanted = (
        select(
            _of.at,
            _of.ordinal,
            _of.tx_id,
            _of.kind,
            _of.memo,
            _of.amount,
            _of.requests,
            _of.model,
            _of.prompt,
            _of.cached,
            _of.completion,
            _of.begin_at,
            api_key.c.name.label("key_name"),
        )
        .join(api_key, api_key.c.id == _of.key_id, isouter=True)
        .where(_of.account_id == account_id)
        .order_by(_of.at.desc(), _of.ordinal.desc())
        .limit(limit + 1)
    )
    # Ordinals begin at 1: nothing at `until` lies before (until, 0).
    bounds = [bound for bound in (position, None if until is None else (until, 0)) if bound is not None]
    if bounds:
        at, ordinal = min(bounds)
        wanted = wanted.where(tuple_(_of.at, _of.ordinal) < tuple_(at, ordinal))
    return wanted if since is None else wanted.where(_of.at >= since)


def _line(row: Row[*tuple[Any, ...]]) -> Line:
    at, _, tx_id, kind, memo, amount, requests, model, prompt, cached, completion, begin, key_name = row
    usage = Usage(model, key_name or "", prompt, cached, completion, requests, begin, at) if requests else None
    return Line(tx_id, kind, memo, amount, at, usage)
