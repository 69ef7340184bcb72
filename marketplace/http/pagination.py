"""Pages by keyset: newest first, each page begins behind the last row of the one before, equally fast to the last."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, tuple_

from marketplace.http.errors import Code, Refusal

DEFAULT_LIMIT = 100
Position = tuple[int, int | str]
"""Where a page ended: a number, and what breaks its ties."""
_MAX_INTEGER = 2**63 - 1


def write_cursor(position: Position) -> str:
    """Make the opaque text that continues behind a position."""
    return base64.urlsafe_b64encode(json.dumps(position).encode()).decode().rstrip("=")


def read_cursor(text: str | None, tie: type[int] | type[str]) -> Position | None:
    """Read a cursor; None begins at the newest. Refusal: ValidationFailed. It only says where to go on: what may be
    seen there is decided by the query that it continues."""
    if text is None:
        return None
    try:
        at, rest = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (binascii.Error, ValueError, TypeError, RecursionError):
        at = rest = None
    if type(at) is not int or type(rest) is not tie or abs(at) > _MAX_INTEGER or "\0" in str(rest):
        raise Refusal(Code.VALIDATION_FAILED, "cursor: it is not one that an earlier page gave", param="cursor")
    if isinstance(rest, int) and abs(rest) > _MAX_INTEGER:
        raise Refusal(Code.VALIDATION_FAILED, "cursor: it is not one that an earlier page gave", param="cursor")
    return at, rest


def newest_first(
    wanted: Select[*tuple[Any, ...]], at: ColumnElement[int], tie: ColumnElement[str], text: str | None, limit: int
) -> Select[*tuple[Any, ...]]:
    """Order a query by (at, tie) descending, behind the cursor, with one row more than the page to see whether it
    ends."""
    position = read_cursor(text, str)
    if position is not None:
        wanted = wanted.where(tuple_(at, tie) < tuple_(*position))
    return wanted.order_by(at.desc(), tie.desc()).limit(limit + 1)


def next_cursor(positions: Sequence[Position], limit: int) -> str | None:
    """The cursor behind a page of `limit`, given the positions of one row more; None at the end."""
    return write_cursor(positions[limit - 1]) if len(positions) > limit else None
