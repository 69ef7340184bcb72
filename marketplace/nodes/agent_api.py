"""The door for nodes: `/agent/v1/…`, plain ASGI. A poll waits in the event loop, and holds no thread while it does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from anyio import CapacityLimiter, to_thread
from sqlalchemy.exc import OperationalError
from starlette.routing import Route

from marketplace.agent.wire import PREFIX, Accepted, Metrics, Poll, Polled, Ready, Register, Registered, Shutdown
from marketplace.events.transitions import Actor, Scene
from marketplace.http.app import ClientGone, Observe, Receive, Scope, Send, read_body, write
from marketplace.http.dispatch import Outgoing
from marketplace.http.errors import Code, Refusal, render
from marketplace.http.operation import Context
from marketplace.nodes import agent_login, talk
from marketplace.nodes.agent_login import NodeCaller
from marketplace.nodes.service import ForeignMachineError, StaleSessionError
from marketplace.nodes.talk import POLL_WAIT_S, UnknownInstanceError
from marketplace.nodes.waker import LOOK_S, Waker
from marketplace.relay.access import RelayAnswer, Relaying
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
        self,
        context: Context,
        observe: Observe = lambda path, status: None,
        *,
        deprecated: Callable[[str], None] = lambda method: None,
        look_s: float = LOOK_S,
    ) -> None:
        """`deprecated` is called for each registration with something else than a node's key."""
        self._context = context
        self._observe = observe
        self._deprecated = deprecated
        self._waker = Waker(context.database, look_s)
        self._limiter: CapacityLimiter | None = None
        self._messages: dict[str, Callable[[NodeCaller, bytes], Any]] = {
            "register": self._register,
            "ready": self._ready,
            "metrics": self._metrics,
            "relay": self._relay,
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
            caller = await self._thread(lambda: self._caller(headers, address))
            if name == "poll":
                answered = await self._poll(caller, body)
            else:
                answered = await self._thread(lambda: self._messages[name](caller, body))
        except Refusal as refusal:
            return self._refused(refusal)
        except OperationalError:
            log.exception("the database does not answer")
            return self._refused(Refusal(Code.SERVICE_UNAVAILABLE, "Try again in a moment."))
        if caller.deprecated is not None and name == "register":
            self._deprecated(caller.deprecated)
        shown = {"Content-Type": "application/json", **caller.headers}
        return Outgoing(200, shown, msgspec.json.encode(answered))

    def _refused(self, refusal: Refusal) -> Outgoing:
        request_id = new_id(self._context.clock(), self._context.random)
        shown = {"Content-Type": "application/json", **dict(refusal.headers)}
        return Outgoing(refusal.code.status, shown, render(refusal, request_id))

    async def _thread(self, work: Callable[[], T]) -> T:
        if self._limiter is None:
            self._limiter = CapacityLimiter(THREADS)
        return await to_thread.run_sync(work, limiter=self._limiter)

    def _caller(self, headers: dict[str, str], address: str) -> NodeCaller:
        with self._context.database.read() as unit:
            return agent_login.resolve(unit, self._context, headers, address)

    def _scene(self, caller: NodeCaller) -> Scene:
        return Scene(
            Actor("node", caller.provider_id, caller.credential_id), self._context.clock(), self._context.random
        )

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

    def _register(self, caller: NodeCaller, body: bytes) -> Any:
        asked, scene = _read(body, Register), self._scene(caller)
        vault = self._context.vault

        def work(unit: WriteUnit) -> Registered:
            begun = talk.register(unit, vault, caller.provider_id, asked, scene)
            agent_login.note(unit, caller, begun.node_id, scene)
            return msgspec.structs.replace(begun, warnings=caller.warnings)

        begun = self._write(work)
        if caller.deprecated is not None:
            log.warning("node %s signed in with %s, which is deprecated", begun.node_id, caller.deprecated)
        return begun

    async def _poll(self, caller: NodeCaller, body: bytes) -> Polled:
        """Take the report; answer at once what is news, else when something becomes news or the time is up."""
        told = _read(body, Poll)
        scene = self._scene(caller)
        taken = await self._thread(lambda: self._write(lambda unit: talk.poll(unit, caller.provider_id, told, scene)))
        answered = await self._thread(lambda: self._news(caller, told, taken))
        wait_s = POLL_WAIT_S if told.wait_s is None else min(told.wait_s, POLL_WAIT_S)
        if talk.news(answered) or wait_s <= 0:
            return answered
        await self._waker.wait(taken.node_id, told.applied_rev, wait_s)
        return await self._thread(lambda: self._news(caller, told, taken))

    def _news(self, caller: NodeCaller, told: Poll, taken: talk.Taken) -> Polled:
        context = self._context
        try:
            with context.database.read() as unit:
                return talk.answer(unit, context.vault, caller.provider_id, told, taken, context.clock())
        except StaleSessionError as error:
            raise _stale() from error

    def _ready(self, caller: NodeCaller, body: bytes) -> Accepted:
        told, scene = _read(body, Ready), self._scene(caller)
        self._write(lambda unit: talk.ready(unit, caller.provider_id, told, scene))
        return Accepted()

    def _metrics(self, caller: NodeCaller, body: bytes) -> Accepted:
        told = _read(body, Metrics)
        self._write(lambda unit: talk.metrics(unit, caller.provider_id, told, self._context.clock()))
        return Accepted()

    def _relay(self, caller: NodeCaller, body: bytes) -> RelayAnswer:
        told, context = _read(body, Relaying), self._context
        try:
            with context.database.read() as unit:
                return talk.relay(unit, context.vault, caller.provider_id, told, context.clock())
        except StaleSessionError as error:
            raise _stale() from error

    def _shutdown(self, caller: NodeCaller, body: bytes) -> Accepted:
        told, scene = _read(body, Shutdown), self._scene(caller)
        self._write(lambda unit: talk.leave(unit, caller.provider_id, told.session_id, scene))
        return Accepted()


def _read(body: bytes, kind: type[M]) -> M:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise Refusal(Code.VALIDATION_FAILED, f"The message cannot be read: {error}") from error


def _stale() -> Refusal:
    return Refusal(Code.STALE_SESSION, "The session has ended: register again.")
