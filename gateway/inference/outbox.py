"""What an answer has to say, on its way to the client: kept until the response begins and while the connection is full,
written at once otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.http.turn import Turn


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
        self._turn: Turn | None = None
        self._begin: Callable[[], None] = _begun
        self._end: asyncio.Future[None] | None = None

    @property
    def full(self) -> bool:
        """True while the client is more than LIMIT bytes behind what the connection itself keeps."""
        return self._size > self.LIMIT and not self._closed

    # -- the writer --------------------------------------------------------------------------------

    def put(self, data: bytes) -> None:
        """Say something; after close it is dropped."""
        if not data or self._closed:
            return
        turn = self._turn
        if turn is None or turn.full_since is not None:
            self._keep(data)
        elif self._parts:
            self._keep(data)
            self._flush()
        else:
            if not self.writes:
                self._begin()
            turn.write(data)
            self.writes += 1

    def defer(self, data: bytes) -> None:
        """Say something together with what comes next, or with the end."""
        if data and not self._closed:
            self._keep(data)

    def close(self, data: bytes = b"") -> None:
        """Say the last, which goes out with the end of the response."""
        self.defer(data)
        self._closed = True
        if self._end is not None and not self._end.done():
            self._end.set_result(None)
        self._tell_room()

    # -- the response ------------------------------------------------------------------------------

    def open(self, turn: Turn, begin: Callable[[], None]) -> None:
        """Write what is there, and from now on what comes, but for what goes out with the end; `begin` makes the head
        of the response when there is something to write."""
        self._turn, self._begin = turn, begin
        turn.on_room = self._flush
        self._flush()

    async def closed(self) -> bytes:
        """Wait for the end and return what is left to be written."""
        if not self._closed:
            self._end = asyncio.get_running_loop().create_future()
            await self._end
        return self._take()

    def _flush(self) -> None:
        turn = self._turn
        if turn is not None and turn.full_since is None and self._parts and not self._closed:
            if not self.writes:
                self._begin()
            turn.write(self._take())
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


def _begun() -> None:
    """Nothing was opened."""
