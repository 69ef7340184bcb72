"""The tools of `POST /mcp`, over the protocol's own package: listed as the caller's permissions reach, called as their
operations.

The package takes about a second to import, which is why nothing but the endpoint's first message does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import mcp_types as types
import orjson
from anyio import to_thread
from mcp import MCPError
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.requests import Request

from marketplace.http.app import LOOK_S, MAX_BODY, Receive, Scope, Send, Threads
from marketplace.http.dispatch import Desk, Incoming, Outgoing, read_request
from marketplace.http.errors import Refusal
from marketplace.http.operation import Operation, Reads, Then, Tool
from marketplace.http.principal import Principal
from marketplace.http.wire import Json

_PRINCIPAL = "headrace.principal"
_CREDENTIALS = ("authorization", "x-api-key")
_INSTRUCTIONS = (
    "Accounts, keys and machines at Headrace. Money is in cents of the server currency, times are RFC 3339 in UTC."
)


class McpTools:
    """The package's server. `start` before the first message and `stop` at the end, both in one event loop."""

    def __init__(self, table: Sequence[Operation[Any]], desk: Desk, threads: Threads, platform: str) -> None:
        """platform: the name that clients are told."""
        self._rows = {row.tool.name: row for row in table if row.tool is not None}
        self._desk, self._threads = desk, threads
        server: Server[Any] = Server(
            platform,
            version=_release(),
            instructions=_INSTRUCTIONS,
            on_list_tools=self._list,
            on_call_tool=self._call,
        )
        self._manager = StreamableHTTPSessionManager(
            server, json_response=True, stateless=True, max_request_body_size=MAX_BODY
        )
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to serve; what the package runs in the background has a task of its own. Raises what it raises."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(self._run(ready), name="mcp")
        await asyncio.wait({self._running, ready}, return_when=asyncio.FIRST_COMPLETED)
        if self._running.done():
            self._running.result()

    async def stop(self) -> None:
        """End what runs. Safe without `start`."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    async def _run(self, ready: asyncio.Future[None]) -> None:
        async with self._manager.run():
            ready.set_result(None)
            await asyncio.Event().wait()

    async def handle(self, caller: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one message of a caller who is known."""
        await self._manager.handle_request({**scope, _PRINCIPAL: caller}, receive, send)

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
        answer = await self._ask(row, request, row.tool.body(arguments))
        result = _result(answer, partial(row.tool.shown, arguments))
        if row.tool.then is not None and arguments.get("wait") and answer.status < 400:
            seen = await self._wait(row.tool.then, request, json.loads(answer.body))
            result.content.append(types.TextContent(text=orjson.dumps(seen).decode()))
        return result

    async def _ask(self, row: Operation[Any], request: Request, body: Json) -> Outgoing:
        incoming = Incoming(
            headers={name: request.headers[name] for name in _CREDENTIALS if name in request.headers},
            body=json.dumps(body).encode(),
            address="" if request.client is None else request.client.host,
        )
        return await to_thread.run_sync(self._desk.serve, row, incoming, limiter=self._threads.of(row))

    async def _wait(self, then: Then, request: Request, begun: Json) -> Json:
        """Look until it is as it was waited for, or the time is over; return what was seen last."""
        row, body = self._rows[then.tool], then.body(begun)
        until = asyncio.get_running_loop().time() + then.wait_s
        seen: Json = {}
        while True:
            answer = await self._ask(row, request, body)
            if answer.status >= 400:
                return seen  # too many looks, say: what was begun is begun
            seen = json.loads(answer.body)
            if then.through(seen) or asyncio.get_running_loop().time() >= until:
                return seen
            await asyncio.sleep(LOOK_S)  # holding neither a thread nor a snapshot


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


def _result(answer: Outgoing, shown: Callable[[Json], Json] = lambda told: told) -> types.CallToolResult:
    """What an operation answered. A refusal is the tool's error, for the model to read: its code and its message."""
    told = json.loads(answer.body) if answer.body else {}
    if answer.status < 400:
        told = shown(told)
        text = orjson.dumps(told).decode()
        return types.CallToolResult(content=[types.TextContent(text=text)], structured_content=told)
    error = told["error"]
    text = f"{error['code']}: {error['message']}"
    return types.CallToolResult(content=[types.TextContent(text=text)], structured_content=told, is_error=True)


def _release() -> str:
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "0"
