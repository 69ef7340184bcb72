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
        while (lease := book.look(id)).revoke_at is None and (left := end - time.monotonic()) > 0:
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


class LeaseClient:
    """What an engine's keeper calls. Raises LeaseError, and httpx2.TransportError where there is no agent."""

    def __init__(self, socket: Path) -> None:
        """`socket` is the agent's."""
        transport = httpx2.AsyncHTTPTransport(uds=str(socket))
        self._http = httpx2.AsyncClient(transport=transport, base_url="http://agent", timeout=_WATCH_S * 2)

    async def acquire(self, wanted: Wanted) -> Lease:
        """Ask, and wait for the server's word. LeaseError 409 where it is refused."""
        lease = await self._call("POST", "/v1/leases", wanted)
        if lease.state != "Held":
            raise LeaseError(409, lease.refused or "there was no answer in time")
        return lease

    async def renew(self, lease: Lease) -> Lease:
        """Hold on; at least every ten seconds."""
        return await self._call("POST", f"/v1/leases/{lease.id}/renew", _Renewal(lease.fence))

    async def watch(self, lease: Lease) -> Lease:
        """Wait for the word that the lease is to end; None of it after a while."""
        return await self._call("GET", f"/v1/leases/{lease.id}/watch")

    async def release(self, lease: Lease) -> None:
        """Give it back."""
        await self._http.delete(f"/v1/leases/{lease.id}")

    async def close(self) -> None:
        """Close the connection. Leases are kept."""
        await self._http.aclose()

    async def _call(self, method: str, path: str, body: msgspec.Struct | None = None) -> Lease:
        content = None if body is None else msgspec.json.encode(body)
        got = await self._http.request(method, path, content=content)
        if got.status_code >= 400:
            raise LeaseError(got.status_code, msgspec.json.decode(got.content, type=_Complaint).error)
        return msgspec.json.decode(got.content, type=Lease)


async def _settled(book: LeaseBook, id: str) -> Lease:
    """The lease once the server has spoken, or the request has run out."""
    try:
        while (lease := book.look(id)).state == "Requested":
            await book.wait(1.0)
    except asyncio.CancelledError:
        book.release(id)
        raise
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
