"""A small HTTP/1.1 client for streamed chat completions on this machine, cheap enough not to be what is measured.

One connection is one asyncio.Protocol with httptools' parser; events are stamped in data_received, before anything
else runs. The time to the first token is the time to the first event with non-empty content; the role alone does not
count.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import httptools
import msgspec


class Details(msgspec.Struct):
    """Parts of the prompt's token count."""

    cached_tokens: int | None = 0


class Usage(msgspec.Struct):
    """Token counts as the server reports them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None

    @property
    def cached(self) -> int:
        """Prompt tokens that the server says came from its prefix cache."""
        return (self.prompt_tokens_details.cached_tokens or 0) if self.prompt_tokens_details else 0


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    id: str = ""
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: dict[str, object] | None = None


CHAT_PATH = "/v1/chat/completions"

_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True, eq=False)
class Reply:
    """What came back for one request; times are seconds of time.perf_counter()."""

    sent: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    """The whole body of an answer that is not an event stream."""
    id: str = ""
    contents: list[float] = field(default_factory=list)
    """Arrival time of every event with content."""
    text: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Usage | None = None
    error: dict[str, object] | None = None
    """The error event of a stream that failed after it had begun."""
    done: bool = False
    """The stream's [DONE] arrived."""
    failure: str | None = None
    """Why the answer never ended: the connection was lost, or closed by this side."""
    ended: float = 0.0
    _tail: bytes = b""

    @property
    def ok(self) -> bool:
        """True for a stream that ended with [DONE], without an error and with its usage."""
        return self.status == 200 and self.done and self.error is None and self.usage is not None

    @property
    def complaint(self) -> str:
        """One line on what went wrong with a reply that is not ok."""
        if self.failure is not None:
            return self.failure
        if self.status != 200:
            return f"HTTP {self.status}: {self.body[:300].decode(errors='replace')}"
        if self.error is not None:
            return f"error event: {self.error}"
        return "no [DONE]" if not self.done else "no usage"

    @property
    def ttft(self) -> float:
        """Seconds from sending the request to the first content."""
        return self.contents[0] - self.sent

    @property
    def e2e(self) -> float:
        """Seconds from sending the request to the end of the answer."""
        return self.ended - self.sent

    def take_events(self, data: bytes, now: float) -> None:
        """Read a piece of an event stream that arrived at `now`."""
        events = (self._tail + data).replace(b"\r\n", b"\n").split(b"\n\n")
        self._tail = events.pop()
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    self._take_payload(line[5:].strip(), now)

    def _take_payload(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self.done = True
            return
        chunk = _decode(payload)
        self.id = chunk.id or self.id
        if chunk.usage is not None:
            self.usage = chunk.usage
        if chunk.error is not None:
            self.error = chunk.error
        for choice in chunk.choices:
            content = choice.text if choice.delta is None else choice.delta.content
            if content:
                self.contents.append(now)
                self.text.append(content)
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason


Watch = Callable[["Connection", Reply], None]


class Connection(asyncio.Protocol):
    """One keep-alive connection, which carries one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self._finished: asyncio.Future[None] | None = None
        self._watch: Watch | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._stream = False
        self._host = b""

    @classmethod
    async def open(cls, host: str, port: int) -> Connection:
        """Connect. Raises OSError when nothing listens there."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, host, port)
        connection._host = f"{host}:{port}".encode()
        return connection

    @property
    def usable(self) -> bool:
        """True while another request can be sent."""
        return self.transport is not None and not self.transport.is_closing() and self._reply is None

    async def request(
        self, method: str, path: str, body: bytes = b"", key: str = "", watch: Watch | None = None
    ) -> Reply:
        """Send one request and return its reply when it has ended, in whatever way; read Reply.failure.

        `watch` is called after every piece of the reply that arrives and may close() the connection or stop reading.
        Cancelling the call closes the connection.
        """
        if not self.usable or self.transport is None:
            raise ConnectionError("the connection is closed or in use")
        self._finished = asyncio.get_running_loop().create_future()
        self._watch, self._stream = watch, False
        head = b"%s %s HTTP/1.1\r\nhost: %s\r\nauthorization: Bearer %s\r\ncontent-type: application/json\r\n" % (
            method.encode(),
            path.encode(),
            self._host,
            key.encode(),
        )
        reply = self._reply = Reply(sent=time.perf_counter())
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        try:
            await self._finished
        finally:
            if self._reply is not None:
                self.close("cancelled by the client")
        return reply

    def close(self, why: str = "closed by the client") -> None:
        """Close at once, with data unread or unsent; a request under way ends with this failure."""
        self._end(why)
        if self.transport is not None:
            self.transport.abort()

    def stop_reading(self) -> None:
        """Take nothing more from the socket, as a client that hangs does."""
        if self.transport is not None:
            self.transport.pause_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports are none by inheritance

    def data_received(self, data: bytes) -> None:
        """Stamp and parse what arrived."""
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.MsgspecError) as error:
            self.close(f"not understood: {error}")
            return
        reply = self._reply
        if reply is not None and self._watch is not None:
            self._watch(self, reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request under way, if there is one."""
        self._end(f"connection lost: {exc or 'closed by the server'}")

    # httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header."""
        if self._reply is not None:
            self._reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Decide how the body is read."""
        if self._reply is not None:
            self._reply.status = self._parser.get_status_code()
            self._stream = self._reply.headers.get("content-type", "").startswith("text/event-stream")

    def on_body(self, body: bytes) -> None:
        """Read events, or collect an ordinary body."""
        if self._reply is None:
            return
        if self._stream:
            self._reply.take_events(body, self._now)
        else:
            self._reply.body += body

    def on_message_complete(self) -> None:
        """The reply is whole."""
        keep = self._parser.should_keep_alive()
        self._parser = httptools.HttpResponseParser(self)
        self._end(None)
        if not keep and self.transport is not None:
            self.transport.close()

    def _end(self, failure: str | None) -> None:
        reply, self._reply = self._reply, None
        if reply is None:
            return
        reply.failure = failure
        reply.ended = time.perf_counter()
        if self._finished is not None and not self._finished.done():
            self._finished.set_result(None)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible server on this machine, and the root of its process tree where it is known."""

    label: str
    host: str
    port: int
    model: str
    key: str = ""
    pid: int | None = None


async def request(endpoint: Endpoint, method: str, path: str, body: bytes = b"", watch: Watch | None = None) -> Reply:
    """Send one request over a connection of its own. A refused connection is a Reply with its failure.

    A new connection each time, made before the clock starts: some servers close theirs after a stream, and a request
    that meets the closing would have to be sent twice, which a client that counts bills must never do.
    """
    begun = time.perf_counter()
    try:
        connection = await Connection.open(endpoint.host, endpoint.port)
    except OSError as error:
        return Reply(sent=begun, failure=f"no connection: {error}", ended=time.perf_counter())
    try:
        return await connection.request(method, path, body, endpoint.key, watch)
    finally:
        connection.close()


async def chat(endpoint: Endpoint, body: bytes, watch: Watch | None = None) -> Reply:
    """Send a chat completion request."""
    return await request(endpoint, "POST", CHAT_PATH, body, watch)
