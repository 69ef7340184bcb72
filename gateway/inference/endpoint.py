"""Routes of the inference surface as plain ASGI callables: one wrapper, one place where errors become answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from gateway.inference import errors
from gateway.inference.errors import ApiError
from gateway.inference.http import ClientGone, Exchange, Receive, Scope, Send
from gateway.telemetry import Telemetry

log = logging.getLogger(__name__)

Handler = Callable[[Exchange], Awaitable[None]]


class Endpoint:
    """An ASGI application for one route. `methods` names a handler for each method that the route takes."""

    def __init__(
        self, route: str, methods: Mapping[str, Handler], telemetry: Telemetry, new_id: Callable[[], str]
    ) -> None:
        """`route` is the label of the metrics; `new_id` mints request ids."""
        self._route = route
        self._methods = dict(methods)
        self._telemetry = telemetry
        self._new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        exchange = Exchange(scope, self._new_id())
        try:
            await self._handle(exchange)
        except ClientGone:
            exchange.status = exchange.status or 499  # what proxies log for a client that closed its request
        except ApiError as error:
            await self._refuse(exchange, error)
        except asyncio.CancelledError:  # only the server's shutdown cancels a request, and then its task is over anyway
            await self._refuse(exchange, errors.unavailable("The gateway is shutting down."))
        except Exception:  # supervision boundary: a defect of ours must not look like a broken connection
            log.exception("request %s failed", exchange.request_id)
            await self._refuse(exchange, errors.internal())
        finally:
            self._telemetry.requests[self._route, exchange.status] += 1

    async def _handle(self, exchange: Exchange) -> None:
        method = exchange.scope["method"]
        handler = self._methods.get("GET" if method == "HEAD" else method)
        if handler is None:
            raise errors.method_not_allowed(method, exchange.scope["path"], ", ".join(sorted(self._methods)))
        await handler(exchange)

    async def _refuse(self, exchange: Exchange, error: ApiError) -> None:
        self._telemetry.refusals[error.counted] += 1
        if exchange.status == 0:
            await exchange.fail(error)


async def not_found(exchange: Exchange) -> None:
    """The handler of what does not exist."""
    raise errors.not_found(exchange.scope["method"], exchange.scope["path"])
