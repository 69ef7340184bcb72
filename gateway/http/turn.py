"""One request on a connection and the response to it: an ASGI exchange, whose response can also be written at once.

ASGI's `send` is a coroutine and a dictionary per message. An answer that streams writes with `begin`, `write` and `end`
instead: plain calls, which need no task of their own to be carried out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

Headers = Iterable[tuple[bytes, bytes]]

READ_AHEAD = 64 * 1024
"""Bytes of a body that are taken before the application asks for them."""
_BODILESS = frozenset({204, 304})
_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b" % (status.value, status.phrase.encode("ascii")) for status in HTTPStatus
}


class Wire(Protocol):
    """The connection, as far as a turn goes."""

    full_since: float | None

    def put(self, data: bytes) -> None:
        """Send."""

    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """Of every response."""

    def more(self) -> None:
        """Take what the client sends."""

    def enough(self) -> None:
        """Take nothing from the client for now."""

    def ended(self, turn: Turn) -> None:
        """The response is complete."""

    def abort(self) -> None:
        """Close at once."""


def _nothing() -> None:
    """Nobody wants to know."""


class _Shape(NamedTuple):
    """How a response begins and is framed."""

    head: bytes
    """Without the line breaks at its end."""
    keep: bool = False
    """The connection stays open."""
    mute: bool = False
    """No body is sent."""
    chunked: bool = False
    length: int = 0
    """Of the body; negative where nobody said."""


_UNPREPARED = _Shape(b"")


class Turn:
    """Belongs to its event loop. Writing out of order is a RuntimeError; to a client that has left, nothing at all."""

    __slots__ = (
        "_body", "_chunked", "_head", "_left", "_mute", "_news", "_prepared", "_reader", "_room", "_wire", "begun",
        "expects", "gone", "keep", "on_lost", "on_room", "over", "scope", "whole",
    )  # fmt: skip

    def __init__(self, wire: Wire, scope: MutableMapping[str, Any], *, keep: bool, expects: bool) -> None:
        """keep: the connection may stay open afterwards. expects: the client waits for word before it sends a body."""
        self.scope = scope
        self.keep = keep
        self.expects = expects
        self.whole = False
        """The request's body has come to its end."""
        self.gone = False
        """The client has left, or the connection was lost."""
        self.begun = False
        """The response has a head."""
        self.over = False
        """The response is complete."""
        self.on_room: Callable[[], None] = _nothing
        """Called when there is room again."""
        self.on_lost: Callable[[], None] = _nothing
        """Called when the client has left, once."""
        self._wire = wire
        self._body = b""
        self._news = False
        """There is something that the reader has not been told."""
        self._reader: asyncio.Event | None = None
        """What who reads waits for, once somebody has to."""
        self._room: asyncio.Future[None] | None = None
        self._prepared = _UNPREPARED
        self._head: bytes | None = None
        self._chunked = self._mute = False
        self._left = 0

    @property
    def full_since(self) -> float | None:
        """From when on, by the loop's clock, the client has not taken what was written; None while there is room."""
        return self._wire.full_since

    def leave(self) -> None:
        """Who listened does so no longer."""
        self.on_room = self.on_lost = _nothing

    def abort(self) -> None:
        """Close the connection at once."""
        self._wire.abort()

    # -- the response ------------------------------------------------------------------------------

    def begin(self, status: int, headers: Headers) -> None:
        """Set the head, which goes out with what is written first. Names are in lower case; a header with a line break
        in it is a ValueError, and nothing is set."""
        if self.begun:
            raise RuntimeError("the response has begun already")
        self.prepare(status, headers)
        self.begin_as_prepared()

    def begin_as_prepared(self, header: bytes = b"") -> None:
        """Set the head that was prepared last, with one more line of the caller's, which has no line break in it."""
        if self.begun or not self._prepared.head:
            raise RuntimeError("the response has begun already, or was not prepared")
        shape = self._prepared
        end = b"\r\n" + header + b"\r\n\r\n" if header else b"\r\n\r\n"
        self.begun, self.keep, self._head = True, shape.keep, shape.head + end
        self._mute, self._chunked, self._left = shape.mute, shape.chunked, shape.length

    def prepare(self, status: int, headers: Headers) -> None:
        """Work out a head, of a response that begins later with it or in another way. Raises ValueError as `begin`."""
        lines, length = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d " % status], -1
        # Who was never told to send the body may send something else.
        keep = self.keep and (self.whole or not self.expects)
        for name, value in (*self._wire.default_headers(), *headers):
            if name == b"content-length":
                length = int(value)
            elif name == b"connection":
                keep = keep and value.lower() != b"close"
                continue
            elif name == b"transfer-encoding":
                continue  # how a body is framed is decided here
            lines.append(b"%b: %b" % (name, value))
        mute = self.scope["method"] == "HEAD" or status in _BODILESS
        chunked = not mute and length < 0 and self.scope["http_version"] == "1.1"
        if chunked:
            lines.append(b"transfer-encoding: chunked")
        elif not mute and length < 0:
            keep = False  # an old client knows the end of the body by the end of the connection
        if not keep:
            lines.append(b"connection: close")
        head = b"\r\n".join(lines)
        ends = len(lines) - 1
        if head.count(b"\n") != ends or head.count(b"\r") != ends or b"\0" in head:
            raise ValueError("a header of the response has a line break in it")
        self._prepared = _Shape(head, keep, mute, chunked, length)

    def write(self, data: bytes) -> None:
        """Write a piece of the body, and the head before the first; with nothing, the head alone."""
        if not self.begun or self.over:
            raise RuntimeError("there is no response to write to")
        self._put(self._framed(data))

    def end(self, data: bytes = b"") -> None:
        """Write the last piece. A body that is not as long as was announced closes the connection: RuntimeError."""
        if not self.begun or self.over:
            raise RuntimeError("there is no response to end")
        framed = self._framed(data)
        self.over = True
        self._put(framed + b"0\r\n\r\n" if self._chunked else framed)
        if self._left > 0 and not self._mute:
            self._wire.abort()
            raise RuntimeError(f"the body lacks {self._left} bytes of what its head announced")
        self._tell_reader()
        self._wire.ended(self)

    def _put(self, framed: bytes) -> None:
        if self._head is not None:
            framed, self._head = self._head + framed, None
        if framed and not self.gone:
            self._wire.put(framed)

    def _framed(self, data: bytes) -> bytes:
        if self._mute or not data:
            return b""
        if self._chunked:
            return b"%x\r\n%b\r\n" % (len(data), data)
        if self._left >= 0:
            self._left -= len(data)
            if self._left < 0:
                self._wire.abort()
                raise RuntimeError("the body is longer than its head announced")
        return data

    # -- the other way to say it -------------------------------------------------------------------

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """ASGI's `send`."""
        if self.gone:
            return
        if message["type"] == "http.response.start":
            self.begin(message["status"], message.get("headers", ()))
            # With the body where that follows at once; a client may wait for the head of a stream that is silent.
            asyncio.get_running_loop().call_soon(self._flush)
        elif message["type"] != "http.response.body":
            raise RuntimeError(f"{message['type']} is not known here")
        elif message.get("more_body", False):
            self.write(message.get("body", b""))
            if self.full_since is not None:
                await self.drained()
        else:
            self.end(message.get("body", b""))

    def _flush(self) -> None:
        if self._head is not None and not self.over:
            self.write(b"")

    async def drained(self) -> None:
        """Return when the client has taken what was written, or has left."""
        while self.full_since is not None and not self.gone:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    async def receive(self) -> dict[str, Any]:
        """ASGI's `receive`: what of the body has come, then, when there is no more of it, the end of the turn."""
        if self.expects and not self.begun and not self.gone:
            self.expects = False
            self._wire.put(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self.gone and not self.over:
            self._wire.more()
            if not self._news:
                self._reader = self._reader or asyncio.Event()
                await self._reader.wait()
        if self.gone or self.over:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self.taken(), "more_body": not self.whole}

    def taken(self) -> bytes:
        """What of the body has come and was not read yet, without a wait for more."""
        body, self._body, self._news = self._body, b"", False
        if self._reader is not None:
            self._reader.clear()
        return body

    # -- what the connection says ------------------------------------------------------------------

    def take(self, data: bytes) -> None:
        """A piece of the request's body."""
        self._body = self._body + data if self._body else data
        if len(self._body) > READ_AHEAD:
            self._wire.enough()
        self._tell_reader()

    def complete(self) -> None:
        """The request is whole."""
        self.whole = True
        self._tell_reader()

    def _tell_reader(self) -> None:
        self._news = True
        if self._reader is not None:
            self._reader.set()

    def resume(self) -> None:
        """The client has caught up."""
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self.on_room()

    def lost(self) -> None:
        """The connection is gone."""
        self.gone = True
        self._tell_reader()
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        listener = self.on_lost
        self.leave()
        listener()
