"""From a request to its answer, in one thread and in this order: who calls, may they, how often, in which version, with
what; then the handler under its unit of work. The only place where an exception becomes an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from sqlalchemy.exc import OperationalError

from marketplace.auth import sessions
from marketplace.http import idempotency, sheets, versions
from marketplace.http.envelope import VERSION_HEADER, Parcel, pack, unpack
from marketplace.http.errors import Code, Refusal, render
from marketplace.http.limits import RateClass, Verdict, rates
from marketplace.http.mistakes import mistakes
from marketplace.http.operation import (
    Call,
    Context,
    Exports,
    Keyed,
    Operation,
    OvertakenError,
    Planned,
    Reads,
    Writes,
    rate_limited,
)
from marketplace.http.principal import Principal, resolve
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import new_id
from marketplace.users import service as users

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_DETAILS = 10
MAX_PLANS = 20
"""So often something is planned for one request before its caller is told to come back."""
_FIXED = {
    "Content-Type": "application/json",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}
"""On every answer. None of them lets a page of another origin read it (CORS): nothing is asked for with cookies, and
who wants to use the API from a page serves the page here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A request. Header names are in lower case."""

    headers: Mapping[str, str]
    path_params: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    address: str = ""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """An answer."""

    status: int
    headers: dict[str, str]
    body: bytes
    rest: Iterator[bytes] | None = None
    """what follows the body, made while it is sent; None for an answer that is whole"""
    wait_s: int = 0
    """for how long its caller waits for other news than `news`, if there are none"""
    news: object = None


class _Look:
    """A snapshot that is opened when somebody first looks: who calls, and what they see, is of one moment."""

    def __init__(self, context: Context) -> None:
        self.since = 0
        """How many turns had ended before it was opened."""
        self._context = context
        self._stack = ExitStack()
        self._unit: ReadUnit | None = None

    @property
    def unit(self) -> ReadUnit:
        """The snapshot."""
        if self._unit is None:
            self.since = self._context.turns.ended
            self._unit = self._stack.enter_context(self._context.database.read())
        return self._unit

    def close(self) -> None:
        """Let it go; who looks again sees another one."""
        self._unit = None
        self._stack.close()


class Desk:
    """Serves requests of one process. Safe to share between threads."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def new_request_id(self) -> str:
        """An id for a request: UUIDv7."""
        return new_id(self._context.clock(), self._context.random)

    def refuse(self, refusal: Refusal) -> Outgoing:
        """Answer what never became a call: no such path, a body beyond its bound."""
        return _refused(refusal, self.new_request_id(), {}, None)

    def caller(self, incoming: Incoming) -> Principal | Outgoing:
        """Say who calls, where no operation is named yet; for nobody, the answer to send. Counted like a read, apart
        from the reads themselves."""
        look = _Look(self._context)
        try:
            return self._identify(incoming, "read", self._context.clock(), {}, look, bucket="door")
        except Refusal as refusal:
            return self.refuse(refusal)
        except OperationalError:
            log.exception("the database does not answer")
            return self.refuse(_busy())
        finally:
            look.close()

    def serve(self, operation: Operation[Any], incoming: Incoming) -> Outgoing:
        """Answer a request; never raises."""
        now = self._context.clock()
        request_id = new_id(now, self._context.random)
        headers: dict[str, str] = {}
        named = incoming.headers.get(VERSION_HEADER.lower())
        parcel = Parcel({}, False, named) if operation.opaque else unpack(incoming.body, named)
        shown = parcel.version or operation.versions[-1] if parcel.enveloped else None
        look = _Look(self._context)
        try:
            return self._serve(operation, incoming, parcel, now, request_id, headers, look)
        except Refusal as refusal:
            return _refused(refusal, request_id, headers, shown)
        except OperationalError:
            log.exception("request %s: the database does not answer", request_id)
            return _refused(_busy(), request_id, headers, shown)
        except Exception:  # supervision boundary: a defect of ours must not look like a broken connection
            log.exception("request %s (%s) failed", request_id, operation.name)
            ours = Refusal(Code.INTERNAL_ERROR, "The server had an error while processing your request.")
            return _refused(ours, request_id, headers, shown)
        finally:
            look.close()

    def _serve(
        self,
        operation: Operation[Any],
        incoming: Incoming,
        parcel: Parcel,
        now: int,
        request_id: str,
        headers: dict[str, str],
        look: _Look,
    ) -> Outgoing:
        principal = self._admit(operation, incoming, now, headers, look)
        version = versions.resolve(operation.versions, parcel.version, operation.path)
        headers[VERSION_HEADER] = version
        if parcel.trouble is not None:
            raise parcel.trouble
        request = read_request(operation.request, parcel.data, incoming.path_params)
        call = Call(
            context=self._context,
            principal=principal,
            now=now,
            request_id=request_id,
            version=version,
            address=incoming.address,
            headers=incoming.headers,
            raw=incoming.body,
        )
        if not isinstance(operation.handler, Reads | Planned):
            look.close()
        if isinstance(operation.handler, Exports):
            return _export(operation.handler, call, request, {**_FIXED, "X-Request-Id": request_id, **headers})
        wait_s, news = 0, None
        key = incoming.headers.get(idempotency.HEADER.lower())
        if operation.idempotent and key is not None:
            data = self._once(operation, call, request, parcel.data, idempotency.check_key(key), headers, look)
        else:
            made = self._run(operation, call, request, look)
            wait_s, news = _news(operation, request, made)
            data = _wire(made)
        told = {**_FIXED, "X-Request-Id": request_id, **headers}
        if operation.response is None:
            del told["Content-Type"]
            return Outgoing(operation.success, told, b"")
        body = pack(data, version, enveloped=parcel.enveloped)
        return Outgoing(operation.success, told, body, wait_s=wait_s, news=news)

    def _admit(
        self, operation: Operation[Any], incoming: Incoming, now: int, headers: dict[str, str], look: _Look
    ) -> Principal | None:
        """Return the caller, counted and allowed. Credentials that fail count against the address that sent them."""
        principal = None
        if operation.permission is None:
            self._count(operation.rate, f"{operation.rate} address {incoming.address}", now, headers)
        else:
            principal = self._identify(incoming, operation.rate, now, headers, look, bucket=operation.rate)
        if principal is not None:
            if principal.credential not in operation.credentials:
                usable = ", ".join(sorted(operation.credentials))
                raise Refusal(Code.CREDENTIALS_NOT_PERMITTED, f"{operation.name} is for callers with: {usable}.")
            if operation.permission not in principal.permissions:
                raise Refusal(Code.PERMISSION_DENIED, f"You lack the permission {operation.permission}.")
        return principal

    def _identify(
        self, incoming: Incoming, rate: RateClass, now: int, headers: dict[str, str], look: _Look, *, bucket: str
    ) -> Principal:
        """Return who calls, counted. Refusal: RateLimited; what `resolve` refuses, counted too."""
        context = self._context
        try:
            principal = resolve(
                look.unit,
                incoming.headers,
                pepper=context.pepper,
                vault=context.vault,
                now=now,
                address=incoming.address,
            )
        except Refusal:
            self._count(rate, f"{bucket} address {incoming.address}", now, headers)
            raise
        self._count(rate, f"{bucket} {principal.kind} {principal.id}", now, headers)
        return principal

    def _count(self, rate: RateClass, bucket: str, now: int, headers: dict[str, str]) -> None:
        """Take one request out of a bucket, and tell how many are left. Refusal: RateLimited."""
        context = self._context
        verdict = context.limits.take(bucket, rates(context.settings.read(context.database, now))[rate], now)
        _tell(verdict, headers)
        if not verdict.admitted:
            raise rate_limited(verdict.retry_after_s)

    def _run(self, operation: Operation[Any], call: Call, request: BaseModel, look: _Look) -> BaseModel | None:
        handler, database = operation.handler, self._context.database
        if isinstance(handler, Reads):
            return handler.run(call, look.unit, request)
        if isinstance(handler, Writes):
            return database.transact(lambda unit: _write(handler, call, unit, request))
        if isinstance(handler, Planned):
            return self._planned(
                handler, call, request, look, lambda unit, plan: _write(handler, call, unit, request, plan)
            )
        if isinstance(handler, Keyed):
            return handler.run(call, request, None)[0]
        assert not isinstance(handler, Exports), "an export is no model"
        return handler.run(call, request)

    def _planned(
        self,
        handler: Planned[Any, Any],
        call: Call,
        request: BaseModel,
        look: _Look,
        work: Callable[[WriteUnit, Any], T],
        *,
        repeated: bool = False,
    ) -> T:
        """Plan on a snapshot and do the work with the plan, again for as often as others are faster. Where a request
        may be `repeated`, a refusal is handed on like a plan: the first of them may have been answered meanwhile.
        Refusal, ServiceUnavailable too."""
        overtaken: OvertakenError | None = None
        for _ in range(MAX_PLANS):
            try:
                with self._context.turns.take(handler.turn(request), look.close, look.since):
                    return self._plan_and_run(handler, call, request, look, work, repeated)
            except OvertakenError as error:
                overtaken = error
        log.warning("request %s: %d plans were overtaken", call.request_id, MAX_PLANS, exc_info=overtaken)
        raise _busy()

    def _plan_and_run(
        self,
        handler: Planned[Any, Any],
        call: Call,
        request: BaseModel,
        look: _Look,
        work: Callable[[WriteUnit, Any], T],
        repeated: bool,
    ) -> T:
        """Once. Refusal, OvertakenError."""
        plan: Any
        try:
            plan = handler.plan(call, look.unit, request)
        except Refusal as refusal:
            if not repeated:
                raise
            plan = refusal
        look.close()
        return self._context.database.transact(partial(_with_plan, work, plan))

    def _once(
        self,
        operation: Operation[Any],
        call: Call,
        request: BaseModel,
        data: Any,
        key: str,
        headers: dict[str, str],
        look: _Look,
    ) -> Any:
        """Do a write once for its key; the answer is kept in the same transaction."""
        handler, caller = operation.handler, call.caller
        if isinstance(handler, Keyed):
            made, known = handler.run(call, request, key)
            headers.update({idempotency.REPLAYED: "true"} if known else {})
            return _wire(made)
        assert isinstance(handler, Writes | Planned), "only writes are idempotent"
        asked = idempotency.request_hash(operation.name, call.version, data)

        def work(unit: WriteUnit, plan: Any = None) -> tuple[str, bool]:
            kept = idempotency.claim(unit, caller.id, key, asked, call.now)
            if kept is not None:
                return kept, True
            answer = orjson.dumps(_wire(_write(handler, call, unit, request, plan))).decode()
            idempotency.keep(unit, caller.id, key, answer)
            return answer, False

        if isinstance(handler, Planned):
            answer, replayed = self._planned(handler, call, request, look, work, repeated=True)
        else:
            answer, replayed = self._context.database.transact(work)
        if replayed:
            headers[idempotency.REPLAYED] = "true"
        return orjson.Fragment(answer.encode())


