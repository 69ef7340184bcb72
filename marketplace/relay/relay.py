"""The relay: listens on the ports that nodes may publish, and hands every client to the node that has the port.

Nodes connect to it, it connects to nobody. It keeps nothing on disk and asks nobody: what a node may publish is in the
grant that the server signed. Ports and the streams on them outlive the node's control connection, until a newer grant
is without them, somebody's later lease names them, or the grant expires. `sweep`, called every second, is the only
thing here that happens by the clock.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from marketplace.relay import grants
from marketplace.relay.grants import Grant, GrantError
from marketplace.relay.pipe import Connection, keep_alive, splice
from marketplace.relay.wire import (
    FROM_NODE,
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
SECOND = 1_000_000
_BACKLOG = 256 * 1024
"""bytes that may wait for a node that does not read what it is told"""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much of anything there may be, and how long it may last."""

    strangers: int = 128
    """connections that have not shown a grant yet"""
    stranger_s: float = 10.0
    """how long they may take"""
    streams_per_port: int = 256
    streams_per_node: int = 1024
    claim_s: float = 15.0
    """how long a client waits for its node"""
    idle_s: float = 7200.0
    """after so long without a byte a stream ends"""
    beat_s: float = 15.0
    silent_s: float = 50.0
    """after so long without a word a node is taken for gone"""


DEFAULT = Limits()


class _Stream:
    """One client, and the node's connection for it once that has come."""

    def __init__(self, port: _Port, task: asyncio.Task[None], key: bytes, now: int) -> None:
        self.port = port
        self.task = task
        self.key = key
        """of the session that was told of it, which may have ended since"""
        self.moved_at = now
        self.taken: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()


class _Port:
    """A port that a lease gives to a node."""

    def __init__(self, node: _Node, number: int, lease: str) -> None:
        self.node = node
        self.number = number
        self.lease = lease
        self.server: asyncio.Server | None = None
        self.streams: set[_Stream] = set()

    def close(self) -> None:
        """Listen no more, and end what runs."""
        if self.server is not None:
            self.server.close()
        for stream in self.streams:
            stream.task.cancel()


class _Session:
    """A node's control connection."""

    def __init__(self, writer: asyncio.StreamWriter, key: bytes, parts: tuple[str, str], now: int) -> None:
        self.writer = writer
        self.key = key
        self.parts = parts
        self.heard_at = self.beat_at = now

    def say(self, message: msgspec.Struct) -> None:
        """Send, without waiting. A node that does not read is taken for gone."""
        self.writer.write(frame(message))
        if self.writer.transport.get_write_buffer_size() > _BACKLOG:
            self.writer.transport.abort()


class _Node:
    """What a node publishes, and its control connection while it has one."""

    def __init__(self) -> None:
        self.serial = (-1, -1)
        self.expires_at = 0
        self.ports: dict[int, _Port] = {}
        self.session: _Session | None = None

    def streams(self) -> int:
        return sum(len(port.streams) for port in self.ports.values())


