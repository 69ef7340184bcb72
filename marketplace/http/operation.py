"""What a management operation is: one row of the table, and what its handler is called with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel

from marketplace.auth.oauth_issuer import Issuer
from marketplace.catalog.board import BoardCache
from marketplace.events import service as events
from marketplace.http.errors import Code, Refusal
from marketplace.http.limits import Buckets, Rate, RateClass
from marketplace.http.principal import EVERY_CREDENTIAL, Credential, Principal
from marketplace.http.turns import Turns
from marketplace.http.versions import ALL
from marketplace.http.wire import Json
from marketplace.payments.manual import ManualProvider
from marketplace.payments.port import PaymentProvider
from marketplace.placement.fleet import Fleet
from marketplace.settings.cache import SettingsCache
from marketplace.settings.rules import AppSettings
from marketplace.store.db import Clock, Database, ReadUnit, WriteUnit
from marketplace.store.ids import Random
from marketplace.store.vault import Vault
from marketplace.users.permissions import Permission

Q = TypeVar("Q", bound=BaseModel)
P = TypeVar("P")
Method = Literal["GET", "POST", "PUT"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the whole surface works with."""

    database: Database
    pepper: bytes
    vault: Vault
    clock: Clock
    random: Random
    limits: Buckets
    platform: str = "Headrace"
    public_url: str = "http://127.0.0.1:8000"
    """where people and clients reach this server, without a slash at the end; what links in mails begin with"""
    settings: SettingsCache = field(default_factory=SettingsCache)
    board: BoardCache = field(default_factory=BoardCache)
    fleet: Fleet = field(default_factory=Fleet)
    turns: Turns = field(default_factory=Turns)
    payments: PaymentProvider = field(default_factory=ManualProvider)
    oauth: Mapping[str, Issuer] = field(default_factory=dict)
    """issuers at which people may sign in, by the names that people know them by"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request as its handler sees it."""

    context: Context
    principal: Principal | None
    """the caller; None only where an operation is public"""
    now: int
    request_id: str
    version: str
    address: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """as they were sent, names in lower case; they hold the credential"""
    raw: bytes = field(default=b"", repr=False)
    """the body as it was sent, for what proves itself by a signature"""

    @property
    def caller(self) -> Principal:
        """The caller of an operation that is not public."""
        assert self.principal is not None, "a public operation has no caller"
        return self.principal

    @property
    def settings(self) -> AppSettings:
        """The settings of the platform, at most a second old. For what a transaction decides, read them in it."""
        return self.context.settings.read(self.context.database, self.now)

    def record(self, unit: WriteUnit, action: str, *, owner_id: str, subject_id: str, **detail: Any) -> None:
        """Add a line to the audit log, in the transaction of the change. `detail` never holds secrets or e-mails."""
        actor = self.principal
        events.record(
            unit,
            action=action,
            actor_kind="anonymous" if actor is None else actor.kind,
            actor_id="" if actor is None else actor.id,
            credential_id="" if actor is None else actor.credential_id,
            owner_id=owner_id,
            subject_id=subject_id,
            detail=detail,
            request_id=self.request_id,
            now=self.now,
            random=self.context.random,
        )

    def limit(self, name: str, rate: Rate) -> None:
        """Count against a bucket beside that of the caller. Refusal: RateLimited."""
        verdict = self.context.limits.take(name, rate, self.now)
        if not verdict.admitted:
            raise rate_limited(verdict.retry_after_s)


def rate_limited(retry_after_s: int) -> Refusal:
    """Too many requests; the same one may succeed after so many seconds."""
    return Refusal(
        Code.RATE_LIMITED,
        f"Too many requests. Try again in {retry_after_s} s.",
        headers=(("Retry-After", str(retry_after_s)),),
    )


@dataclass(frozen=True, slots=True)
class Reads(Generic[Q]):
    """A handler that looks at one snapshot.

    With `wait` its callers may wait for news: it says for how many seconds a request waits at most, and what of an
    answer is news once it differs.
    """

    run: Callable[[Call, ReadUnit, Q], BaseModel]
    wait: Callable[[Q, Any], tuple[int, object]] | None = None


