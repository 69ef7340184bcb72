"""A client's connection: HTTP/1.1 by httptools' parser, with bounds, and one turn after the other.

uvicorn's server listens, counts and drains; this takes the place of its own protocol, which costs a request more than
all that is done for it before the engine is asked. What it keeps to: a request's task begins when its head is there;
pipelined requests wait for their turn; a head that is too large, too slow or no HTTP is refused in the shape of every
other error.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, cast
from urllib.parse import unquote

import httptools

from gateway.http.burst import Burst
from gateway.http.turn import Turn

log = logging.getLogger(__name__)

HEAD_BYTES = 64 * 1024
"""Most bytes of request line and headers."""
HEAD_SECONDS = 30.0
"""A connection that has not sent a whole request head for this long is closed."""
_FRAMING = (b"content-length", b"transfer-encoding")


DEFECT = "The server had an error while processing your request."
"""What is said of a defect of an application, which is in the log."""
Complain = Callable[[int, str], bytes]
"""The JSON body of an error, from its status and what is wrong."""


class Application(Protocol):
    """An ASGI application."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""


class ServerState(Protocol):
    """What connections share with the server that made them."""

    connections: set[Any]
    tasks: set[asyncio.Task[None]]
    default_headers: list[tuple[bytes, bytes]]
    total_requests: int


