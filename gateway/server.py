"""uvicorn's server with connections of our own: signals are its owner's, and it says when it listens."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import uvicorn

from gateway.http.burst import Burst
from gateway.http.connection import Connection, ServerState
from gateway.inference import errors
from gateway.inference.errors import ApiError


def error_body(status: int, message: str) -> bytes:
    """The body of an error that no route answers, in the shape of every other."""
    if status >= 500:
        return errors.internal(message).body("")
    return ApiError(status, message, code="invalid_request").body("")


class FrontProtocol(Connection):
    """A connection as uvicorn's server makes it."""

    burst: ClassVar[Burst]
    """Of all connections of a server."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(
            config.loaded_app,
            server_state,
            self.burst,
            error_body,
            keep_alive_s=config.timeout_keep_alive,
            loop=_loop or asyncio.get_running_loop(),
        )


class FrontServer(uvicorn.Server):
    """A server that leaves signals to its owner and says when it listens."""

    on_listening: Callable[[], None] = staticmethod(lambda: None)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The owner handles signals: uvicorn would raise them again after its shutdown, before ours is done."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets=sockets)
        self.on_listening()


def make_server(
    app: Any, *, backlog: int, drain_s: float, trusted_proxies: Sequence[str] = (), burst: Burst | None = None
) -> FrontServer:
    """A server for sockets that are passed to `serve`. A caller's address is that of the connection; where it comes
    from one of the addresses or networks `trusted_proxies`, the last in X-Forwarded-For that is none of them. What is
    written during a `burst` is written at its end."""

    class Protocol(FrontProtocol):
        """A connection of this server."""

    Protocol.burst = burst or Burst()
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # From nobody else: a forged X-Forwarded-For must not get past the addresses that a key is bound to.
        proxy_headers=bool(trusted_proxies),
        forwarded_allow_ips=list(trusted_proxies),
        backlog=backlog,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(drain_s)),
    )
    return FrontServer(config)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not yet listening. Raises OSError, EADDRINUSE where somebody else listens."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.setblocking(False)
    except OSError:
        bound.close()
        raise
    return bound
