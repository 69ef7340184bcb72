"""Two connections as one: bytes both ways, at the pace of the slower side, each half closing by itself."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

CHUNK = 64 * 1024


async def splice(one: Connection, other: Connection, moved: Callable[[], None] = lambda: None) -> None:
    """Copy between two connections until both directions have ended, then close them; `moved` is called for every
    piece. A connection that breaks, or a cancellation, breaks the other at once."""
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_copy(one[0], other[1], moved))
            group.create_task(_copy(other[0], one[1], moved))
        for _, writer in (one, other):
            writer.close()
            await writer.wait_closed()
    except* OSError:
        pass  # whoever broke it knows; the other side is told by the abort below
    finally:
        for _, writer in (one, other):
            writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, moved: Callable[[], None]) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        moved()
        await writer.drain()
    if not writer.is_closing():
        writer.write_eof()


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """Let the system find out when the other machine is gone, and send small pieces at once."""
    found: socket.socket | None = writer.get_extra_info("socket")
    if found is not None:
        with contextlib.suppress(OSError):  # it may have closed already
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