class Connection(asyncio.Protocol):
    """Belongs to its event loop."""

    def __init__(
        self,
        app: Application,
        state: ServerState,
        burst: Burst,
        complain: Complain,
        *,
        keep_alive_s: float,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """keep_alive_s: how long the connection stays open after a response without a next request."""
        self.full_since: float | None = None
        """From when on, by the loop's clock, the client has not taken what was written; None while there is room."""
        self._app = app
        self._state = state
        self._burst = burst
        self._complain = complain
        self._keep_alive_s = keep_alive_s
        self._loop = loop
        self._parser: Any = self._new_parser()
        self._offered = False
        """The head offers to go on in another protocol, which the parser takes for the end of HTTP."""
        self._transport: asyncio.Transport
        self._server: tuple[str, int] | None = None
        self._client: tuple[str, int] | None = None
        self._turns: deque[Turn] = deque()
        """Those that are not over; the first is being answered."""
        self._arriving: Turn | None = None
        """The one whose body is still on its way."""
        self._refusal: str | None = None
        """Why nothing more is understood on this connection."""
        self._complaint = "Invalid HTTP request received."
        self._closing = False
        self._reading = True
        # The head that is being read.
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._expects = False
        self._patience: asyncio.TimerHandle | None = None
        self._patient_until = 0.0

    # -- what the transport says -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are none by inheritance
        self._server, self._client = _address(transport, "sockname"), _address(transport, "peername")
        self._state.connections.add(self)
        self._patient_until = self._loop.time() + HEAD_SECONDS
        self._look()

    def data_received(self, data: bytes) -> None:
        """Parse, and begin with what is there."""
        if self._refusal is not None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._ignore_offer(data[offer.args[0] :])
        except httptools.HttpParserError:
            self._refuse(self._complaint)

    def pause_writing(self) -> None:
        """The client does not keep up."""
        self.full_since = self._loop.time()

    def resume_writing(self) -> None:
        """It has caught up."""
        self.full_since = None
        if self._turns:
            self._turns[0].resume()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left."""
        self._state.connections.discard(self)
        self.full_since = None
        self._stop_looking()
        self._refusal = "the connection is lost"
        turns, self._turns = self._turns, deque()
        for turn in turns:
            turn.lost()
        self._parser = None  # it refers to this

    # -- what the parser says ----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        self._url, self._headers, self._head_bytes, self._expects = b"", [], 0, False
        self._patient_until = self._loop.time() + HEAD_SECONDS
        self._arriving = None

    def on_url(self, url: bytes) -> None:
        """A piece of the request's target."""
        self._url += url
        self._head_bytes += len(url)
        if self._head_bytes > HEAD_BYTES:
            self._too_large()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        name = name.lower()
        self._headers.append((name, value))
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > HEAD_BYTES:
            self._too_large()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects = True

    def on_headers_complete(self) -> None:
        """The head is whole: the request waits for its turn, or has it."""
        parser = self._parser
        path, query = _target(self._url)
        version = parser.get_http_version()
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "server": self._server,
            "client": self._client,
            "scheme": "http",
            "root_path": "",
            "method": parser.get_method().decode("ascii"),
            "path": unquote(path) if "%" in path else path,
            "raw_path": path.encode("ascii"),
            "query_string": query,
            "headers": self._headers,
            "state": {},
        }
        keep = version == "1.1" and not self._closing and parser.should_keep_alive()
        self._offered = parser.should_upgrade()
        turn = self._arriving = Turn(self, scope, keep=keep, expects=self._expects)
        scope["state"]["turn"] = turn
        self._turns.append(turn)
        if len(self._turns) == 1:
            self._start(turn)
        else:
            self.enough()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if self._arriving is not None and not self._arriving.over:
            self._arriving.take(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        if self._arriving is not None and not self._offered:
            self._arriving.complete()
            self._arriving = None

    # -- offers of other protocols, of which clients such as Java's make one with each request -----------

    def _new_parser(self) -> Any:
        parser: Any = httptools.HttpRequestParser(self)
        # A client that said "close" and sends more is answered, and not told that it is no HTTP.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _ignore_offer(self, rest: bytes) -> None:
        """Read the body of the request as if nothing had been offered, which HTTP lets a server do."""
        self._offered = False
        framing = b"".join(b"%b: %b\r\n" % header for header in self._headers if header[0] in _FRAMING)
        self._parser = httptools.HttpRequestParser(_Body(self))
        self.data_received(b"POST / HTTP/1.1\r\n" + framing + b"\r\n" + rest)

    def body_ended(self) -> None:
        """The body is whole, and what comes next is a request again."""
        self._parser = self._new_parser()
        self.on_message_complete()

    def body_followed(self) -> None:
        """More came with it, which nobody could read: whoever sent it is told to send it again."""
        if self._turns:
            self._turns[-1].keep = False
        else:
            self._transport.close()

    # -- what a turn asks for ----------------------------------------------------------------------

    def put(self, data: bytes) -> None:
        """Send, together with what others send in this moment."""
        self._burst.put(self._transport, data)

    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """The date."""
        return self._state.default_headers

    def more(self) -> None:
        """Take what the client sends, but no more requests than one that waits for its turn."""
        if not self._reading and len(self._turns) <= 1 and not self._transport.is_closing():
            self._reading = True
            self._transport.resume_reading()

    def enough(self) -> None:
        """Take nothing from the client for now."""
        if self._reading and not self._transport.is_closing():
            self._reading = False
            self._transport.pause_reading()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def ended(self, turn: Turn) -> None:
        """A response is complete: the next, or the end, or a wait."""
        self._state.total_requests += 1
        if not self._turns or self._turns[0] is not turn:  # the connection was lost meanwhile
            return
        self._turns.popleft()
        if not turn.keep or (self._closing and not self._turns):
            self._transport.close()
        elif self._turns:
            self._start(self._turns[0])
        elif self._refusal is not None:
            self._say_no(self._refusal)
        else:
            self.more()
            self._patient_until = self._loop.time() + self._keep_alive_s

    # -- what the server asks for ------------------------------------------------------------------

    def shutdown(self) -> None:
        """Answer what has come, and close."""
        self._closing = True
        if not self._turns:
            self._transport.close()
        else:
            self._turns[-1].keep = False

    # -- a request's task --------------------------------------------------------------------------

    def _start(self, turn: Turn) -> None:
        task = self._loop.create_task(self._run(turn))
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    async def _run(self, turn: Turn) -> None:
        try:
            await self._app(turn.scope, turn.receive, turn.send)
        except asyncio.CancelledError:  # by the end of the server
            self._transport.abort()
            raise
        except Exception:  # supervision boundary: an application's defect is answered, and ends nothing else
            log.exception("%s %s failed", turn.scope["method"], turn.scope["path"])
        finally:
            turn.scope["state"].pop("turn", None)  # each refers to the other
        if not turn.over and not turn.gone:
            if turn.begun:
                self._transport.abort()  # who reads it must not take it for whole
            else:
                body = self._complain(500, DEFECT)
                shape = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
                turn.begin(500, shape)
                turn.end(body)

    # -- heads that are too large, too slow, or none -----------------------------------------------

    def _too_large(self) -> None:
        self._complaint = f"The head of the request is larger than {HEAD_BYTES} bytes."
        raise ValueError(self._complaint)

    def _refuse(self, message: str) -> None:
        """Nothing more is understood: say so when those before are answered."""
        self._refusal = message
        if self._arriving is not None and self._turns and self._turns[-1] is self._arriving:
            turn = self._turns.pop()  # its body is what is wrong, and its end is not known
            self._arriving = None
            if turn.begun:
                self._transport.abort()
                return
            turn.lost()
        if not self._turns:
            self._say_no(message)

    def _say_no(self, message: str) -> None:
        body = self._complain(400, message)
        head = (
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        )
        self._transport.write(head + body)
        self._transport.close()

    def _look(self) -> None:
        """One timer for the life of the connection: it looks whether the client was waited for long enough."""
        now = self._loop.time()
        busy = bool(self._turns)
        if not busy and now >= self._patient_until:
            self._transport.abort()
            return
        # No longer than for a head, which may begin in a moment and then has less time than an idle connection.
        wait = HEAD_SECONDS if busy else min(HEAD_SECONDS, self._patient_until - now)
        self._patience = self._loop.call_later(wait, self._look)

    def _stop_looking(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


class _Body:
    """Told by a parser what the body of one request is."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._ended = False
        self.on_body = connection.on_body

    def on_message_begin(self) -> None:
        """A request begins: the one whose body it is, or another."""
        if self._ended:
            self._connection.body_followed()

    def on_message_complete(self) -> None:
        """The body is whole."""
        if not self._ended:
            self._ended = True
            self._connection.body_ended()


def _target(url: bytes) -> tuple[str, bytes]:
    """Path and query of a request's target. Raises ValueError or httptools' error for what is none."""
    if url[:1] == b"/" and b"?" not in url and b"#" not in url:
        return url.decode("ascii"), b""
    parsed = httptools.parse_url(url)
    return (parsed.path or b"/").decode("ascii"), parsed.query or b""


def _address(transport: asyncio.BaseTransport, side: str) -> tuple[str, int] | None:
    address = transport.get_extra_info(side)
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None
