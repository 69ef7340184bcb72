"""One HTTP exchange on plain ASGI: ids, body with a limit, responses with the headers that clients read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from gateway.http.turn import Turn
from gateway.inference import errors
from gateway.inference.errors import ApiError, Headers

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

API_VERSION = b"2020-10-01"
"""What `openai-version` has said since there is one; SDKs log it."""

_DRAIN_FACTOR = 8
_DRAIN_SECONDS = 5.0


class ClientGone(Exception):  # noqa: N818 - not an error of ours: nobody is there to be told
    """The client closed the connection before there was an answer."""


class Exchange:
    """A request and the answer to it, under one request id."""

    def __init__(self, scope: Scope, request_id: str) -> None:
        self.scope = scope
        self.request_id = request_id
        self.turn: Turn = scope["state"]["turn"]
        """The request on its connection, and the response to it."""
        self.began = time.perf_counter()
        self.status = 0
        """Status that was sent, 0 before."""
        self.extra: list[tuple[bytes, bytes]] = []
        """Headers learnt on the way, sent with whatever the answer is."""

    def header(self, name: bytes) -> str:
        """First value of a request header (lower-case name), empty when it is not there."""
        for key, value in self.scope["headers"]:
            if key == name:
                return str(value, "latin-1")
        return ""

    def credential(self) -> str:
        """The API key as presented: `Authorization: Bearer …` or `X-API-Key: …`; empty when there is none."""
        scheme, _, token = self.header(b"authorization").partition(" ")
        if scheme.lower() == "bearer" and token.strip():
            return token.strip()
        return self.header(b"x-api-key").strip()

    async def body(self, limit: int, timeout_s: float) -> bytes:
        """Read the body. Raises ApiError (413, 408) and ClientGone.

        A body over the limit is read to its end, within reason, before it is refused: an answer to a client that is
        still sending is lost with the connection.
        """
        if self.turn.whole:
            return self._whole(limit)
        if self.turn.expects:
            declared = self.header(b"content-length")
            if declared.isdigit() and int(declared) > limit:
                raise errors.too_large(limit)
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(timeout_s) as patience:
                while True:
                    message = await self.turn.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    if size <= limit:
                        chunks.append(chunk)
                    elif chunks:
                        chunks.clear()
                        patience.reschedule(asyncio.get_running_loop().time() + _DRAIN_SECONDS)
                    if not message.get("more_body", False) or size > limit * _DRAIN_FACTOR:
                        break
        except TimeoutError as error:
            if size <= limit:
                raise errors.request_timeout(timeout_s) from error
        if size > limit:
            raise errors.too_large(limit)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _whole(self, limit: int) -> bytes:
        """A body that has come in whole already: nothing is waited for, and nothing has to watch the time."""
        if self.turn.gone:
            raise ClientGone
        body = self.turn.taken()
        if len(body) > limit:
            raise errors.too_large(limit)
        return body

    async def json(self, status: int, body: bytes, headers: Headers = ()) -> None:
        """Send a whole JSON answer."""
        await self.text(status, body, b"application/json", headers)

    async def text(self, status: int, body: bytes, content_type: bytes, headers: Headers = ()) -> None:
        """Send a whole answer of any type."""
        shape = ((b"content-type", content_type), (b"content-length", b"%d" % len(body)))
        self.begin(status, (*shape, *headers))
        self.turn.end(body)

    def begin(self, status: int, headers: Headers) -> None:
        """Begin an answer whose body the caller writes."""
        self.turn.prepare(status, self._head(headers))
        self._begin_as_prepared(status)

    async def fail(self, error: ApiError) -> None:
        """Send an error as an ordinary HTTP answer."""
        await self.json(error.status, error.body(self.request_id), error.headers)

    def prepare_stream(self) -> None:
        """Work out the head of an event stream, while the engine works on what it will say."""
        stream = (
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        )
        self.turn.prepare(200, self._head(stream))

    def start_stream(self) -> None:
        """Begin the event stream that was prepared."""
        self._begin_as_prepared(200)

    def _begin_as_prepared(self, status: int) -> None:
        """Begin, and say how many milliseconds it took to get there."""
        self.status = status
        self.turn.begin_as_prepared(b"openai-processing-ms: %d" % round((time.perf_counter() - self.began) * 1000))

    def _head(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Headers of every answer, then those learnt on the way, then the given ones."""
        return [
            (b"x-request-id", self.request_id.encode("ascii")),
            (b"openai-version", API_VERSION),
            *self.extra,
            *headers,
        ]