def _news(operation: Operation[Any], request: BaseModel, made: BaseModel | None) -> tuple[int, object]:
    handler = operation.handler
    return handler.wait(request, made) if isinstance(handler, Reads) and handler.wait is not None else (0, None)


def _export(handler: Exports[Any], call: Call, request: BaseModel, told: dict[str, str]) -> Outgoing:
    """Begin an answer of CSV: its first part is made here, where it may still be refused."""
    parts = (part.encode() for part in handler.run(call, request))
    first = next(parts)
    shape = {"Content-Type": sheets.MEDIA_TYPE, "Content-Disposition": f'attachment; filename="{handler.file}"'}
    return Outgoing(200, {**told, **shape}, first, parts)


def _with_plan(work: Callable[[WriteUnit, Any], T], plan: Any, unit: WriteUnit) -> T:
    return work(unit, plan)


def _write(
    handler: Writes[Any] | Planned[Any, Any], call: Call, unit: WriteUnit, request: BaseModel, plan: Any = None
) -> BaseModel | None:
    """Run a write for somebody who is still there: they were known before the transaction began, and may have been
    erased since. Nothing of theirs is made after that."""
    if isinstance(plan, Refusal):
        raise plan
    person = None if call.principal is None else call.principal.user
    if person is not None and not users.stays(unit, person.id):
        raise sessions.invalid_token()
    if isinstance(handler, Planned):
        return handler.run(call, unit, request, plan)
    return handler.run(call, unit, request)


