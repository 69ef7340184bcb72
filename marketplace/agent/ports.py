"""Published ports: whether they are free, and whether somebody answers behind them."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Iterable

from marketplace.agent.wire import Port

_BANNER_S = 2.0


def clashes(ports: Iterable[Port]) -> list[Port]:
    """Those of the ports that cannot all be published at once: the same number on one address, or on all of them."""
    wanted = list(ports)
    count = Counter((one.proto, one.host) for one in wanted)
    found = []
    for one in wanted:
        same = [other for other in wanted if (other.proto, other.host) == (one.proto, one.host)]
        hidden = any(other.host_ip in (one.host_ip, "0.0.0.0") or one.host_ip == "0.0.0.0" for other in same[1:])
        if count[(one.proto, one.host)] > 1 and hidden:
            found.append(one)
    return found


def free(port: Port) -> bool:
    """Whether nobody on this machine listens on it."""
    kind = socket.SOCK_STREAM if port.proto == "tcp" else socket.SOCK_DGRAM
    with socket.socket(socket.AF_INET, kind) as probe:
        if port.proto == "tcp":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((port.host_ip, port.host))
        except OSError:
            return False
    return True


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
