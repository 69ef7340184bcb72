"""`GET /v1/usage`, `/v1/key` and `/v1/credits`: what a key's account used, what the key may do, what there is to spend.

Field names are those that clients of such services know: `label`, `limit`, `limit_remaining`, `limit_reset`, `usage`,
`total_credits`, `total_usage`. Money is a JSON number in units of the currency, exact. Everything is read for the
account of the key that asks, in threads of its own; the ledger is a fraction of a second behind what runs now.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

import orjson

from gateway.admission.keymap import KeyState
from gateway.admission.limits import RequestRate
from gateway.admission.spendings import Spendings, SpendingUnreadError
from gateway.inference import errors, usage_view
from gateway.inference.http import Exchange
from gateway.inference.usage_query import Asked, read_query
from gateway.inference.usage_view import money
from marketplace.accounts import service as accounts
from marketplace.accounts import usage
from marketplace.accounts.usage import UsageRecord, UsageSum
from marketplace.http import sheets
from marketplace.http.pagination import Position, write_cursor
from marketplace.http.wire import write_instant
from marketplace.keys.budgets import NEVER, window
from marketplace.settings import service as settings
from marketplace.store.db import Database, ReadUnit

_T = TypeVar("_T")

CSV_PAGE = 1000
"""Records that an export holds in memory at a time."""
PER_MINUTE = 120
"""Reports that one account may ask for."""
_RESETS = {"day": "daily", "week": "weekly", "month": "monthly"}


class Reports:
    """Answers of the three endpoints. One per gateway, on its event loop."""

    def __init__(
        self,
        database: Database,
        spendings: Spendings,
        threads: Executor,
        clock: Callable[[], int],
        monotonic: Callable[[], int],
    ) -> None:
        """`clock` gives µs UTC, `monotonic` µs that never jump."""
        self._database = database
        self._spendings = spendings
        self._threads = threads
        self._clock = clock
        self._monotonic = monotonic
        self._rates: dict[str, RequestRate] = {}

    async def usage(self, exchange: Exchange, key: KeyState) -> None:
        """Answer `GET /v1/usage`. Raises ApiError."""
        self._count(key)
        asked = read_query(exchange, self._clock())
        if asked.sheet:
            await self._send_sheet(exchange, key, asked)
        elif asked.by is not None:
            found = await self._read(lambda unit: self._sums(unit, key, asked))
            data = [usage_view.total(asked.by, item) for item in found]
            await exchange.json(200, orjson.dumps({"object": "list", "group_by": asked.by, "data": data}))
        else:
            page = await self._read(lambda unit: self._page(unit, key, asked, asked.after, asked.limit + 1))
            more = len(page) > asked.limit
            page = page[: asked.limit]
            cursor = write_cursor((page[-1].at, page[-1].request_id)) if more else None
            body = {
                "object": "list",
                "data": [usage_view.record(item) for item in page],
                "has_more": more,
                "next_cursor": cursor,
            }
            await exchange.json(200, orjson.dumps(body))

    async def key(self, exchange: Exchange, key: KeyState) -> None:
        """Answer `GET /v1/key`. Raises ApiError."""
        self._count(key)
        budget = key.budget
        if budget is not None and not budget.spending.known:
            try:
                await self._spendings.read(budget.spending)
            except SpendingUnreadError as error:
                raise errors.unavailable("The service cannot read what was spent at the moment.", 1.0) from error
        now = self._clock()
        begins = [0, *(window(period, now)[0] for period in ("day", "week", "month"))]
        ever, day, week, month = await self._read(lambda unit: usage.charged(unit, key.key_id, since=begins))
        limit = remaining = renewed = None
        if budget is not None:
            limit, remaining = money(budget.limit), money(max(0, budget.spending.left(now, budget.limit)))
            renewed = None if budget.spending.until == NEVER else write_instant(budget.spending.until)
        data = {
            "label": key.prefix,
            "name": key.name,
            "kind": key.kind,
            "limit": limit,
            "limit_remaining": remaining,
            "limit_reset": None if budget is None else _RESETS.get(budget.spending.period),
            "limit_resets_at": renewed,
            "limit_spent": None if budget is None else money(budget.spending.spent),
            "limit_held": None if budget is None else money(budget.spending.held),
            "usage": money(ever),
            "usage_daily": money(day),
            "usage_weekly": money(week),
            "usage_monthly": money(month),
            "expires_at": None if key.expires_at is None else write_instant(key.expires_at),
            "allowed_models": _models(key),
            "allowed_addresses": None if key.allowed_networks is None else [str(item) for item in key.allowed_networks],
            "rate_limit": self._rate_limit(key),
        }
        await exchange.json(200, orjson.dumps({"data": data}))

    async def credits(self, exchange: Exchange, key: KeyState) -> None:
        """Answer `GET /v1/credits`. Raises ApiError."""
        self._count(key)

        def read(unit: ReadUnit) -> dict[str, Any]:
            state = accounts.get(unit, key.account_id)
            used = usage.spent(unit, key.account_id)
            return {
                "total_credits": money(state.posted + used),
                "total_usage": money(used),
                "balance": money(state.posted),
                "held": money(state.held),
                "available": None if state.unlimited else money(state.available),
                "credit_limit": money(state.credit_limit),
                "unlimited": state.unlimited,
                "currency": settings.current(unit).server_currency,
            }

        await exchange.json(200, orjson.dumps({"data": await self._read(read)}))

    # -- reading ------------------------------------------------------------------------------------

    def _page(
        self, unit: ReadUnit, key: KeyState, asked: Asked, after: Position | None, limit: int
    ) -> list[UsageRecord]:
        return usage.records(unit, key.account_id, since=asked.since, until=asked.until, after=after, limit=limit)

    def _sums(self, unit: ReadUnit, key: KeyState, asked: Asked) -> list[UsageSum]:
        assert asked.by is not None, "sums are grouped"
        return usage.sums(unit, key.account_id, asked.by, since=asked.since, until=asked.until)

    async def _read(self, work: Callable[[ReadUnit], _T]) -> _T:
        def run() -> _T:
            with self._database.read() as unit:
                return work(unit)

        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    def _count(self, key: KeyState) -> None:
        """A report costs the database far more than a request for inference: each account has a rate of its own."""
        rate = self._rates.get(key.account_id)
        if rate is None:
            if len(self._rates) >= 10_000:
                self._rates.clear()  # only a brake
            rate = self._rates[key.account_id] = RequestRate(PER_MINUTE)
        if wait := rate.take(self._monotonic()):
            raise errors.rate_limited(
                f"Rate limit reached: an account may ask for {PER_MINUTE} reports per minute.", wait / 1e6
            )

    def _rate_limit(self, key: KeyState) -> dict[str, Any]:
        """Limits of the key's rates, and what is left of them; null where there is none."""
        now = self._monotonic()
        requests = key.limits.allowance(now)
        tokens = None if key.limits.tokens is None else key.limits.tokens.allowance(now)
        return {
            "requests_per_minute": None if requests is None else requests.limit,
            "requests_remaining": None if requests is None else requests.remaining,
            "tokens_per_minute": None if tokens is None else tokens.limit,
            "tokens_remaining": None if tokens is None else tokens.remaining,
            "max_concurrency": key.limits.max_concurrency,
        }

    # -- CSV ----------------------------------------------------------------------------------------

    async def _send_sheet(self, exchange: Exchange, key: KeyState, asked: Asked) -> None:
        """Send lines as they are read: however many there are, one page of them is in memory."""
        parts = self._sums_sheet(key, asked) if asked.by is not None else self._records_sheet(key, asked)
        first = await anext(parts)
        shape = (
            (b"content-type", sheets.MEDIA_TYPE.encode("ascii")),
            (b"content-disposition", b'attachment; filename="usage.csv"'),
            (b"cache-control", b"no-store"),
        )
        turn = exchange.turn
        exchange.begin(200, shape)
        turn.write(first)
        async for part in parts:
            await turn.drained()
            if turn.gone:
                return
            turn.write(part)
        turn.end()

    async def _records_sheet(self, key: KeyState, asked: Asked) -> AsyncIterator[bytes]:
        head, after = sheets.line(usage_view.COLUMNS), asked.after
        while True:
            page = await self._read(lambda unit: self._page(unit, key, asked, after, CSV_PAGE))  # noqa: B023 - awaited
            yield (head + "".join(sheets.line(usage_view.cells(item)) for item in page)).encode()
            if len(page) < CSV_PAGE:
                return
            head, after = "", (page[-1].at, page[-1].request_id)

    async def _sums_sheet(self, key: KeyState, asked: Asked) -> AsyncIterator[bytes]:
        by = asked.by
        assert by is not None, "sums are grouped"
        found = await self._read(lambda unit: self._sums(unit, key, asked))
        lines = [usage_view.sum_columns(by), *(usage_view.sum_cells(by, item) for item in found)]
        yield "".join(sheets.line(cells) for cells in lines).encode()


def _models(key: KeyState) -> list[str] | None:
    if key.allowed_models is None:
        return None
    return sorted([*key.allowed_models, *(f"{prefix}*" for prefix in key.model_prefixes)])
