"""Small HTTP servers of the agent, beside its own work: for guests, and for engines on a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import uvicorn


class _Server(uvicorn.Server):
    """A server that leaves signals to the agent, and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The agent handles signals."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets=sockets)
        self.listening.set()


@contextlib.asynccontextmanager
async def served(app: Any, listener: socket.socket) -> AsyncIterator[None]:
    """Serve the application on a bound socket until the block ends."""
    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        limit_concurrency=256,
        h11_max_incomplete_event_size=16384,
    )
    server = _Server(config)
    task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
    waiting = asyncio.get_running_loop().create_task(server.listening.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        yield
    finally:
        waiting.cancel()
        server.should_exit = True
        await task


def tcp_listener(host: str, port: int) -> socket.socket:
    """A socket on the port, or on any where that one is taken."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.bind((host, 0))
    listener.setblocking(False)
    return listener


def unix_listener(path: Path) -> socket.socket:
    """A socket in a folder that only its owner may enter. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.setblocking(False)
    return listener
