"""The two forms of a message, mirrored: `{"version": …, "data": …}` or a bare body with the version in a header.

An object with exactly the members `version` and `data`, or `data` alone, is an envelope; everything else is bare. The
answer has the form of its request.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NoReturn

import orjson

from marketplace.http.errors import Code, Refusal

VERSION_HEADER = "X-Protocol-Version"
_MEMBERS = ({"version", "data"}, {"data"})
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Parcel:
    """What a request body says, before anybody looked at its fields."""

    data: Any
    enveloped: bool
    version: str | None
    """the version asked for, by the envelope or by the header"""
    trouble: Refusal | None = None
    """why the body cannot be used; raised once the caller is known"""


def unpack(body: bytes, header: str | None) -> Parcel:
    """Read a body; an empty one is an empty object. Numbers with a point become Decimal: money loses nothing."""
    try:
        data = json.loads(body, parse_float=Decimal, parse_constant=_refuse) if body.strip() else {}
    except RecursionError:
        return Parcel(None, False, header, Refusal(Code.BAD_REQUEST, "The body is nested too deeply."))
    except ValueError as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "it holds what JSON does not allow"
        return Parcel(None, False, header, Refusal(Code.BAD_REQUEST, f"The body is not valid JSON: {reason}."))
    if not _storable(data):
        return Parcel(None, False, header, Refusal(Code.BAD_REQUEST, "The body holds text that is not Unicode text."))
    if not isinstance(data, dict) or data.keys() not in _MEMBERS:
        return Parcel(data, False, header)
    named = data.get("version", header)
    if named is not None and not isinstance(named, str):
        wrong = Refusal(Code.VALIDATION_FAILED, "version: it should be a string", param="version")
        return Parcel(data["data"], True, header, wrong)
    if named is not None and header is not None and named != header:
        both = Refusal(Code.BAD_REQUEST, f"The envelope and {VERSION_HEADER} name different versions.", param="version")
        return Parcel(data["data"], True, named, both)
    return Parcel(data["data"], True, named)


def pack(data: Any, version: str, *, enveloped: bool) -> bytes:
    """Write an answer in the form of its request."""
    return orjson.dumps({"version": version, "data": data} if enveloped else data)


def _storable(data: Any) -> bool:
    """Whether every text can be stored: no NUL, which PostgreSQL refuses, and no half of a surrogate pair."""
    waiting = [data]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            if _UNSTORABLE.search(item):
                return False
        elif isinstance(item, dict):
            waiting.extend(item)
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
