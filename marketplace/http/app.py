"""Routes made from the table: plain ASGI that reads a bounded body and hands the request to a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from anyio import CapacityLimiter, to_thread
from starlette.routing import Route

from marketplace.http import pages
from marketplace.http.dispatch import Desk, Incoming, Outgoing
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Context, Operation

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Observe = Callable[[str, int], None]

MAX_BODY = 1 << 20
BODY_SECONDS = 30.0
LOOK_S = 1.0
"""How often it is looked whether there are news for somebody who waits."""
_DRAIN_FACTOR = 8
THREADS = 8
HASHING_THREADS = 2
"""Password hashing has its own few, so that guessing passwords cannot take all."""


class ClientGone(Exception):  # noqa: N818 - not an error of ours: nobody is there to be told
    """The client closed the connection before it had sent its request."""


class Threads:
    """How many requests are worked on at once; made inside the event loop."""

    def __init__(self) -> None:
        self._plain: CapacityLimiter | None = None
        self._hashing: CapacityLimiter | None = None

    def of(self, operation: Operation[Any]) -> CapacityLimiter:
        """The limiter of an operation."""
        if operation.rate != "login":
            return self.plain
        if self._hashing is None:
            self._hashing = CapacityLimiter(HASHING_THREADS)
        return self._hashing

    @property
    def plain(self) -> CapacityLimiter:
        """The limiter of what does not hash."""
        if self._plain is None:
            self._plain = CapacityLimiter(THREADS)
        return self._plain


class Endpoint:
    """An ASGI application for one path. `observe` is told the path and the status of every answer."""

    def __init__(
        self, path: str, operations: Sequence[Operation[Any]], desk: Desk, threads: Threads, observe: Observe
    ) -> None:
        self._path = path
        self._operations = {operation.method: operation for operation in operations}
        self._desk = desk
        self._threads = threads
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            answer = await self._answer(scope, receive)
        except ClientGone:
            return
        self._observe(self._path, answer.status)
        await write(send, answer)

    async def _answer(self, scope: Scope, receive: Receive) -> Outgoing:
        operation = self._operations.get(scope["method"])
        try:
            if not self._operations:
                raise Refusal(Code.NOT_FOUND, f"There is no {scope['method']} {scope['path'][:200]}.")
            if operation is None:
                allowed = ", ".join(sorted(self._operations))
                raise Refusal(Code.METHOD_NOT_ALLOWED, f"{self._path} takes {allowed}.", headers=(("Allow", allowed),))
            body = await read_body(receive)
        except Refusal as refusal:
            return self._desk.refuse(refusal)
        incoming = Incoming(
            headers={name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]},
            path_params={name: str(value) for name, value in scope.get("path_params", {}).items()},
            body=body,
            address=(scope.get("client") or ("",))[0],
        )
        serve = partial(to_thread.run_sync, self._desk.serve, operation, incoming, limiter=self._threads.of(operation))
        first = answer = await serve()
        until = asyncio.get_running_loop().time() + first.wait_s
        while answer.news == first.news and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(LOOK_S)  # holding neither a thread nor a snapshot
            later = await serve()
            if later.status != first.status:
                break  # too many looks, say: what was seen last is still an answer
            answer = later
        return answer


async def read_body(receive: Receive) -> bytes:
    """Read a body of at most MAX_BODY bytes. Refusal: BodyTooLarge, RequestTimeout. ClientGone.

    A body over the limit is read to its end, within reason, before it is refused: an answer to a client that is still
    sending is lost with the connection.
    """
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk = message.get("body", b"")
                size += len(chunk)
                if size <= MAX_BODY:
                    chunks.append(chunk)
                elif chunks:
                    chunks.clear()
                if not message.get("more_body", False) or size > MAX_BODY * _DRAIN_FACTOR:
                    break
    except TimeoutError as error:
        raise Refusal(
            Code.REQUEST_TIMEOUT, f"The body did not arrive within {BODY_SECONDS:g} seconds.", headers=_CLOSE
        ) from error
    if size > MAX_BODY:
        raise Refusal(Code.BODY_TOO_LARGE, f"A body has at most {MAX_BODY} bytes.", headers=_CLOSE)
    return b"".join(chunks)


async def write(send: Send, answer: Outgoing) -> None:
    """Send an answer; what is made while it is sent comes from a thread, a part at a time."""
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers.items()]
    if answer.rest is None and answer.status != HTTPStatus.NO_CONTENT:  # which has no content, so it has no length
        headers.append((b"content-length", b"%d" % len(answer.body)))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": answer.rest is not None})
    if answer.rest is None:
        return
    while part := await to_thread.run_sync(next, answer.rest, b""):
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def routes(
    table: Sequence[Operation[Any]], context: Context, observe: Observe = lambda path, status: None
) -> list[Route]:
    """A route for every path of the table, the document and its pages, and one that says that there is nothing else
    below /api."""
    desk, threads = Desk(context), Threads()
    paths: dict[str, list[Operation[Any]]] = {}
    for operation in table:
        paths.setdefault(operation.path, []).append(operation)
    made = [Route(path, Endpoint(path, rows, desk, threads, observe)) for path, rows in paths.items()]
    return [*made, *pages.routes(table), Route("/api/{rest:path}", Endpoint("/api", (), desk, threads, observe))]


_CLOSE = (("Connection", "close"),)
