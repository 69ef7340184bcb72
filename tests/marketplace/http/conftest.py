"""The management API on a real port, as browsers and MCP clients meet it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx2
import pytest
import uvicorn
from starlette.routing import Router

from marketplace.http import app
from marketplace.mcp import McpEndpoint
from marketplace.operations import TABLE

if TYPE_CHECKING:
    from tests.marketplace.conftest import Office


class Site:
    """A server in a thread of its own."""

    def __init__(self, office: Office) -> None:
        self.office = office
        self.seen: list[tuple[str, int]] = []
        """path and status of every answer"""
        self.http = httpx2.Client(timeout=20)
        self._mcp = McpEndpoint(TABLE, office.context, self._observe)
        routes = [*app.routes(TABLE, office.context, self._observe), self._mcp.route()]
        config = uvicorn.Config(
            Router(routes, redirect_slashes=False), lifespan="off", ws="none", log_config=None, access_log=False
        )
        self._server = uvicorn.Server(config)
        # Named as TCP, so that asyncio sets TCP_NODELAY: or else every answer waits 40 ms for an acknowledgement.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen()
        self.port: int = self._socket.getsockname()[1]
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="site", daemon=True)
        self._thread.start()
        assert self._up.wait(20), "the server did not start"

    def url(self, path: str) -> str:
        """Address of a path."""
        return f"http://127.0.0.1:{self.port}{path}"

    def _observe(self, path: str, status: int) -> None:
        self.seen.append((path, status))

    async def _main(self) -> None:
        self._up.set()  # the socket listens already
        await self._server.serve(sockets=[self._socket])
        await self._mcp.stop()

    def close(self) -> None:
        """Stop serving."""
        self.http.close()
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def site(sqlite_office: Office) -> Iterator[Site]:
    """The management API over HTTP, for a whole module."""
    running = Site(sqlite_office)
    yield running
    running.close()
