"""The management API for MCP clients: `POST /mcp`, with a tool for every row of the table that has one.

A tool call is a request to its operation: the same credential, permission, rate limit and validation, and the same
answer. Who sends no credential that is good is refused at the level of HTTP, with 401, whatever the message asks; who
does sees the tools that their permissions reach, and no others. Messages are answered with plain JSON, and nothing is
remembered between them, so any process of several may answer the next one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from anyio import to_thread
from starlette.routing import Route

from marketplace.auth.oauth_config import is_loopback
from marketplace.http.app import ClientGone, Observe, Receive, Scope, Send, Threads, read_body, write
from marketplace.http.dispatch import Desk, Incoming, Outgoing
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Context, Operation

if TYPE_CHECKING:
    from marketplace.mcp_tools import McpTools

PATH = "/mcp"
_INVALID_REQUEST = -32600
"""JSON-RPC's code of a message that is refused as it is."""
_HEADERS = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
)


class McpEndpoint:
    """An ASGI application. The protocol's package is loaded by the first message that somebody with a good credential
    sends, beside the event loop: most services never need it. `stop` at the end, in the loop that served."""

    def __init__(
        self, table: Sequence[Operation[Any]], context: Context, observe: Observe = lambda path, status: None
    ) -> None:
        self._table, self._platform = table, context.platform
        self._desk, self._threads = Desk(context), Threads()
        self._own_origin = _origin(context.public_url)
        self._observe = observe
        self._tools: McpTools | None = None
        self._loading = asyncio.Lock()

    def route(self) -> Route:
        """Where it answers."""
        return Route(PATH, self)

    async def stop(self) -> None:
        """End what runs."""
        async with self._loading:
            if self._tools is not None:
                await self._tools.stop()

    async def _loaded(self) -> McpTools:
        """The tools, started."""
        async with self._loading:
            if self._tools is None:
                module = await to_thread.run_sync(import_module, "marketplace.mcp_tools")
                tools: McpTools = module.McpTools(self._table, self._desk, self._threads, self._platform)
                try:
                    await tools.start()
                except BaseException:  # whose first message was given up leaves nothing running
                    await tools.stop()
                    raise
                self._tools = tools
            return self._tools

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one message."""
        try:
            refused = await self._serve(scope, receive, send)
        except ClientGone:
            return
        if refused is not None:
            self._observe(PATH, refused.status)
            await write(send, _as_message(refused))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> Outgoing | None:
        """Hand the message to the package, or return why not."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            if scope["method"] != "POST":
                raise Refusal(Code.METHOD_NOT_ALLOWED, f"{PATH} takes POST.", headers=(("Allow", "POST"),))
            if not self._is_ours(headers.get("origin")):
                raise Refusal(Code.ORIGIN_NOT_ALLOWED, "Pages from elsewhere may not call this endpoint.")
            body = await read_body(receive)
        except Refusal as refusal:
            return self._desk.refuse(refusal)
        incoming = Incoming(headers=headers, address=(scope.get("client") or ("",))[0])
        caller = await to_thread.run_sync(self._desk.caller, incoming, limiter=self._threads.plain)
        if isinstance(caller, Outgoing):
            return caller

        async def send_on(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._observe(PATH, message["status"])
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        tools = self._tools or await self._loaded()
        await tools.handle(caller, scope, _replay(body, receive), send_on)
        return None

    def _is_ours(self, origin: str | None) -> bool:
        """Whether a page of this origin may call: our own, or one of this machine. Programs send none.

        A page elsewhere whose name was made to point here (DNS rebinding) still says where it came from.
        """
        if origin is None:
            return True
        asked = _origin(origin)
        return asked is not None and (asked == self._own_origin or is_loopback(asked[1]))


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once more, for those who come after the one who read it."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return waiting.pop() if waiting else await receive()

    return again


def _as_message(refused: Outgoing) -> Outgoing:
    """The answer as a message of the protocol, which clients show: they do not look into other bodies. Its id is null,
    because the message was not read."""
    error = json.loads(refused.body)["error"]
    shown = {"code": _INVALID_REQUEST, "message": f"{error['code']}: {error['message']}", "data": error}
    body = {"jsonrpc": "2.0", "id": None, "error": shown}
    return Outgoing(refused.status, refused.headers, json.dumps(body).encode())


def _origin(url: str) -> tuple[str, str, int | None] | None:
    """Scheme, host and port of an address; None for what is none."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    return parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80)
