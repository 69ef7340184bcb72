"""Published ports: whether somebody answers behind them."""

from __future__ import annotations

import asyncio

from marketplace.agent.wire import Port

_BANNER_S = 2.0


async def reachable(port: Port, banner: bytes) -> bool:
    """Whether whoever is behind the port greets with `banner`. A port that only accepts proves nothing."""
    address = "127.0.0.1" if port.host_ip == "0.0.0.0" else port.host_ip
    try:
        async with asyncio.timeout(_BANNER_S):
            reader, writer = await asyncio.open_connection(address, port.host)
            try:
                return await reader.readexactly(len(banner)) == banner
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False