def read_request(model: type[BaseModel], data: Any, path_params: Mapping[str, str]) -> BaseModel:
    """Validate a body together with what its path says. Refusal: ValidationFailed, naming the field."""
    if not isinstance(data, dict):
        raise Refusal(Code.VALIDATION_FAILED, "The body should be a JSON object.")
    twice = sorted(data.keys() & path_params.keys())
    if twice:
        raise Refusal(Code.VALIDATION_FAILED, f"{twice[0]}: it is given by the path", param=twice[0])
    try:
        return model.model_validate({**data, **path_params}, by_alias=True)
    except ValidationError as error:
        # Neither the input nor the context of an error is repeated: it may hold a password.
        wrong = error.errors(include_url=False, include_context=False, include_input=False)
        found = mistakes(wrong, data)[:MAX_DETAILS]
        first = found[0]
        raise Refusal(
            Code.VALIDATION_FAILED,
            f"{first['param']}: {first['message']}" if first["param"] else first["message"],
            param=first["param"] or None,
            details={"errors": found},
        ) from None


def _wire(answer: BaseModel | None) -> Any:
    return None if answer is None else answer.model_dump(mode="python", by_alias=True)


def _tell(verdict: Verdict, headers: dict[str, str]) -> None:
    headers["RateLimit-Limit"] = str(verdict.limit)
    headers["RateLimit-Remaining"] = str(verdict.remaining)
    headers["RateLimit-Reset"] = str(verdict.reset_s)


def _busy() -> Refusal:
    return Refusal(Code.SERVICE_UNAVAILABLE, "Try again in a moment.", headers=(("Retry-After", "2"),))


def _refused(refusal: Refusal, request_id: str, headers: Mapping[str, str], version: str | None) -> Outgoing:
    return Outgoing(
        refusal.code.status,
        {**_FIXED, "X-Request-Id": request_id, **headers, **dict(refusal.headers)},
        render(refusal, request_id, version),
    )
