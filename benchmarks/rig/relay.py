"""A gateway that knows nothing: it renders, tokenises, asks the engine and passes tokens on. No keys, money or checks.

What it adds to the engine's own answer is what a process between client and engine costs on this machine: two more
waits for a process to be woken, and code that runs after ten idle milliseconds with cold caches. The figure of the
gateway beside it, from the same run, says how much of what it adds is its own.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import httptools
import orjson
import uvloop

from benchmarks.rig.bare import CHUNK, END, HEAD, framed
from benchmarks.rig.http import Endpoint
from benchmarks.rig.listener import free_port
from benchmarks.rig.processes import ServerProcess
from engine.client import EngineClient
from engine.generation import EngineError
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from engine.weights.sources import default_cache_dir, resolve
from engine.wire import Progress, unpack_tokens

_ids = itertools.count()


class Passage(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer) -> None:
        self._client, self._tokenizer = client, tokenizer
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._body = b""
        self._begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse what arrived."""
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._body += body

    def on_message_complete(self) -> None:
        """Ask the engine."""
        method, self._parser = self._parser.get_method(), httptools.HttpRequestParser(self)
        if method == b"GET":  # somebody asks whether it listens
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return
        asked: dict[str, Any] = orjson.loads(self._body)
        self._body, self._begun = b"", False
        prompt = self._tokenizer.encode_chat(asked["messages"])
        params = SamplingParams(max_tokens=asked["max_tokens"], temperature=0.0, ignore_eos=True)
        self._client.submit(f"passed-{next(_ids)}", prompt, params, on_progress=self._pass_on)

    def _pass_on(self, said: Progress | EngineError) -> None:
        if isinstance(said, EngineError):
            raise said
        out = b"" if self._begun else HEAD
        self._begun = True
        if said.tokens:
            text = orjson.dumps(self._tokenizer.decode(unpack_tokens(said.tokens)))
            out += framed(CHUNK % (b"relay", b'"content":' + text))
        if said.finish_reason is not None:
            out += framed(END % said.counters.completion) + b"0\r\n\r\n"
        self._transport.write(out)


def start(folder: Path, model: str, engine: Path) -> tuple[ServerProcess, Endpoint]:
    """Start one in front of the engine at a socket, with its log in the folder."""
    port = free_port()
    argv = [sys.executable, "-m", "benchmarks.rig.relay", str(port), model, str(engine)]
    server = ServerProcess(argv, folder / "relay.log")
    endpoint = Endpoint("relay", "127.0.0.1", port, "relay", pid=server.pid)
    server.wait_ready(endpoint, "/", 30)
    return server, endpoint


async def serve(port: int, model: str, engine: str) -> None:
    """Listen until the process ends."""
    tokenizer = Tokenizer.load(resolve(model, default_cache_dir()))
    client = EngineClient(engine, tokenizer)
    await client.connect()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Passage(client, tokenizer), "127.0.0.1", port)
    await server.serve_forever()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.rig.relay", description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("model")
    parser.add_argument("engine")
    options = parser.parse_args(argv)
    uvloop.run(serve(options.port, options.model, options.engine))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
