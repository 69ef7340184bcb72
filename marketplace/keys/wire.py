"""Requests and answers of API keys."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PlainSerializer, StringConstraints, WithJsonSchema

from marketplace.http.pagination import DEFAULT_LIMIT
from marketplace.http.wire import CentsIn, CursorText, Id, Instant, InstantIn, Limit, Wire, nano_to_cents
from marketplace.keys.budgets import BudgetPeriod
from marketplace.keys.rules import KeyKind
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


def _model(text: str) -> str:
    if "*" in text[:-1]:
        raise ValueError("a * stands at the end only, for every model whose name begins so")
    return text


def _above_zero(amount: int) -> int:
    if amount <= 0:
        raise ValueError("a budget is an amount above zero")
    return amount


Model = Annotated[str, StringConstraints(min_length=1, max_length=200), AfterValidator(_model)]
Network = Annotated[str, StringConstraints(max_length=64), AfterValidator(_network)]
Models = Annotated[list[Model], Field(max_length=MAX_LIST)]
Networks = Annotated[list[Network], Field(max_length=MAX_LIST)]
Count = Annotated[int, Field(ge=1, le=10**9)]
BudgetIn = Annotated[CentsIn, AfterValidator(_above_zero)]
BudgetOut = Annotated[
    int | None,
    PlainSerializer(lambda nano: None if nano is None else nano_to_cents(nano), return_type=Any),
    WithJsonSchema({"type": ["number", "null"], "description": "cents of the server currency, exact"}),
]
Service = Annotated[str, StringConstraints(max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Provider = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class AddRequest(Wire):
    """A new key. Limits that are null do not limit; those of inference are not for keys of nodes and services."""

    name: Name
    active: bool = True
    kind: KeyKind | None = None
    """user, or team where there is a team_id, unless it says otherwise"""
    team_id: Id | None = None
    provider: Provider | None = None
    """name of the provider of a node's or service's key; by default the caller's own"""
    service: Service | None = None
    """what a service's key may charge for"""
    expires_at: InstantIn | None = None
    allowed_models: Models | None = None
    """names, or beginnings of names with a * at the end"""
    allowed_addresses: Networks | None = None
    budget: BudgetIn | None = None
    budget_period: BudgetPeriod | None = None
    """calendar day, week (from Monday) or month in UTC; total, the default, is never renewed"""
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    """prompt and most tokens of the answer; what was not generated is given back at its end"""
    max_concurrency: Count | None = None


class KeyAnswer(Wire):
    """A key without its secret."""

    id: str
    kind: KeyKind
    owner_id: str
    """the person, team or provider that it speaks for"""
    service: str | None
    name: str
    prefix: str
    """beginning of the secret, to recognise the key by"""
    active: bool
    created_at: Instant
    expires_at: Instant | None
    allowed_models: list[str] | None
    allowed_addresses: list[str] | None
    budget: BudgetOut
    budget_period: BudgetPeriod | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_concurrency: int | None


class AddAnswer(KeyAnswer):
    """A new key; `key` is its secret, shown this once."""

    key: str


class ListRequest(Wire):
    """A page of keys, newest first: the caller's, a team's, or those of a provider's nodes or services."""

    kind: KeyKind | None = None
    team_id: Id | None = None
    provider: Provider | None = None
    limit: Limit = DEFAULT_LIMIT
    cursor: CursorText | None = None


class ListAnswer(Wire):
    """Keys, and where to go on."""

    api_keys: list[KeyAnswer]
    next_cursor: str | None


class UpdateRequest(Wire):
    """What to change on a key. A field that is left out stays; null takes a limit away, and leaves name, active and
    budget_period."""

    id: Id
    name: Name | None = None
    active: bool | None = None
    expires_at: InstantIn | None = None
    allowed_models: Models | None = None
    allowed_addresses: Networks | None = None
    budget: BudgetIn | None = None
    budget_period: BudgetPeriod | None = None
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
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
