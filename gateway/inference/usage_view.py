"""How usage looks on the wire: JSON objects and lines of CSV. Money is exact, in units of the currency."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import orjson

from marketplace.accounts.usage import Grouping, UsageRecord, UsageSum
from marketplace.http import sheets
from marketplace.http.sheets import Plain
from marketplace.http.wire import write_instant
from marketplace.ledger.money import format_nano

COLUMNS = (
    "request_id",
    "created_at",
    "model",
    "key_id",
    "key_name",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "total_tokens",
    "cost",
    "outcome",
    "billable",
)
_SUM_COLUMNS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "total_tokens", "cost")


def money(nano: int) -> orjson.Fragment:
    """Nano-units as a JSON number of units, exact."""
    return orjson.Fragment(format_nano(nano).encode("ascii"))


def record(item: UsageRecord) -> dict[str, Any]:
    """A request."""
    return {
        "id": item.request_id,
        "object": "usage.record",
        "created": item.at // 1_000_000,
        "created_at": write_instant(item.at),
        "model": item.model,
        "key_id": item.key_id,
        "key_name": item.key_name,
        "prompt_tokens": item.prompt,
        "cached_tokens": item.cached,
        "completion_tokens": item.completion,
        "total_tokens": item.prompt + item.completion,
        "cost": money(item.cost),
        "outcome": item.outcome,
        "billable": item.billable,
        "reason": item.reason,
        "first_token_ms": item.ttft_us // 1000,
        "duration_ms": item.duration_us // 1000,
    }


def cells(item: UsageRecord) -> tuple[sheets.Cell, ...]:
    """A request as a line of CSV, in the order of COLUMNS."""
    return (
        Plain(item.request_id),
        Plain(write_instant(item.at)),
        item.model,
        Plain(item.key_id),
        item.key_name,
        item.prompt,
        item.cached,
        item.completion,
        item.prompt + item.completion,
        Plain(format_nano(item.cost)),
        Plain(item.outcome),
        item.billable,
    )


def total(by: Grouping, item: UsageSum) -> dict[str, Any]:
    """A sum."""
    named: dict[str, Any] = {"key_id": item.name, "key_name": item.key_name} if by == "key" else {by: _group(by, item)}
    return {
        "object": "usage.sum",
        **named,
        "requests": item.requests,
        "prompt_tokens": item.prompt,
        "cached_tokens": item.cached,
        "completion_tokens": item.completion,
        "total_tokens": item.prompt + item.completion,
        "cost": money(item.cost),
    }


def _group(by: Grouping, item: UsageSum) -> str:
    """The name of a group: a day is written as its date."""
    return f"{datetime.fromtimestamp(int(item.name) / 1e6, UTC):%Y-%m-%d}" if by == "day" else str(item.name)


def sum_cells(by: Grouping, item: UsageSum) -> tuple[sheets.Cell, ...]:
    """A sum as a line of CSV, in the order of `sum_columns`."""
    named: tuple[sheets.Cell, ...] = (Plain(item.name), item.key_name) if by == "key" else (_group(by, item),)
    amount = Plain(format_nano(item.cost))
    return (*named, item.requests, item.prompt, item.cached, item.completion, item.prompt + item.completion, amount)


def sum_columns(by: Grouping) -> tuple[str, ...]:
    """Names of the columns of sums."""
    return (*(("key_id", "key_name") if by == "key" else (by,)), *_SUM_COLUMNS)
