"""An account's transactions as its owner reads them: usage summed per key, model and settlement batch, the rest line
by line.

The ledger writes the lines with the batch and they never change, so a page is a run of neighbours in their table,
newest first, wherever it begins. Lines are ordered by when they happened, not by when they were entered: what a crash
left in a journal is entered at the next start, and takes its place among the older ones. A line lies in the range that
its newest transaction lies in, so ranges that touch share no line and lose none.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from sqlalchemy import BigInteger, Row, Select, bindparam, select, tuple_

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
    # One upper bound, where the page begins: of several, a database would take any and read from there. Ordinals begin
    # at 1, so nothing at `until` lies before (until, 0).
    bounds = [bound for bound in (position, None if until is None else (until, 0)) if bound is not None]
    at, ordinal = min(bounds, default=(None, None))
    values = {"account_id": account_id, "since": since, "at": at, "ordinal": ordinal, "rows": limit + 1}
    rows = unit.select(query(bounded=bool(bounds), ranged=since is not None), values).all()
    shown = rows[:limit]
    more = (shown[-1].at, shown[-1].ordinal) if len(rows) > limit else None
    return [_line(row) for row in shown], more


@cache
def query(*, bounded: bool, ranged: bool) -> Select[*tuple[Any, ...]]:
    """The query behind `page`: as many lines of `account_id` as `rows`, before (`at`, `ordinal`) if it is bounded, not
    before `since` if it is ranged."""
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
        .where(_of.account_id == bindparam("account_id"))
        .order_by(_of.at.desc(), _of.ordinal.desc())
        .limit(bindparam("rows", type_=BigInteger))
    )
    if bounded:
        edge = tuple_(bindparam("at", type_=BigInteger), bindparam("ordinal", type_=BigInteger))
        wanted = wanted.where(tuple_(_of.at, _of.ordinal) < edge)
    return wanted.where(_of.at >= bindparam("since")) if ranged else wanted


def _line(row: Row[*tuple[Any, ...]]) -> Line:
    at, _, tx_id, kind, memo, amount, requests, model, prompt, cached, completion, begin, key_name = row
    usage = Usage(model, key_name or "", prompt, cached, completion, requests, begin, at) if requests else None
    return Line(tx_id, kind, memo, amount, at, usage)
