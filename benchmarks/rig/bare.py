"""A server that only sends: streams of ready-made chunks, with nothing known, counted, written or asked behind them.

What it needs is what this machine asks for the way itself: a request read, a socket written, a client woken. The figure
of a gateway beside it, from the same run and the same client, says how much of it is the gateway's.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import httptools
import uvloop

from benchmarks.rig.http import Endpoint
from benchmarks.rig.listener import free_port
from benchmarks.rig.processes import ServerProcess

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1800000000,'
    b'"model":"%s","choices":[{"index":0,"delta":{%s},"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
)
TEXT = CHUNK % (b"bare", b'"content":" word"')
END = (
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}],'
    b'"usage":{"prompt_tokens":1,"completion_tokens":%d}}\n\ndata: [DONE]\n\n'
)


def framed(data: bytes) -> bytes:
    """Return a chunk of HTTP's chunked transfer."""
    return b"%x\r\n%s\r\n" % (len(data), data)


class Stream(asyncio.Protocol):
    """One connection: each request is answered with so many chunks, the first after a time in which the whole server
    sleeps, an interval between them."""

    def __init__(self, tokens: int, interval_s: float, first_s: float = 0.0) -> None:
        self._tokens, self._interval_s, self._first_s = tokens, interval_s, first_s
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._sent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse what arrived."""
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        """Answer."""
        assert self._transport is not None
        method, self._parser = self._parser.get_method(), httptools.HttpRequestParser(self)
        if method == b"GET":  # somebody asks whether it listens
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return
        if self._first_s:
            time.sleep(self._first_s)  # a timer of the loop would come up to a millisecond late
        self._sent = 1
        self._transport.write(HEAD + framed(TEXT))
        self._next()

    def _next(self) -> None:
        if self._interval_s:
            asyncio.get_running_loop().call_later(self._interval_s, self._send)
        else:
            self._send()

    def _send(self) -> None:
        assert self._transport is not None
        if self._transport.is_closing():
            return
        if self._sent == self._tokens:
            self._transport.write(framed(END % self._tokens) + b"0\r\n\r\n")
            return
        self._sent += 1
        self._transport.write(framed(TEXT))
        self._next()


def start(folder: Path, tokens: int, interval_s: float, first_s: float = 0.0) -> tuple[ServerProcess, Endpoint]:
    """Start one that listens, with its log in the folder."""
    port = free_port()
    argv = [sys.executable, "-m", "benchmarks.rig.bare", str(port), str(tokens), str(interval_s), str(first_s)]
    server = ServerProcess(argv, folder / "bare.log")
    endpoint = Endpoint("bare", "127.0.0.1", port, "bare", pid=server.pid)
    server.wait_ready(endpoint, "/", 30)
    return server, endpoint


async def serve(port: int, tokens: int, interval_s: float, first_s: float) -> None:
    """Listen until the process ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Stream(tokens, interval_s, first_s), "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.rig.bare", description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("tokens", type=int)
    parser.add_argument("interval_s", type=float)
    parser.add_argument("first_s", type=float, nargs="?", default=0.0)
    options = parser.parse_args(argv)
    uvloop.run(serve(options.port, options.tokens, options.interval_s, options.first_s))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
