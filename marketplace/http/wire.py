"""What every request and response model is made of: strict models, money in cents, instants, pages, ids."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Annotated, Any

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
)

from marketplace.ledger.money import MAX_AMOUNT

CENT = 10_000_000
"""nano-units in a cent"""
_DECIMALS = 7
_INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY_US = 86_400_000_000


class Wire(BaseModel):
    """A model of the wire: nothing is converted, unknown fields are refused, and nothing changes after it was read."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, validate_default=False)


class Nothing(Wire):
    """No fields."""


def cents_to_nano(value: object) -> int:
    """Read a JSON number of cents, exactly. ValueError unless it has at most 7 decimals and is within the range."""
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise ValueError("an amount is a JSON number of cents")
    amount = Decimal(value)
    if not amount:
        return 0
    # Bounds first: the exponent of a number like 1e999999999 must never be written out.
    if not -_DECIMALS - 20 <= amount.adjusted() <= 20:
        raise ValueError("an amount is outside its range")
    sign, digits, exponent = amount.as_tuple()
    assert isinstance(exponent, int), "JSON has no NaN"
    shift = exponent + _DECIMALS
    number = int("".join(map(str, digits)))
    if shift < 0:
        number, rest = divmod(number, 10**-shift)
        if rest:
            raise ValueError(f"an amount in cents has at most {_DECIMALS} decimals")
    else:
        number *= int(10**shift)
    if number > MAX_AMOUNT:
        raise ValueError("an amount is outside its range")
    return -number if sign else number


def nano_to_cents(nano: int) -> int | orjson.Fragment:
    """Write nano-units as cents: an integer where it is one, else a JSON number with at most 7 decimals, exact."""
    whole, part = divmod(abs(nano), CENT)
    if part == 0:
        return -whole if nano < 0 else whole
    text = f"{'-' if nano < 0 else ''}{whole}.{part:07d}".rstrip("0")
    return orjson.Fragment(text.encode("ascii"))


def read_instant(value: object) -> int:
    """Read an RFC 3339 time with its offset, as µs since 1970. ValueError."""
    if not isinstance(value, str) or not _INSTANT.fullmatch(value):
        raise ValueError("a time is written like 2026-11-21T01:00:00Z")
    moment = datetime.fromisoformat(value)
    try:
        return (moment - _EPOCH) // timedelta(microseconds=1)
    except OverflowError as error:
        raise ValueError("a time is outside its range") from error


def write_instant(at: int) -> str:
    """Write µs since 1970 as RFC 3339 in UTC, without a fraction where there is none."""
    days, rest = divmod(at, _DAY_US)
    seconds, part = divmod(rest, 1_000_000)
    minutes, second = divmod(seconds, 60)
    fraction = f".{part:06d}" if part else ""
    return f"{_date(days)}T{minutes // 60:02d}:{minutes % 60:02d}:{second:02d}{fraction}Z"


@lru_cache(4096)
def _date(days: int) -> str:
    """A day since 1970. A page has few of them, and many times."""
    return (_EPOCH + timedelta(days=days)).date().isoformat()


Cents = Annotated[
    int,
    PlainValidator(lambda value: value),
    PlainSerializer(nano_to_cents, return_type=Any),
    WithJsonSchema({"type": "number", "description": "cents of the server currency, exact, at most 7 decimals"}),
]
"""Money in an answer: nano-units inside, cents on the wire."""
CentsIn = Annotated[
    int,
    BeforeValidator(cents_to_nano),
    WithJsonSchema(
        {
            "type": "number",
            "minimum": -MAX_AMOUNT // CENT,
            "maximum": MAX_AMOUNT // CENT,
            "description": "cents of the server currency, at most 7 decimals",
        }
    ),
]
"""Money in a request: cents on the wire, nano-units inside."""
Instant = Annotated[
    int,
    PlainValidator(lambda value: value),
    PlainSerializer(write_instant),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
"""A time in an answer: µs inside, RFC 3339 on the wire."""
InstantIn = Annotated[int, BeforeValidator(read_instant), WithJsonSchema({"type": "string", "format": "date-time"})]
"""A time in a request."""
Id = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[0-9A-Za-z_-]+$")]
Limit = Annotated[int, Field(ge=1, le=1000, description="most items of a page")]
CursorText = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Json = dict[str, Any]
