"""What a request for usage asks: the parameters of its URL, checked."""

from __future__ import annotations

from typing import cast, get_args
from urllib.parse import parse_qsl

import msgspec

from gateway.inference import errors
from gateway.inference.errors import ApiError
from gateway.inference.http import Exchange
from marketplace.accounts.usage import Grouping
from marketplace.http.errors import Refusal
from marketplace.http.pagination import DEFAULT_LIMIT, Position, read_cursor
from marketplace.http.wire import read_instant

WINDOW_US = 30 * 86_400_000_000
"""What is shown when it is not said since when."""
MAX_LIMIT = 1000


class Asked(msgspec.Struct, frozen=True):
    """What a request for usage wants."""

    since: int
    until: int
    by: Grouping | None
    limit: int
    after: Position | None
    sheet: bool


def read_query(exchange: Exchange, now: int) -> Asked:
    """Read what is asked for. Raises ApiError (400), naming the parameter."""
    text = exchange.scope.get("query_string", b"").decode("latin-1")
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text), errors="strict", max_num_fields=20)
    except ValueError as error:
        raise errors.invalid(None, "The query string cannot be read.") from error
    sent = dict(pairs)
    unknown = sorted(sent.keys() - {"from", "to", "group_by", "limit", "cursor", "format"})
    if unknown:
        raise ApiError(400, f"Unknown parameter: '{unknown[0][:80]}'.", code="unknown_parameter", param=unknown[0][:80])
    until = _time(sent, "to", now + 1)
    since = _time(sent, "from", until - WINDOW_US)
    if since > until:
        raise errors.invalid("from", "'from' lies behind 'to'.")
    form = sent.get("format")
    if form not in (None, "json", "csv"):
        raise errors.invalid("format", "'format' is json or csv.")
    sheet = form == "csv" if form is not None else exchange.header(b"accept").startswith("text/csv")
    return Asked(since, until, _grouping(sent.get("group_by")), _limit(sent.get("limit")), _cursor(sent), sheet)


def _grouping(text: str | None) -> Grouping | None:
    if text is None:
        return None
    for grouping in get_args(Grouping):
        if grouping == text:
            return cast(Grouping, grouping)
    raise errors.invalid("group_by", "'group_by' is model, key or day.")


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= MAX_LIMIT):
        raise errors.invalid("limit", f"'limit' is a number from 1 to {MAX_LIMIT}.")
    return int(text)


def _cursor(sent: dict[str, str]) -> Position | None:
    try:
        return read_cursor(sent.get("cursor"), str)
    except Refusal as error:
        raise errors.invalid("cursor", "'cursor' is not one that an earlier page gave.") from error


def _time(sent: dict[str, str], name: str, otherwise: int) -> int:
    """A time in RFC 3339, a date (midnight UTC), or seconds since 1970, as µs."""
    text = sent.get(name)
    if text is None:
        return otherwise
    if text.isascii() and text.isdigit() and len(text) <= 11:
        return int(text) * 1_000_000
    try:
        return read_instant(f"{text}T00:00:00Z" if len(text) == 10 else text)
    except ValueError as error:
        raise errors.invalid(
            name, f"'{name}' is a date, a time like 2026-11-21T01:00:00Z, or seconds since 1970."
        ) from error