@dataclass(frozen=True, slots=True)
class Writes(Generic[Q]):
    """A handler that is one transaction: a refusal undoes all of it. On PostgreSQL it may be run again."""

    run: Callable[[Call, WriteUnit, Q], BaseModel | None]


class OvertakenError(Exception):
    """Others changed what a plan was made from; another one has to be made."""


@dataclass(frozen=True, slots=True)
class Planned(Generic[Q, P]):
    """A handler that Writes, with a short transaction: what it will write is planned on a snapshot before, without a
    lock. `run` makes sure that the plan still holds; where it raises OvertakenError, it is planned and run again.

    Requests with the same `turn` would overtake each other: in one process they take turns."""

    plan: Callable[[Call, ReadUnit, Q], P]
    run: Callable[[Call, WriteUnit, Q, P], BaseModel]
    turn: Callable[[Q], str]


@dataclass(frozen=True, slots=True)
class Steps(Generic[Q]):
    """A handler that opens its own units, because something slow lies between them, or a refusal must leave a trace."""

    run: Callable[[Call, Q], BaseModel | None]


@dataclass(frozen=True, slots=True)
class Then:
    """What the caller of a tool may wait for, with the argument `wait`: another tool is asked until it says so."""

    tool: str
    body: Callable[[Json], Json]
    """the body of a request to the other tool's operation, from what the first one answered"""
    through: Callable[[Json], bool]
    """whether the other's answer is what was waited for"""
    wait_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """How an operation appears to MCP clients. What it returns is what the operation answers."""

    name: str
    description: str
    """what it is for, to a language model"""
    arguments: type[BaseModel]
    body: Callable[[Json], Json] = dict
    """the body of a request to the operation, from arguments that are valid"""
    shown: Callable[[Json, Json], Json] = lambda arguments, answer: answer
    """what is shown of the operation's answer, from the arguments and all of it"""
    destructive: bool = False
    """whether it may end or lose something; clients then ask their user first"""
    then: Then | None = None
    """what may be waited for; what was seen last is told beside the answer"""


@dataclass(frozen=True, slots=True)
class Keyed(Generic[Q]):
    """A handler like Steps that is repeatable: it is also given the `Idempotency-Key`, or None, and says whether its
    answer was given before."""

    run: Callable[[Call, Q, str | None], tuple[BaseModel, bool]]


@dataclass(frozen=True, slots=True)
class Exports(Generic[Q]):
    """A handler whose answer is CSV of that file name, made part by part while it is sent. It opens its own units; what
    it refuses, it refuses before the first part."""

    run: Callable[[Call, Q], Iterator[str]]
    file: str


@dataclass(frozen=True, kw_only=True)
class Operation(Generic[Q]):
    """One management operation. Routes, documents, capabilities and tests are made from these rows alone."""

    name: str
    """noun.verb; the operation's id in the document"""
    summary: str
    method: Method = "POST"
    path: str
    request: type[Q]
    response: type[BaseModel] | None
    """None answers without a body"""
    permission: Permission | None
    """what the caller must hold; None admits everybody, without a credential"""
    credentials: frozenset[Credential] = EVERY_CREDENTIAL
    versions: tuple[str, ...] = ALL
    rate: RateClass
    idempotent: bool = False
    """whether `Idempotency-Key` is honoured: by the desk for a handler that Writes, or is Planned, and whose answer
    holds no secret, by the handler itself where it is Keyed"""
    headers: Mapping[str, str] = field(default_factory=dict)
    """headers of its own that it must be sent, and what they say"""
    opaque: bool = False
    """whether the body is somebody else's format: it is not read, and the handler finds it in `Call.raw`"""
    success: int = 200
    handler: Reads[Q] | Writes[Q] | Planned[Q, Any] | Steps[Q] | Keyed[Q] | Exports[Q]
    example: Mapping[str, Any]
    """a request that the request model accepts"""
    answer: Mapping[str, Any] | None
    """what it may be answered with"""
    errors: tuple[Code, ...] = ()
    """codes beyond those that every operation has"""
    tool: Tool | None = None
    """the MCP tool that calls it, where it has one"""

    def __post_init__(self) -> None:
        assert not self.idempotent or isinstance(self.handler, Writes | Planned | Keyed), (
            f"{self.name}: it cannot be repeated"
        )
