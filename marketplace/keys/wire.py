"""Requests and answers of API keys."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from marketplace.http.pagination import DEFAULT_LIMIT
from marketplace.http.wire import CursorText, Id, Instant, InstantIn, Limit, Wire
from marketplace.keys.service import MAX_NAME

MAX_LIST = 100
MAX_OVERLAP_S = 30 * 86_400
DEFAULT_OVERLAP_S = 86_400


def _network(text: str) -> str:
    """The network in its usual form. ValueError."""
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError as error:
        raise ValueError("an address or network like 203.0.113.7 or 2001:db8::/32") from error


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("a name has printable characters only")
    return text


Name = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME), AfterValidator(_printable)]
Model = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Network = Annotated[str, StringConstraints(max_length=64), AfterValidator(_network)]
Models = Annotated[list[Model], Field(max_length=MAX_LIST)]
Networks = Annotated[list[Network], Field(max_length=MAX_LIST)]
Count = Annotated[int, Field(ge=1, le=10**9)]


class AddRequest(Wire):
    """A new key. Limits that are null do not limit."""

    name: Name
    active: bool = True
    team_id: Id | None = None
    expires_at: InstantIn | None = None
    allowed_models: Models | None = None
    allowed_addresses: Networks | None = None
    requests_per_minute: Count | None = None
    max_concurrency: Count | None = None


class KeyAnswer(Wire):
    """A key without its secret."""

    id: str
    name: str
    prefix: str
    """beginning of the secret, to recognise the key by"""
    active: bool
    created_at: Instant
    expires_at: Instant | None
    allowed_models: list[str] | None
    allowed_addresses: list[str] | None
    requests_per_minute: int | None
    max_concurrency: int | None


class AddAnswer(KeyAnswer):
    """A new key; `key` is its secret, shown this once."""

    key: str


class ListRequest(Wire):
    """A page of the caller's keys, newest first."""

    team_id: Id | None = None
    limit: Limit = DEFAULT_LIMIT
    cursor: CursorText | None = None


class ListAnswer(Wire):
    """Keys, and where to go on."""

    api_keys: list[KeyAnswer]
    next_cursor: str | None


class UpdateRequest(Wire):
    """What to change on a key. A field that is left out stays; null takes a limit away, and leaves name and active."""

    id: Id
    name: Name | None = None
    active: bool | None = None
    expires_at: InstantIn | None = None
    allowed_models: Models | None = None
    allowed_addresses: Networks | None = None
    requests_per_minute: Count | None = None
    max_concurrency: Count | None = None


class RotateRequest(Wire):
    """The key to replace, and for how many seconds it still works beside the new one."""

    id: Id
    overlap_s: Annotated[int, Field(ge=0, le=MAX_OVERLAP_S)] = DEFAULT_OVERLAP_S


class DeleteRequest(Wire):
    """The key to revoke."""

    id: Id


class DeleteAnswer(Wire):
    """The key that was revoked."""

    id: str
