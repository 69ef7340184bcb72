"""A relay on the loopback interface, nodes that connect to it, and somebody who comes to their ports."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from marketplace.agent.relayed import Relayed
from marketplace.relay import grants
from marketplace.relay.access import RelayGrant
from marketplace.relay.grants import Grant, GrantedPort
from marketplace.relay.relay import DEFAULT, Limits, Relay

SECRET = b"s" * 32
HOUR_US = 3_600_000_000
LOCAL = "127.0.0.1"
"""where machines are, and where the relay is called by nodes"""
PUBLIC = "127.0.0.2"
"""where renters come to"""


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that runs in an event loop of its own."""

    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


async def until(true: Callable[[], object]) -> None:
    """Let this loop's other tasks go on, and its sockets be heard, until they have brought a condition about."""
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 - there is no event for what sockets do
            await asyncio.sleep(0)


class Book:
    """The server's part: which node has which port by which lease."""

    def __init__(self, port: int, clock: Callable[[], int]) -> None:
        self.port = port
        self.clock = clock
        self.secret = SECRET
        self.revs = itertools.count(1)
        self.leases: dict[str, dict[int, str]] = {}

    def sign(self, node: str, leases: dict[int, str] | None = None, *, rev: int | None = None) -> RelayGrant:
        """A grant of an hour."""
        given = self.leases.get(node, {}) if leases is None else leases
        grant = Grant(
            node=node,
            epoch=1,
            rev=next(self.revs) if rev is None else rev,
            expires_at=self.clock() + HOUR_US,
            ports=[GrantedPort(port, lease) for port, lease in given.items()],
        )
        text = grants.write(grant)
        return RelayGrant(host=LOCAL, port=self.port, grant=text, key=grants.key_of(self.secret, text).hex())


class Ground:
    """A relay whose clock a test sets, with the server's book."""

    relay: Relay
    book: Book

    def __init__(self) -> None:
        self.now = 1_000 * HOUR_US
        self.asked: list[str] = []

    def clock(self) -> int:
        return self.now

    def pass_s(self, seconds: float) -> None:
        """Time passes, and the relay looks at the clock."""
        self.now += round(seconds * 1_000_000)
        self.relay.sweep()

    @contextlib.asynccontextmanager
    async def node(self, name: str) -> AsyncIterator[Relayed]:
        """The relay's half of an agent, attached; pauses between its attempts are short."""

        async def ask() -> RelayGrant:
            self.asked.append(name)
            return self.book.sign(name)

        async def wait(event: asyncio.Event, seconds: float) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01 if seconds < 10 else 30):
                    await event.wait()

        made = Relayed(ask, wait=wait)
        made.hear(True)
        running = asyncio.create_task(made.run())
        try:
            await until(made.attached.is_set)
            yield made
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


@contextlib.asynccontextmanager
async def relay_ground(ports: range, limits: Limits = DEFAULT) -> AsyncIterator[Ground]:
    """A relay that listens."""
    ground = Ground()
    made = ground.relay = Relay(SECRET, ports, publish=PUBLIC, limits=limits, now=ground.clock)
    ground.book = Book(await made.start(LOCAL, 0), ground.clock)
    try:
        yield ground
    finally:
        await made.close()
        await until(lambda: made.counts() == (0, 0))


@contextlib.asynccontextmanager
async def echo(port: int, *, greeting: bytes = b"") -> AsyncIterator[list[asyncio.StreamWriter]]:
    """A machine's program: says back what it hears, and once all was said, that it was."""
    there: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there.append(writer)
        with contextlib.suppress(OSError):
            writer.write(greeting)
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            writer.write(b".end")
            await writer.drain()
        writer.close()
        there.remove(writer)

    server = await asyncio.start_server(serve, LOCAL, port)
    try:
        yield there
    finally:
        server.close()
        for writer in there:
            writer.transport.abort()
        await until(lambda: not there)


def free_port() -> int:
    """A port that is free where machines are, and where renters come to."""
    with socket.socket() as probe, socket.socket() as other:
        probe.bind((LOCAL, 0))
        found: int = probe.getsockname()[1]
        other.bind((PUBLIC, found))
        return found
