"""The Unix socket at which engines on this node get, keep and give back their leases; and the engine's side of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx2
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from marketplace.agent.leases import Lease, LeaseBook, LeaseError, Wanted

_WATCH_S = 25.0
_CALL_S = 5.0


class _Renewal(msgspec.Struct, forbid_unknown_fields=True):
    fence: int


class _Complaint(msgspec.Struct):
    error: str = ""


def lease_app(book: LeaseBook, now: Callable[[], int]) -> Starlette:
    """`POST /v1/leases`, `POST /v1/leases/ID/renew`, `GET /v1/leases/ID/watch`, `DELETE /v1/leases/ID`."""

    async def acquire(request: Request) -> Response:
        lease = book.request(msgspec.json.decode(await request.body(), type=Wanted), now())
        return _json(201, await _settled(book, lease.id))

    async def renew(request: Request) -> Response:
        asked = msgspec.json.decode(await request.body(), type=_Renewal)
        return _json(200, book.renew(request.path_params["id"], asked.fence, now()))

    async def watch(request: Request) -> Response:
        """Answer when the lease is to end, or after a while as it is."""
        id = request.path_params["id"]
        end = time.monotonic() + _WATCH_S
        while (lease := book.look(id)).revoke_at is None and not book.closed and (left := end - time.monotonic()) > 0:
            await book.wait(min(left, 1.0))
        return _json(200, lease)

    async def release(request: Request) -> Response:
        book.release(request.path_params["id"])
        return Response(status_code=204)

    return Starlette(
        routes=[
            Route("/v1/leases", _guarded(acquire), methods=["POST"]),
            Route("/v1/leases/{id}/renew", _guarded(renew), methods=["POST"]),
            Route("/v1/leases/{id}/watch", _guarded(watch), methods=["GET"]),
            Route("/v1/leases/{id}", _guarded(release), methods=["DELETE"]),
        ]
    )


class AgentAwayError(LeaseError):
    """No agent answers at the socket. Another time it may."""


class LeaseClient:
    """What an engine's keeper calls. Raises LeaseError, and of these AgentAwayError where there is no agent."""

    def __init__(self, socket: Path) -> None:
        """`socket` is the agent's."""
        self._socket = socket
        transport = httpx2.AsyncHTTPTransport(uds=str(socket))
        self._http = httpx2.AsyncClient(transport=transport, base_url="http://agent", timeout=_CALL_S)

    async def acquire(self, wanted: Wanted) -> Lease:
        """Ask, and wait for the server's word. LeaseError 409 where it is refused."""
        lease = await self._call("POST", "/v1/leases", wanted, wait_s=_WATCH_S * 2)
        if lease.state != "Held":
            raise LeaseError(409, lease.refused or "there was no answer in time")
        return lease

    async def renew(self, lease: Lease) -> Lease:
        """Hold on; at least every ten seconds."""
        return await self._call("POST", f"/v1/leases/{lease.id}/renew", _Renewal(lease.fence))

    async def watch(self, lease: Lease) -> Lease:
        """Wait for the word that the lease is to end; after a while, return it as it is."""
        return await self._call("GET", f"/v1/leases/{lease.id}/watch", wait_s=_WATCH_S * 2)

    async def release(self, lease: Lease) -> None:
        """Give it back. One that has ended already is none to give back, and no error."""
        await self._ask("DELETE", f"/v1/leases/{lease.id}", b"", _CALL_S)

    async def close(self) -> None:
        """Close the connection. Leases are kept."""
        await self._http.aclose()

    async def _call(
        self, method: str, path: str, body: msgspec.Struct | None = None, *, wait_s: float = _CALL_S
    ) -> Lease:
        got = await self._ask(method, path, b"" if body is None else msgspec.json.encode(body), wait_s)
        try:
            if got.status_code < 400:
                return msgspec.json.decode(got.content, type=Lease)
            complaint = msgspec.json.decode(got.content, type=_Complaint).error
        except msgspec.MsgspecError as error:  # an agent that is about to go says nothing of leases
            raise AgentAwayError(503, f"the agent at {self._socket} gives no answer: {got.status_code}") from error
        raise LeaseError(got.status_code, complaint)

    async def _ask(self, method: str, path: str, content: bytes, wait_s: float) -> httpx2.Response:
        try:
            return await self._http.request(method, path, content=content, timeout=wait_s)
        except httpx2.TransportError as error:
            reason = str(error) or type(error).__name__
            raise AgentAwayError(503, f"no agent answers at {self._socket}: {reason}") from error


async def _settled(book: LeaseBook, id: str) -> Lease:
    """The lease once the server has spoken. LeaseError 504 where the request runs out before."""
    try:
        while (lease := book.look(id)).state == "Requested" and not book.closed:
            await book.wait(1.0)
    except asyncio.CancelledError:
        book.release(id)
        raise
    except LeaseError as error:
        raise LeaseError(504, "the server has not answered the node in time") from error
    return lease


def _guarded(handle: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return await handle(request)
        except LeaseError as error:
            return _json(error.status, _Complaint(str(error)))
        except msgspec.MsgspecError as error:
            return _json(400, _Complaint(str(error)))

    return answer


def _json(status: int, body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
