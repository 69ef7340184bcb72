"""What an answer has to say, on its way to the client: kept until the response begins and while the connection is full,
written at once otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.inference.line import Line


class Outbox:
    """One writer (the actor) and one response, which opens it onto the client's connection."""

    LIMIT = 64 * 1024

    def __init__(self) -> None:
        self.writes = 0
        """How often something was written to the connection."""
        self.on_room: list[Callable[[], None]] = []
        """Called when something was written: it may not be full any more."""
        self._parts: list[bytes] = []
        self._size = 0
        self._closed = False
        self._line: Line | None = None
        self._response: asyncio.Future[None] | None = None

    @property
    def full(self) -> bool:
        """True while the client is more than LIMIT bytes behind what the connection itself keeps."""
        return self._size > self.LIMIT and not self._closed

    @property
    def empty(self) -> bool:
        """True when nothing waits to be written."""
        return not self._parts

    # -- the writer --------------------------------------------------------------------------------

    def put(self, data: bytes) -> None:
        """Say something; after close it is dropped."""
        if not data or self._closed:
            return
        line = self._line
        if line is None or line.full_since is not None:
            self._keep(data)
            self._wake()
        elif self._parts:
            self._keep(data)
            self._flush()
        else:
            line.chunk(data)
            self.writes += 1

    def defer(self, data: bytes) -> None:
        """Say something together with what comes next, or with the end."""
        if data and not self._closed:
            self._keep(data)

    def close(self, data: bytes = b"") -> None:
        """Say the last, which goes out with the end of the response."""
        self.defer(data)
        self._closed = True
        self._wake()
        self._tell_room()

    # -- the response ------------------------------------------------------------------------------

    async def begun(self) -> None:
        """Return when there is something to say, or never will be."""
        while not self._parts and not self._closed:
            await self._wait()

    def open(self, line: Line) -> None:
        """Write what is there, and from now on what comes, but for what goes out with the end."""
        self._line = line
        line.on_room = self._flush
        self._flush()

    async def closed(self) -> bytes:
        """Wait for the end and return what is left to be written."""
        while not self._closed:
            await self._wait()
        return self._take()

    def _flush(self) -> None:
        line = self._line
        if line is not None and line.full_since is None and self._parts and not self._closed:
            line.chunk(self._take())
            self.writes += 1
            self._tell_room()

    def _tell_room(self) -> None:
        for listener in self.on_room:
            listener()

    def _keep(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)

    def _take(self) -> bytes:
        parts, self._parts, self._size = self._parts, [], 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _wake(self) -> None:
        if self._response is not None and not self._response.done():
            self._response.set_result(None)

    async def _wait(self) -> None:
        self._response = asyncio.get_running_loop().create_future()
        await self._response
