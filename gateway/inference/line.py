"""A client's connection as its answers write to it: several writes as one, chunks without a task in between, and word
when it is full or lost.

The HTTP protocol takes a Line for its transport, so what it writes and what an answer writes go out in one order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


def _nothing() -> None:
    """Nobody wants to know."""


class Line(asyncio.Transport):
    """One connection. Belongs to its event loop."""

    def __init__(self, transport: asyncio.Transport, clock: Callable[[], float]) -> None:
        super().__init__()
        self.full_since: float | None = None
        """From when on, by the clock, the client has not taken what was written; None while there is room."""
        self.on_room: Callable[[], None] = _nothing
        """Called when there is room again."""
        self.on_lost: Callable[[], None] = _nothing
        """Called when the client has left, once."""
        self._transport = transport
        self._clock = clock
        self._corked: list[bytes] | None = None

    def leave(self) -> None:
        """The answer that listened is over."""
        self.on_room = self.on_lost = _nothing

    # -- what an answer does -----------------------------------------------------------------------

    def cork(self) -> None:
        """Gather what is written from now on: a packet and a system call for all of it."""
        if self._corked is None:
            self._corked = []

    def uncork(self) -> None:
        """Write what was gathered."""
        gathered, self._corked = self._corked, None
        if gathered:
            self._transport.write(b"".join(gathered))

    def chunk(self, data: bytes) -> None:
        """Write a piece of a body in HTTP/1.1's chunked coding; `data` is not empty."""
        self.write(b"%x\r\n%b\r\n" % (len(data), data))

    # -- what the protocol says --------------------------------------------------------------------

    def pause(self) -> None:
        """The buffers are full."""
        self.full_since = self._clock()

    def resume(self) -> None:
        """There is room."""
        self.full_since = None
        self.on_room()

    def lost(self) -> None:
        """The connection is gone."""
        listener = self.on_lost
        self.leave()
        listener()

    # -- the transport that the protocol writes to -------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write, or gather while corked."""
        if self._corked is None:
            self._transport.write(data)
        else:
            self._corked.append(bytes(data))

    def close(self) -> None:
        """Close when everything is written."""
        self.uncork()
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def is_closing(self) -> bool:
        """True once it was closed."""
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        """Take nothing from the client for now."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Take what the client sends."""
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Facts about the connection."""
        return self._transport.get_extra_info(name, default)
