"""Bytes on their way from a request's actor to its response: bounded, and closed by either side."""

from __future__ import annotations

import asyncio


class Outbox:
    """One writer (the actor) and one reader (the response). Bytes that were put together are taken together."""

    LIMIT = 64 * 1024

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._closed = False
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    @property
    def full(self) -> bool:
        """True while the reader is more than LIMIT bytes behind; the writer should wait for room."""
        return self._size > self.LIMIT and not self._closed

    @property
    def idle(self) -> bool:
        """True when nothing waits to be read."""
        return not self._parts

    def put(self, data: bytes) -> None:
        """Add bytes; after close they are dropped."""
        if data and not self._closed:
            self._parts.append(data)
            self._size += len(data)
            _wake(self._reader)

    def close(self) -> None:
        """No more bytes will come; the reader gets what is there and then None."""
        self._closed = True
        _wake(self._reader)
        _wake(self._writer)

    async def take(self) -> tuple[bytes, bool]:
        """Everything that waits, as soon as there is anything, and whether more may come."""
        while not self._parts and not self._closed:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        parts, self._parts = self._parts, []
        self._size = 0
        _wake(self._writer)
        return (parts[0] if len(parts) == 1 else b"".join(parts)), not self._closed

    async def room(self, timeout_s: float) -> None:
        """Wait until the outbox is not full, at most timeout_s."""
        if self.full:
            self._writer = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._writer,), timeout=timeout_s)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
