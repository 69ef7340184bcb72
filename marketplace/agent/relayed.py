"""The node's side of a relay: a node that nobody can reach connects out, and serves the clients that come there.

It connects only to ports of its own that the server's grant names, whatever a relay asks for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable

import msgspec

from marketplace.agent.client import ServerError
from marketplace.relay import grants
from marketplace.relay.access import RelayGrant
from marketplace.relay.grants import Grant
from marketplace.relay.pipe import Connection, keep_alive, splice
from marketplace.relay.wire import (
    FROM_RELAY,
    Attach,
    Attached,
    Beat,
    Decline,
    Hello,
    NotPublished,
    Open,
    ProtocolError,
    Refused,
    Renew,
    Take,
    Taken,
    frame,
    receive,
)

_log = logging.getLogger(__name__)

RENEW_S = 300.0
"""Pause between grants: a small part of the time for which one holds."""
AGAIN_S = 15.0
"""Pause after which a port that could not be published is tried again."""
_RETRY_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
_CONNECT_S = 10.0
_STREAMS = 256
"""Clients of one port that are served at once."""
_LOCAL = "127.0.0.1"


class RelayRefusedError(Exception):
    """The relay does not want this node. The message is its own."""


_PASSING = (OSError, EOFError, ServerError, ProtocolError, RelayRefusedError)
"""What may be otherwise the next time. A grant that cannot be read is no reason to leave the machines alone, either."""


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


class _Session:
    """One control connection."""

    def __init__(self, access: RelayGrant, connection: Connection, silent_s: float) -> None:
        self.access = access
        self.reader, self.writer = connection
        self.key = bytes.fromhex(access.key)
        """of the grant that the connection began with"""
        self.newest = self.key
        self.parts = ("", "")
        self.silent_s = silent_s
        self.ports = _ports(access)
        self.missing: list[NotPublished] = []


class Relayed:
    """Keeps a node at its relay. Belongs to one event loop."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[RelayGrant | None]],
        *,
        wait: Callable[[asyncio.Event, float], Awaitable[None]] = _wait,
        draw: Callable[[int], str] = secrets.token_hex,
    ) -> None:
        """`ask` gets a grant from the server (ServerError), None where there is no relay; `wait` waits for an event,
        but no longer than so many seconds."""
        self._ask = ask
        self._wait = wait
        self._draw = draw
        self._wanted = False
        self._changed = asyncio.Event()
        self._streams: dict[asyncio.Task[None], int] = {}
        self.attached = asyncio.Event()
        """set while the relay has this node's newest grant"""
        self.missing: list[NotPublished] = []
        """what the relay does not publish"""

    def hear(self, relayed: bool) -> None:
        """What this node should do has changed; `relayed` says whether its ports are published by a relay."""
        self._wanted = relayed
        self._changed.set()

    async def run(self) -> None:
        """Stay at the relay until cancelled, with pauses that grow while it cannot be had."""
        failures = 0
        try:
            while True:
                if not self._wanted:
                    await self._changed.wait()
                self._changed.clear()
                try:
                    access = await self._ask() if self._wanted else None
                    if access is None:
                        await self._wait(self._changed, RENEW_S)
                    else:
                        await self._attend(access)
                    failures = 0
                    continue
                except (*_PASSING, msgspec.MsgspecError, ValueError) as error:
                    failures = 1 if self.attached.is_set() else failures + 1
                    _log.warning("the relay cannot be had, tried again in a moment: %s", error or type(error).__name__)
                finally:
                    self.attached.clear()
                await self._wait(asyncio.Event(), _RETRY_S[min(failures, len(_RETRY_S)) - 1])
        finally:
            for task in self._streams:
                task.cancel()
            await asyncio.gather(*self._streams, return_exceptions=True)

    async def _attend(self, access: RelayGrant) -> None:
        """One control connection, until it breaks or no relay is wanted any more."""
        connection = await _connect(access)
        session = _Session(access, connection, _CONNECT_S)
        try:
            async with asyncio.TaskGroup() as group:
                listening = group.create_task(self._listen(session))
                await self._renew(session)
                listening.cancel()
        except ExceptionGroup as errors:
            raise _first(errors) from errors
        finally:
            session.writer.transport.abort()

    async def _listen(self, session: _Session) -> None:
        """Begin, and do what the relay says."""
        hello = await _hear(session)
        if not isinstance(hello, Hello):
            raise ProtocolError("the relay does not begin as one")
        session.parts = (hello.nonce, self._draw(16))
        proof = grants.prove(session.key, "attach", *session.parts)
        session.writer.write(frame(Attach(session.access.grant, session.parts[1], proof)))
        while True:
            message = await _hear(session)
            if isinstance(message, Open):
                self._serve(session, message)
            elif isinstance(message, Beat):
                session.writer.write(frame(Beat()))
            elif isinstance(message, Attached):
                self._take(session, message)
            elif isinstance(message, Refused):
                raise RelayRefusedError(message.message)
            else:
                raise ProtocolError("the relay says nothing like this")

    def _take(self, session: _Session, message: Attached) -> None:
        if not grants.proved(session.newest, message.proof, "attached", *session.parts):
            raise ProtocolError("it is not the relay of this server")
        for one in message.missing:
            if one not in self.missing:
                _log.error("the relay does not publish port %d: %s", one.port, one.reason)
        session.silent_s = message.silent_s
        self.missing = session.missing = message.missing
        self.attached.set()

    async def _renew(self, session: _Session) -> None:
        """Bring a new grant whenever something changed, and before the old one expires. Ends where none is wanted."""
        while True:
            await self._wait(self._changed, AGAIN_S if session.missing else RENEW_S)
            self._changed.clear()
            try:
                access = await self._ask() if self._wanted else None
            except ServerError as error:
                _log.warning("there is no new grant for the relay, asked again in a moment: %s", error)
                await self._wait(asyncio.Event(), AGAIN_S)
                self._changed.set()
                continue
            if access is None or (access.host, access.port) != (session.access.host, session.access.port):
                return
            session.ports = _ports(access)
            if not self.attached.is_set():
                await self.attached.wait()  # the connection has just begun; it breaks where that fails
            session.newest = bytes.fromhex(access.key)
            proof = grants.prove(session.newest, "renew", *session.parts)
            self.attached.clear()
            session.writer.write(frame(Renew(access.grant, proof)))

    def _serve(self, session: _Session, asked: Open) -> None:
        now_there = sum(1 for port in self._streams.values() if port == asked.port)
        if asked.port not in session.ports or now_there >= _STREAMS:
            _log.warning("the relay asks for port %d, which is not served", asked.port)
            session.writer.write(frame(Decline(asked.stream)))
            return
        task = asyncio.create_task(self._stream(session, asked))
        self._streams[task] = asked.port
        task.add_done_callback(lambda done: self._streams.pop(done, None))

    async def _stream(self, session: _Session, asked: Open) -> None:
        """One client."""
        opened: list[Connection] = []
        try:
            async with asyncio.timeout(_CONNECT_S):
                opened.append(await asyncio.open_connection(_LOCAL, asked.port))
                opened.append(await _connect(session.access))
                hello = await receive(opened[1][0], FROM_RELAY)
                if not isinstance(hello, Hello):
                    raise ProtocolError("the relay does not begin as one")
                proof = grants.prove(session.key, "take", asked.stream, hello.nonce)
                opened[1][1].write(frame(Take(asked.stream, proof)))
                if not isinstance(await receive(opened[1][0], FROM_RELAY), Taken):
                    raise ProtocolError("the relay does not want the connection")
            await splice(opened[0], opened[1])
        except (OSError, EOFError, ProtocolError) as error:
            _log.info("a client of port %d is not served: %s", asked.port, error or type(error).__name__)
            if not session.writer.is_closing():
                session.writer.write(frame(Decline(asked.stream)))
        finally:
            for _, writer in opened:
                writer.transport.abort()


async def _connect(access: RelayGrant) -> Connection:
    async with asyncio.timeout(_CONNECT_S):
        reader, writer = await asyncio.open_connection(access.host, access.port)
    keep_alive(writer)
    return reader, writer


async def _hear(session: _Session) -> msgspec.Struct:
    """The relay's next word. TimeoutError where it is silent for too long."""
    async with asyncio.timeout(session.silent_s):
        return await receive(session.reader, FROM_RELAY)


def _ports(access: RelayGrant) -> frozenset[int]:
    return frozenset(one.port for one in msgspec.json.decode(access.grant, type=Grant).ports)


def _first(errors: ExceptionGroup[Exception]) -> Exception:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, ExceptionGroup) else first
