"""A connection under test: its transport and its clock are a test's own, and its client is one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httptools

from gateway.http.burst import Burst
from gateway.http.connection import Connection
from gateway.server import error_body

App = Callable[[Any, Any, Any], Awaitable[None]]
Step = Callable[["Client"], Awaitable[None]]


class Transport(asyncio.Transport):
    """Remembers what was written, and in which state it is."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.closed = self.aborted = False
        self.reading = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"sockname": ("127.0.0.1", 80), "peername": ("192.0.2.1", 4711)}.get(name, default)

    def write(self, data: Any) -> None:
        assert not self.closed, "written after the end"
        self.sent += bytes(data)

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Loop:
    """The running loop, with a clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.create_task = asyncio.get_running_loop().create_task

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> SimpleNamespace:
        timer = (self.now + delay, callback)
        self.timers.append(timer)
        return SimpleNamespace(cancel=lambda: timer in self.timers and self.timers.remove(timer))

    def advance(self, seconds: float) -> None:
        """Let time pass, and what is due come."""
        until = self.now + seconds
        while due := [timer for timer in self.timers if timer[0] <= until]:
            timer = min(due, key=lambda one: one[0])
            self.timers.remove(timer)
            self.now = timer[0]
            timer[1]()
        self.now = until


class Answer:
    """Parses the responses of a connection; one per request, whose methods have to be known."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.complete = False
        self.parser: Any = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode()] = value.decode()

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True


class Client:
    """A connection with a transport that is none."""

    def __init__(self, app: App, keep_alive_s: float = 75.0) -> None:
        self.loop = Loop()
        self.transport = Transport()
        self.state = SimpleNamespace(
            connections=set(), tasks=set(), default_headers=[(b"date", b"today")], total_requests=0
        )
        self.burst = Burst()
        loop: Any = self.loop  # as much of one as it uses
        self.connection = Connection(app, self.state, self.burst, error_body, keep_alive_s=keep_alive_s, loop=loop)
        self.connection.connection_made(self.transport)

    async def feed(self, *pieces: bytes) -> None:
        """Receive, and let everything run that can."""
        for piece in pieces:
            self.connection.data_received(piece)
            await settle()

    def answers(self) -> list[Answer]:
        """Every response so far that has a length; the last may have to be read to the end of the connection."""
        found: list[Answer] = []
        for part in self.transport.sent.split(b"HTTP/1.1 ")[1:]:
            answer = Answer()
            answer.parser.feed_data(b"HTTP/1.1 " + part)
            found.append(answer)
        return found

    def answer(self) -> Answer:
        """The only response."""
        (answer,) = self.answers()
        return answer


async def settle() -> None:
    """Everything that is ready runs."""
    for _ in range(12):
        await asyncio.sleep(0)


def run(app: App, step: Step, **options: Any) -> None:
    """Play a scene."""

    async def scene() -> None:
        client = Client(app, **options)
        await step(client)
        if not client.transport.closed:
            client.connection.connection_lost(None)
        await settle()
        assert not client.state.connections or client.transport.closed

    asyncio.run(scene())


async def read(receive: Any) -> bytes:
    """The whole body."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError
        body += message["body"]
        if not message["more_body"]:
            return body


async def reply(send: Any, body: bytes, status: int = 200, *headers: tuple[bytes, bytes]) -> None:
    """A response of known length."""
    head = [(b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Say what was asked."""
    body = await read(receive)
    said = [scope["method"], scope["path"], scope["query_string"].decode(), body.decode()]
    await reply(send, json.dumps(said).encode())


GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


def post(body: bytes, path: bytes = b"/", *headers: bytes) -> bytes:
    lines = [b"POST %b HTTP/1.1" % path, b"host: x", b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
