"""uvicorn, made to measure: an HTTP protocol with bounds and JSON errors, and a server whose signals are ours."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.inference.errors import ApiError
from gateway.inference.line import Line

HEAD_BYTES = 64 * 1024
"""Most bytes of request line and headers."""
HEAD_SECONDS = 30.0
"""A connection that has not sent a whole request head for this long is closed."""


class FrontProtocol(HttpToolsProtocol):
    """HTTP/1.1 connections: bounded heads, no half-open connections, JSON for what is not HTTP, a transport to cut."""

    _line: Line
    _head_bytes = 0
    _head_open = False
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Put a line before the transport, and where responses find it: they write to it themselves."""
        self._line = Line(transport, self.loop.time)
        super().connection_made(self._line)
        self.app_state = {**self.app_state, "line": self._line}
        self._await_head()

    def pause_writing(self) -> None:
        """The client does not keep up."""
        super().pause_writing()
        self._line.pause()

    def resume_writing(self) -> None:
        """It has caught up."""
        super().resume_writing()
        self._line.resume()

    def data_received(self, data: bytes) -> None:
        """Parse; a head that came only in part may take so long and no longer."""
        super().data_received(data)
        if self._head_open:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._head_arrived()
        super().connection_lost(exc)
        self._line.lost()

    def on_message_begin(self) -> None:
        """A request begins."""
        self._head_bytes = 0
        self._head_open = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of the request's target."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._head_arrived()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is whole, too: whoever reads it need not watch the time."""
        super().on_message_complete()
        self.scope["state"]["whole"] = True

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP in the shape of every other error."""
        self._head_arrived()
        body = ApiError(400, msg, code="invalid_request").body("")
        head = (
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        )
        self.transport.write(head + body)
        self.transport.close()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES:
            raise ValueError("the request head is too large")

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _head_arrived(self) -> None:
        self._head_open = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        self.transport.abort()


class FrontServer(uvicorn.Server):
    """A server that leaves signals to its owner and says when it listens."""

    on_listening: Callable[[], None] = staticmethod(lambda: None)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The owner handles signals: uvicorn would raise them again after its shutdown, before ours is done."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets=sockets)
        self.on_listening()


def make_server(app: Any, *, backlog: int, drain_s: float, trusted_proxies: Sequence[str] = ()) -> FrontServer:
    """A server for sockets that are passed to `serve`. A caller's address is that of the connection; where it comes
    from one of the addresses or networks `trusted_proxies`, the last in X-Forwarded-For that is none of them."""
    config = uvicorn.Config(
        app,
        http=FrontProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # From nobody else: a forged X-Forwarded-For must not get past the addresses that a key is bound to.
        proxy_headers=bool(trusted_proxies),
        forwarded_allow_ips=list(trusted_proxies),
        backlog=backlog,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(drain_s)),
    )
    return FrontServer(config)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not yet listening. Raises OSError, EADDRINUSE where somebody else listens."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.setblocking(False)
    except OSError:
        bound.close()
        raise
    return bound
