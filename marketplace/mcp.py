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
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import urlsplit

import mcp_types as types
from anyio import to_thread
from mcp import MCPError
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.requests import Request
from starlette.routing import Route

from marketplace.auth.oauth_config import is_loopback
from marketplace.http.app import MAX_BODY, ClientGone, Observe, Receive, Scope, Send, Threads, read_body, write
from marketplace.http.dispatch import Desk, Incoming, Outgoing, read_request
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Context, Operation, Reads, Tool
from marketplace.http.principal import Principal

PATH = "/mcp"
_PRINCIPAL = "headrace.principal"
_CREDENTIALS = ("authorization", "x-api-key")
_INSTRUCTIONS = (
    "Accounts, keys and machines at Headrace. Money is in cents of the server currency, times are RFC 3339 in UTC."
)
_HEADERS = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
)


class McpEndpoint:
    """An ASGI application. `start` before the first request and `stop` at the end, both in one event loop."""

    def __init__(
        self, table: Sequence[Operation[Any]], context: Context, observe: Observe = lambda path, status: None
    ) -> None:
        self._rows = {row.tool.name: row for row in table if row.tool is not None}
        self._desk, self._threads = Desk(context), Threads()
        self._own_origin = _origin(context.public_url)
        self._observe = observe
        server: Server[Any] = Server(
            context.platform,
            version=_release(),
            instructions=_INSTRUCTIONS,
            on_list_tools=self._list,
            on_call_tool=self._call,
        )
        self._manager = StreamableHTTPSessionManager(
            server, json_response=True, stateless=True, max_request_body_size=MAX_BODY
        )
        self._running: asyncio.Task[None] | None = None

    def route(self) -> Route:
        """Where it answers."""
        return Route(PATH, self)

    async def start(self) -> None:
        """Begin to serve; what the package runs in the background has a task of its own."""
        ready = asyncio.Event()
        self._running = asyncio.create_task(self._run(ready), name="mcp")
        await ready.wait()

    async def stop(self) -> None:
        """End what runs. Safe without `start`."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    async def _run(self, ready: asyncio.Event) -> None:
        async with self._manager.run():
            ready.set()
            await asyncio.Event().wait()

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

        await self._manager.handle_request({**scope, _PRINCIPAL: caller}, _replay(body, receive), send_on)
        return None

    def _is_ours(self, origin: str | None) -> bool:
        """Whether a page of this origin may call: our own, or one of this machine. Programs send none.

        A page elsewhere whose name was made to point here (DNS rebinding) still says where it came from.
        """
        if origin is None:
            return True
        asked = _origin(origin)
        return asked is not None and (asked == self._own_origin or is_loopback(asked[1]))

    async def _list(self, context: Any, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        caller = _caller(context.request)
        return types.ListToolsResult(tools=[_described(row) for row in self._rows.values() if _reaches(caller, row)])

    async def _call(self, context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        row = self._rows.get(params.name)
        if row is None or row.tool is None:
            raise MCPError(types.INVALID_PARAMS, f"There is no tool {params.name[:100]!r}.")
        arguments = params.arguments or {}
        try:
            read_request(row.tool.arguments, arguments, {})
        except Refusal as refusal:
            return _result(self._desk.refuse(refusal))
        request: Request = context.request
        incoming = Incoming(
            headers={name: request.headers[name] for name in _CREDENTIALS if name in request.headers},
            body=json.dumps(row.tool.body(arguments)).encode(),
            address="" if request.client is None else request.client.host,
        )
        return _result(await to_thread.run_sync(self._desk.serve, row, incoming, limiter=self._threads.of(row)))


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once more, for those who come after the one who read it."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return waiting.pop() if waiting else await receive()

    return again


def _caller(request: Request) -> Principal:
    found: Principal = request.scope[_PRINCIPAL]
    return found


def _reaches(caller: Principal, row: Operation[Any]) -> bool:
    return row.permission is None or (row.permission in caller.permissions and caller.credential in row.credentials)


def _described(row: Operation[Any]) -> types.Tool:
    tool = row.tool
    assert tool is not None, "only rows with a tool are described"
    return types.Tool(
        name=tool.name,
        description=tool.description,
        input_schema=tool.arguments.model_json_schema(by_alias=True),
        output_schema=_output(row),
        annotations=_hints(row, tool),
    )


def _output(row: Operation[Any]) -> dict[str, Any] | None:
    """What the tool returns, where that is an object, as all versions of the protocol want it."""
    if row.response is None:
        return None
    schema = row.response.model_json_schema(by_alias=True, mode="serialization")
    return schema if schema.get("type") == "object" else None


def _hints(row: Operation[Any], tool: Tool) -> types.ToolAnnotations:
    if isinstance(row.handler, Reads):
        return types.ToolAnnotations(read_only_hint=True, destructive_hint=False, open_world_hint=False)
    return types.ToolAnnotations(read_only_hint=False, destructive_hint=tool.destructive, open_world_hint=False)


def _result(answer: Outgoing) -> types.CallToolResult:
    """What an operation answered. A refusal is the tool's error, for the model to read: its code and its message."""
    told = json.loads(answer.body) if answer.body else {}
    if answer.status < 400:
        text = answer.body.decode()
        return types.CallToolResult(content=[types.TextContent(text=text)], structured_content=told)
    error = told["error"]
    text = f"{error['code']}: {error['message']}"
    return types.CallToolResult(content=[types.TextContent(text=text)], structured_content=told, is_error=True)


def _as_message(refused: Outgoing) -> Outgoing:
    """The answer as a message of the protocol, which clients show: they do not look into other bodies. Its id is null,
    because the message was not read."""
    error = json.loads(refused.body)["error"]
    shown = types.ErrorData(code=types.INVALID_REQUEST, message=f"{error['code']}: {error['message']}", data=error)
    body = {"jsonrpc": "2.0", "id": None, "error": shown.model_dump(by_alias=True)}
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


def _release() -> str:
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "0"
