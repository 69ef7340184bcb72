"""The door for nodes: `/agent/v1/…`, plain ASGI. A poll waits in the event loop, and holds no thread while it does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from anyio import CapacityLimiter, to_thread
from sqlalchemy.exc import OperationalError
from starlette.routing import Route

from marketplace.agent.wire import PREFIX, Accepted, Metrics, Poll, Polled, Ready, Register, Shutdown
from marketplace.events.transitions import Actor, Scene
from marketplace.http.app import ClientGone, Observe, Receive, Scope, Send, read_body, write
from marketplace.http.dispatch import Outgoing
from marketplace.http.errors import Code, Refusal, render
from marketplace.http.operation import Context
from marketplace.keys import service as keys
from marketplace.keys.rules import KeyFormatError, parse
from marketplace.keys.service import KeyRow
from marketplace.nodes import talk
from marketplace.nodes.service import ForeignMachineError, StaleSessionError
from marketplace.nodes.talk import POLL_WAIT_S, UnknownInstanceError
from marketplace.nodes.waker import LOOK_S, Waker
from marketplace.store.db import WriteUnit
from marketplace.store.ids import new_id

log = logging.getLogger(__name__)
T = TypeVar("T")
M = TypeVar("M")

THREADS = 4
"""Messages of nodes that are worked on at once: renters are not kept waiting by them."""


class AgentDoor:
    """Answers nodes. Belongs to one event loop."""

    def __init__(
        self, context: Context, observe: Observe = lambda path, status: None, *, look_s: float = LOOK_S
    ) -> None:
        self._context = context
        self._observe = observe
        self._waker = Waker(context.database, look_s)
        self._limiter: CapacityLimiter | None = None
        self._messages: dict[str, Callable[[KeyRow, bytes], Any]] = {
            "register": self._register,
            "ready": self._ready,
            "metrics": self._metrics,
            "shutdown": self._shutdown,
        }

    def routes(self) -> list[Route]:
        """A route for each message."""
        return [Route(PREFIX + name, self) for name in (*self._messages, "poll")]

    def close(self) -> None:
        """Answer every poll that waits: the server goes."""
        self._waker.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one message."""
        name = scope["path"].removeprefix(PREFIX)
        try:
            answer = await self._answer(name, scope, receive)
        except ClientGone:
            return
        self._observe(scope["path"], answer.status)
        await write(send, answer)

    async def _answer(self, name: str, scope: Scope, receive: Receive) -> Outgoing:
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        address = (scope.get("client") or ("",))[0]
        try:
            if scope["method"] != "POST":
                raise Refusal(Code.METHOD_NOT_ALLOWED, "Nodes send POST.", headers=(("Allow", "POST"),))
            body = await read_body(receive)
            key = await self._thread(lambda: self._key(headers, address))
            if name == "poll":
                answered = await self._poll(key, body)
            else:
                answered = await self._thread(lambda: self._messages[name](key, body))
        except Refusal as refusal:
            return self._refused(refusal)
        except OperationalError:
            log.exception("the database does not answer")
            return self._refused(Refusal(Code.SERVICE_UNAVAILABLE, "Try again in a moment."))
        return Outgoing(200, {"Content-Type": "application/json"}, msgspec.json.encode(answered))

    def _refused(self, refusal: Refusal) -> Outgoing:
        request_id = new_id(self._context.clock(), self._context.random)
        shown = {"Content-Type": "application/json", **dict(refusal.headers)}
        return Outgoing(refusal.code.status, shown, render(refusal, request_id))

    async def _thread(self, work: Callable[[], T]) -> T:
        if self._limiter is None:
            self._limiter = CapacityLimiter(THREADS)
        return await to_thread.run_sync(work, limiter=self._limiter)

    def _key(self, headers: dict[str, str], address: str) -> KeyRow:
        """The node's key. Refusal: NotAuthenticated, InvalidApiKey, CredentialsNotPermitted."""
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        text = headers.get("x-api-key", bearer).strip()
        if not text:
            raise Refusal(Code.NOT_AUTHENTICATED, "No credential: send 'X-API-Key: <key of a node>'.")
        context = self._context
        try:
            secret = parse(text)
        except KeyFormatError as error:
            raise _invalid() from error
        with context.database.read() as unit:
            row = keys.find_usable(unit, secret, context.pepper, context.clock())
        if row is None:
            raise _invalid()
        if row.kind != "node":
            raise Refusal(Code.CREDENTIALS_NOT_PERMITTED, f"A {row.kind} key is not for nodes.")
        if not keys.may_come_from(row, address):
            raise Refusal(Code.CREDENTIALS_NOT_PERMITTED, "The API key may not be used from this address.")
        return row

    def _scene(self, key: KeyRow) -> Scene:
        return Scene(Actor("node", key.owner_id, key.id), self._context.clock(), self._context.random)

    def _write(self, work: Callable[[WriteUnit], T]) -> T:
        try:
            return self._context.database.transact(work)
        except StaleSessionError as error:
            raise _stale() from error
        except ForeignMachineError as error:
            raise Refusal(
                Code.CREDENTIALS_NOT_PERMITTED, "The machine is registered with another provider's key."
            ) from error
        except UnknownInstanceError as error:
            raise Refusal(Code.INSTANCE_NOT_FOUND, "There is no such instance with this token.") from error

    def _register(self, key: KeyRow, body: bytes) -> Any:
        asked, scene = _read(body, Register), self._scene(key)
        vault = self._context.vault
        return self._write(lambda unit: talk.register(unit, vault, key.owner_id, asked, scene))

    async def _poll(self, key: KeyRow, body: bytes) -> Polled:
        """Take the report; answer at once what is news, else when something becomes news or the time is up."""
        told = _read(body, Poll)
        scene = self._scene(key)
        taken = await self._thread(lambda: self._write(lambda unit: talk.poll(unit, key.owner_id, told, scene)))
        answered = await self._thread(lambda: self._news(key, told, taken))
        wait_s = POLL_WAIT_S if told.wait_s is None else min(told.wait_s, POLL_WAIT_S)
        if talk.news(answered) or wait_s <= 0:
            return answered
        await self._waker.wait(taken.node_id, told.applied_rev, wait_s)
        return await self._thread(lambda: self._news(key, told, taken))

    def _news(self, key: KeyRow, told: Poll, taken: talk.Taken) -> Polled:
        context = self._context
        try:
            with context.database.read() as unit:
                return talk.answer(unit, context.vault, key.owner_id, told, taken, context.clock())
        except StaleSessionError as error:
            raise _stale() from error

    def _ready(self, key: KeyRow, body: bytes) -> Accepted:
        told, scene = _read(body, Ready), self._scene(key)
        self._write(lambda unit: talk.ready(unit, key.owner_id, told, scene))
        return Accepted()

    def _metrics(self, key: KeyRow, body: bytes) -> Accepted:
        told = _read(body, Metrics)
        self._write(lambda unit: talk.metrics(unit, key.owner_id, told, self._context.clock()))
        return Accepted()

    def _shutdown(self, key: KeyRow, body: bytes) -> Accepted:
        told, scene = _read(body, Shutdown), self._scene(key)
        self._write(lambda unit: talk.leave(unit, key.owner_id, told.session_id, scene))
        return Accepted()


def _read(body: bytes, kind: type[M]) -> M:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise Refusal(Code.VALIDATION_FAILED, f"The message cannot be read: {error}") from error


def _stale() -> Refusal:
    return Refusal(Code.STALE_SESSION, "The session has ended: register again.")


def _invalid() -> Refusal:
    return Refusal(Code.INVALID_API_KEY, "The API key is not valid: unknown, revoked, switched off or expired.")