class Relay:
    """One relay. Belongs to one event loop."""

    def __init__(
        self,
        secret: bytes,
        ports: range,
        *,
        publish: str = "0.0.0.0",
        limits: Limits = DEFAULT,
        now: Callable[[], int],
        draw: Callable[[int], str] = secrets.token_hex,
    ) -> None:
        """`ports` are those that may be published, at the address `publish`; `now` counts microseconds since 1970."""
        self._secret = secret
        self._range = ports
        self._publish = publish
        self._limits = limits
        self._now = now
        self._draw = draw
        self._nodes: dict[str, _Node] = {}
        self._ports: dict[int, _Port] = {}
        self._waiting: dict[str, _Stream] = {}
        self._strangers: dict[asyncio.Task[None], int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen for nodes; return the port. OSError."""
        self._server = await asyncio.start_server(self._come, host, port)
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    async def close(self) -> None:
        """End everything."""
        if self._server is not None:
            self._server.close()
        for port in self._ports.values():
            port.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._ports.clear()
        self._nodes.clear()

    def published(self) -> dict[int, str]:
        """Leases by the port that they have."""
        return {number: port.lease for number, port in self._ports.items()}

    def counts(self) -> tuple[int, int]:
        """How many connections and streams there are."""
        return len(self._tasks), sum(len(port.streams) for port in self._ports.values())

    def sweep(self) -> None:
        """End what has lasted too long, and send the beat."""
        now, limits = self._now(), self._limits
        for task, since in list(self._strangers.items()):
            if now - since > limits.stranger_s * SECOND:
                task.cancel()
        for stream in [stream for port in self._ports.values() for stream in port.streams]:
            patience = limits.idle_s if stream.taken.done() else limits.claim_s
            if now - stream.moved_at > patience * SECOND:
                stream.task.cancel()
        for name, node in list(self._nodes.items()):
            self._look_after(name, node, now)

    def _look_after(self, name: str, node: _Node, now: int) -> None:
        if node.expires_at <= now:
            if self._changing.locked():
                return  # a grant is being carried out, maybe this node's: looked at again in a second
            for port in list(node.ports.values()):
                self._withdraw(port, "its grant has expired")
            if node.session is not None:
                node.session.writer.transport.abort()
            del self._nodes[name]
        elif node.session is not None and now - node.session.heard_at > self._limits.silent_s * SECOND:
            node.session.writer.transport.abort()
        elif node.session is not None and now - node.session.beat_at > self._limits.beat_s * SECOND:
            node.session.beat_at = now
            node.session.say(Beat())

    def _spawn(self, work: Coroutine[Any, Any, None], writer: asyncio.StreamWriter) -> asyncio.Task[None]:
        """Run with a connection that is broken when the work is cancelled, even before it began."""
        keep_alive(writer)
        task = asyncio.create_task(work)
        self._tasks.add(task)

        def over(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            problem = None if done.cancelled() else done.exception()
            if problem is not None:
                _log.error("a connection broke the relay's rules of itself", exc_info=problem)
            if done.cancelled() or problem is not None:
                writer.transport.abort()

        task.add_done_callback(over)
        return task

    def _come(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._strangers) >= self._limits.strangers:
            writer.transport.abort()
            return
        task = self._spawn(self._serve(reader, writer), writer)
        self._strangers[task] = self._now()
        task.add_done_callback(lambda done: self._strangers.pop(done, None))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a node, whichever it turns out to be."""
        mine = asyncio.current_task()
        assert mine is not None
        nonce = self._draw(16)
        try:
            writer.write(frame(Hello(nonce)))
            first = await receive(reader, FROM_NODE)
            if isinstance(first, Take):
                if await self._hand_over(first, nonce, (reader, writer)):
                    return  # it is the client's from here on
            elif isinstance(first, Attach):
                await self._attend(first, nonce, (reader, writer), lambda: self._strangers.pop(mine, None))
            else:
                raise ProtocolError("a connection begins with a grant or a stream")
        except (GrantError, ProtocolError) as error:
            _log.warning("a node is sent away: %s", error)
            writer.write(frame(Refused(str(error))))
        except (OSError, asyncio.IncompleteReadError):
            pass  # it went
        writer.close()

    async def _attend(self, first: Attach, nonce: str, connection: Connection, known: Callable[[], object]) -> None:
        """Serve a control connection until it ends. GrantError, ProtocolError."""
        reader, writer = connection
        key, parts = grants.key_of(self._secret, first.grant), (nonce, first.nonce)
        if not grants.proved(key, first.proof, "attach", *parts):
            raise GrantError("the grant is not this relay's server's, or not this node's")
        grant = grants.read(first.grant, self._now())
        session = _Session(writer, key, parts, self._now())
        await self._take(session, grant, key)
        known()
        node = self._nodes[grant.node]
        if node.session is not None:
            node.session.writer.transport.abort()
        node.session = session
        _log.info("node %s is here", grant.node)
        try:
            while True:
                await self._obey(session, grant.node, await receive(reader, FROM_NODE))
        finally:
            if node.session is session:
                node.session = None
                _log.info("node %s has gone", grant.node)

    async def _obey(self, session: _Session, name: str, message: msgspec.Struct) -> None:
        session.heard_at = self._now()
        if isinstance(message, Renew):
            key = grants.key_of(self._secret, message.grant)
            if not grants.proved(key, message.proof, "renew", *session.parts):
                raise GrantError("the grant is not this relay's server's, or not this node's")
            grant = grants.read(message.grant, self._now())
            if grant.node != name:
                raise GrantError("the grant is another node's")
            await self._take(session, grant, key)
        elif isinstance(message, Decline):
            stream = self._waiting.get(message.stream)
            if stream is not None and stream.port.node.session is session:
                stream.task.cancel()
        elif not isinstance(message, Beat):
            raise ProtocolError("a control connection says nothing like this")

    async def _take(self, session: _Session, grant: Grant, key: bytes) -> None:
        """Publish what a grant names, and nothing else of its node. GrantError for one that a newer one replaced."""
        async with self._changing:
            node = self._nodes.setdefault(grant.node, _Node())
            if grant.serial < node.serial:
                raise GrantError("a newer grant has replaced this one")
            node.serial, node.expires_at = grant.serial, grant.expires_at
            wanted = {one.port: one.lease for one in grant.ports}
            for port in list(node.ports.values()):
                if wanted.get(port.number) != port.lease:
                    self._withdraw(port, "its lease has ended")
            missing = []
            for number, lease in wanted.items():
                problem = await self._open(node, number, lease)
                if problem is not None:
                    missing.append(NotPublished(number, problem))
        proof = grants.prove(key, "attached", *session.parts)
        session.say(Attached(proof, self._limits.silent_s, missing))

    async def _open(self, node: _Node, number: int, lease: str) -> str | None:
        """Publish one port; return why not."""
        if number in node.ports:
            return None
        if number not in self._range:
            return "it is not among the ports of this relay"
        held = self._ports.get(number)
        if held is not None and held.lease >= lease:
            return "a later lease has it"
        if held is not None:
            self._withdraw(held, "a later lease has it")
        port = _Port(node, number, lease)
        try:
            port.server = await asyncio.start_server(
                lambda reader, writer: self._client(port, reader, writer), self._publish, number
            )
        except OSError as error:
            return f"it cannot be opened: {error.strerror}"
        node.ports[number] = self._ports[number] = port
        return None

    def _withdraw(self, port: _Port, why: str) -> None:
        _log.info("port %d is closed: %s", port.number, why)
        port.close()
        del port.node.ports[port.number]
        del self._ports[port.number]

    def _client(self, port: _Port, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Somebody came to a published port."""
        session, limits = port.node.session, self._limits
        full = len(port.streams) >= limits.streams_per_port or port.node.streams() >= limits.streams_per_node
        if session is None or full or self._ports.get(port.number) is not port:
            writer.transport.abort()
            return
        name = self._draw(32)
        task = self._spawn(self._carry(name, (reader, writer)), writer)
        stream = self._waiting[name] = _Stream(port, task, session.key, self._now())
        port.streams.add(stream)
        task.add_done_callback(lambda done: self._forget(name, stream))
        session.say(Open(name, port.number))

    async def _carry(self, name: str, client: Connection) -> None:
        stream = self._waiting[name]

        def moved() -> None:
            stream.moved_at = self._now()

        node = await stream.taken
        await splice(client, node, moved)

    def _forget(self, name: str, stream: _Stream) -> None:
        self._waiting.pop(name, None)
        stream.port.streams.discard(stream)
        if stream.taken.done() and not stream.taken.cancelled():
            stream.taken.result()[1].transport.abort()  # it may have come in the moment in which the client went

    async def _hand_over(self, asked: Take, nonce: str, connection: Connection) -> bool:
        """Give a node's connection to the client that it is for. False where nobody waits any more. GrantError."""
        stream = self._waiting.get(asked.stream)
        if stream is None:
            return False
        if not grants.proved(stream.key, asked.proof, "take", asked.stream, nonce):
            raise GrantError("the stream is another node's")
        del self._waiting[asked.stream]
        if stream.taken.cancelled():
            return False
        connection[1].write(frame(Taken()))
        stream.moved_at = self._now()
        stream.taken.set_result(connection)
        return True
