"""What one frame from an engine makes many connections say, written when all of it is worked out.

A step of an engine brings the next token of every stream. Worked out and written one stream after the other, each write
to a socket drives the interpreter's code and data out of the processor's caches, and they come back for the next
stream: kept apart, the two take three quarters of the time.
"""

from __future__ import annotations

import asyncio


class Burst:
    """Of one event loop. Between `begin` and `end` nothing is written; both are called without a wait between them."""

    def __init__(self) -> None:
        self._open = False
        self._waiting: list[tuple[asyncio.Transport, bytes]] = []

    def begin(self) -> None:
        """From now on writes wait."""
        self._open = True

    def end(self) -> None:
        """Write what has waited, in its order."""
        self._open = False
        waiting, self._waiting = self._waiting, []
        for transport, data in waiting:
            if not transport.is_closing():
                transport.write(data)

    def put(self, transport: asyncio.Transport, data: bytes) -> None:
        """Write now, or at the end of the burst; what nobody takes any more is dropped."""
        if self._open:
            self._waiting.append((transport, data))
        elif not transport.is_closing():
            transport.write(data)
