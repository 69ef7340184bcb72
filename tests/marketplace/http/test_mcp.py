"""MCP with the official client over real HTTP: what a caller sees, what a call does, who is kept out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import httpx2
import jsonschema
import pytest
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from marketplace import mcp_tools
from marketplace.http.app import MAX_BODY
from marketplace.http.operation import Reads
from marketplace.ledger.money import NANO
from marketplace.mcp import McpEndpoint
from marketplace.mcp_tools import McpTools
from marketplace.operations import TABLE
from tests.marketplace.rack import Rack

if TYPE_CHECKING:
    from tests.marketplace.conftest import Caller, Office
    from tests.marketplace.http.conftest import Site

both_eras = pytest.mark.parametrize("mode", ["auto", "legacy"])
TOOLS = {row.tool.name: row for row in TABLE if row.tool is not None}
JSON = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
PING = b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}'


def talk(site: Site, headers: dict[str, str], work: Callable[[Client], Awaitable[Any]], mode: str = "auto") -> Any:
    """Connect the official client with these headers and let it work."""

    async def main() -> Any:
        async with httpx2.AsyncClient(headers=headers, timeout=20) as http:
            transport = streamable_http_client(site.url("/mcp"), http_client=http)
            async with Client(transport, mode=mode) as client:
                return await work(client)

    return asyncio.run(main())


def call(site: Site, who: Caller | str, name: str, arguments: dict[str, Any], mode: str = "auto") -> Any:
    """Call one tool."""
    key = who if isinstance(who, str) else who.key
    return talk(site, {"Authorization": f"Bearer {key}"}, lambda client: client.call_tool(name, arguments), mode)


def post(site: Site, body: bytes, **headers: str) -> httpx2.Response:
    """Send bytes to the endpoint, without the client."""
    sent = {**JSON, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return site.http.post(site.url("/mcp"), content=body, headers=sent)


def refused(error: BaseException) -> str:
    """The message of the protocol's error inside the client's groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, MCPError)
    return str(error)


@both_eras
@pytest.mark.parametrize("header", ["Authorization", "X-API-Key"])
def test_the_account_of_a_key(site: Site, mode: str, header: str) -> None:
    ada = site.office.person(balance=123_456_789)
    headers = {header: f"Bearer {ada.key}" if header == "Authorization" else ada.key}
    answer = talk(site, headers, lambda client: client.call_tool("get_account_info", {}), mode)
    assert not answer.is_error
    assert answer.structured_content == site_account(site.office, ada)
    assert json.loads(answer.content[0].text) == answer.structured_content
    assert ("/mcp", 200) in site.seen


def site_account(office: Office, who: Caller) -> dict[str, Any]:
    """What the operation itself answers."""
    answer = office.ask("account.info", {}, who)
    return {name: float(value) if name == "balance" else value for name, value in answer.body.items()}


def test_a_session_s_token_works_too(site: Site) -> None:
    ada = site.office.person()
    site.office.wait(60)
    answer = call(site, site.office.login(ada), "get_account_info", {})
    assert answer.structured_content["balance"] == 0


@both_eras
def test_tools_are_the_table_s_rows_with_their_schemas_and_hints(site: Site, mode: str) -> None:
    admin = site.office.person("admin")
    listed = talk(site, {"X-API-Key": admin.key}, lambda client: client.list_tools(), mode).tools
    assert {tool.name for tool in listed} == TOOLS.keys() >= {"get_account_info", "list_transactions"}
    for tool in listed:
        row = TOOLS[tool.name]
        assert row.tool is not None and tool.description == row.tool.description
        jsonschema.Draft202012Validator.check_schema(tool.input_schema)
        assert tool.input_schema["type"] == "object" and tool.input_schema["additionalProperties"] is False
        assert tool.annotations is not None
        assert tool.annotations.read_only_hint is isinstance(row.handler, Reads)
        assert tool.annotations.destructive_hint is row.tool.destructive
        if row.answer is not None and tool.output_schema is not None:
            jsonschema.validate(json.loads(json.dumps(dict(row.answer))), tool.output_schema)
    account = next(tool for tool in listed if tool.name == "get_account_info")
    assert account.input_schema["properties"].keys() == {"team_id"} and "required" not in account.input_schema


def test_a_caller_sees_the_tools_that_its_permissions_and_credential_reach(site: Site) -> None:
    team = site.office.team()
    listed = talk(site, {"X-API-Key": team.key}, lambda client: client.list_tools()).tools
    assert {tool.name for tool in listed} == {
        name for name, row in TOOLS.items() if site.office.ask(row.name, dict(row.example), team).status != 403
    }
    assert not call(site, team, "get_account_info", {}).is_error


def test_refusals_are_errors_of_the_tool_with_code_and_message(site: Site) -> None:
    ada = site.office.person()
    others = call(site, ada, "get_account_info", {"team_id": site.office.team().id})
    assert others.is_error and others.content[0].text.startswith("NotTeamMember: ")
    assert others.structured_content["error"]["code"] == "NotTeamMember"
    wrong = call(site, ada, "list_transactions", {"limit": "many"})
    assert wrong.is_error and wrong.content[0].text.startswith("ValidationFailed: limit: ")
    unknown = call(site, ada, "get_account_info", {"surprise": 1})
    assert unknown.is_error and "surprise" in unknown.content[0].text


def test_arguments_become_the_request(site: Site) -> None:
    ada = site.office.person(balance=10_000_000)
    window = {"from": "2020-01-01T00:00:00Z", "to": "2020-02-01T00:00:00Z"}
    assert call(site, ada, "list_transactions", window).structured_content["transactions"] == []
    found = call(site, ada, "list_transactions", {"limit": 1}).structured_content
    assert [line["amount"] for line in found["transactions"]] == [1]


def test_a_model_narrows_what_it_is_shown(site: Site) -> None:
    admin = site.office.person("admin")
    size = {"cpu_count": 1, "dram": 1 << 30, "disk": 1 << 30}
    for kind, brand, cost in (("h200-141gb", "H200", 250), ("cpu", "CPU", 0.5)):
        made = {"name": kind, "brand_short": brand, "cost_per_hour": cost}
        assert site.office.ask("instance_types.add", made, admin).status == 200
        for count in (1, 2):
            variant = {"name": f"{kind}.{count}", "instance_type": kind, "cost_per_hour": cost * count, **size}
            assert site.office.ask("instance_types.add_variant", variant, admin).status == 200

    def names(**arguments: Any) -> list[str]:
        answer = call(site, admin, "list_instance_types", arguments)
        assert not answer.is_error and json.loads(answer.content[0].text) == answer.structured_content
        return [one["name"] for kind in answer.structured_content["instance_types"] for one in kind["variants"]]

    assert len(names()) == 4
    assert names(gpu="h200") == ["h200-141gb.1", "h200-141gb.2"]
    assert sorted(names(max_cost_per_hour=250)) == ["cpu.1", "cpu.2", "h200-141gb.1"]
    assert names(max_cost_per_hour=0.5) == ["cpu.1"] and names(gpu="h200", max_cost_per_hour=0.5) == []
    assert call(site, admin, "list_instance_types", {"max_cost_per_hour": -1}).is_error
    for scope, refused in (("Personal", False), ("Teams", False), ("Everybody", True)):
        assert call(site, admin, "list_instances", {"scope": scope}).is_error is refused


def test_a_model_may_wait_for_the_machine_that_it_rents(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    rack = Rack(site.office)
    node, ada = rack.node(), site.office.person(balance=1000 * NANO)
    ask, looks = McpTools._ask, []

    async def look(tools: McpTools, row: Any, request: Any, body: Any) -> Any:
        if row.name == "instances.list":
            looks.append(body["selector"]["ById"])
            if len(looks) == 3:
                await asyncio.to_thread(node.bring_up, looks[-1][0])
        return await ask(tools, row, request, body)

    monkeypatch.setattr(McpTools, "_ask", look)
    monkeypatch.setattr(mcp_tools, "LOOK_S", 0)
    wanted = {"instance_type": "h200.1", "image_url": "https://example.com/guest.raw"}
    answer = call(site, ada, "rent_instance", {**wanted, "wait": True})
    assert not answer.is_error, answer.content
    ids = answer.structured_content["instance_ids"]
    assert looks == [ids] * 3
    (seen,) = json.loads(answer.content[1].text)["instances"]
    assert (seen["id"], seen["status"]) == (ids[0], "Active")

    at_once = call(site, ada, "rent_instance", wanted)
    assert not at_once.is_error and len(at_once.content) == 1 and len(looks) == 3
    assert call(site, ada, "rent_instance", {**wanted, "instance_type": "none", "wait": True}).is_error
    assert len(looks) == 3


def test_calls_count_against_the_operation_s_rate(site: Site) -> None:
    ada = site.office.person()
    while site.office.ask("account.info", {}, ada).status == 200:
        pass
    late = call(site, ada, "get_account_info", {})
    assert late.is_error and late.content[0].text.startswith("RateLimited: ")
    site.office.wait(60)
    assert not call(site, ada, "get_account_info", {}).is_error


def test_messages_that_call_nothing_are_counted_as_well(site: Site) -> None:
    ada = site.office.person()
    statuses = [post(site, PING, x_api_key=ada.key).status_code for _ in range(101)]
    assert statuses == [200] * 100 + [429]
    strangers = [post(site, PING).status_code for _ in range(200)]
    assert strangers.index(429) <= 100 and set(strangers) == {401, 429}
    site.office.wait(60)


def test_an_unknown_tool_is_an_error_of_the_protocol(site: Site) -> None:
    with pytest.raises(BaseException) as raised:
        call(site, site.office.person(), "drop_tables", {})
    assert "no tool 'drop_tables'" in refused(raised.value)


@both_eras
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer nonsense"}, {"X-API-Key": "mk_u_nonsense"}])
def test_without_a_good_credential_nothing_is_answered(site: Site, mode: str, headers: dict[str, str]) -> None:
    with pytest.raises(BaseException) as raised:
        talk(site, headers, lambda client: client.list_tools(), mode)
    expected = ("NotAuthenticated", "InvalidToken", "InvalidApiKey")
    assert refused(raised.value).startswith(expected)
    answer = post(site, PING, **headers)
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["data"]["code"] in expected


def test_a_key_is_bound_to_its_addresses_here_too(site: Site) -> None:
    ada = site.office.person()
    body = {"id": ada.key_id, "allowed_addresses": ["203.0.113.7"]}
    assert site.office.ask("keys.update", body, site.office.login(ada)).status == 200
    answer = post(site, PING, x_api_key=ada.key)
    assert (answer.status_code, answer.json()["error"]["data"]["code"]) == (403, "CredentialsNotPermitted")


@pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1.evil.example", "null", "http://[", ""])
def test_pages_from_elsewhere_are_refused(site: Site, origin: str) -> None:
    ada = site.office.person()
    answer = post(site, PING, x_api_key=ada.key, origin=origin)
    assert (answer.status_code, answer.json()["error"]["data"]["code"]) == (403, "OriginNotAllowed")


@pytest.mark.parametrize("origin", ["http://127.0.0.1:8000", "http://localhost:5173", "http://[::1]:80"])
def test_pages_of_this_machine_are_not(site: Site, origin: str) -> None:
    answer = post(site, PING, x_api_key=site.office.person().key, origin=origin)
    assert (answer.status_code, answer.json()["result"]) == (200, {})
    assert answer.headers["cache-control"] == "no-store" and answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("era", [{}, {"mcp-protocol-version": "2026-07-28"}])
@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 5000, b'{"a":1', b"1" * 9000])
def test_malformed_json_is_a_parse_error(site: Site, body: bytes, era: dict[str, str]) -> None:
    ada = site.office.person()
    answer = post(site, body, x_api_key=ada.key, **era)
    assert answer.status_code == 400 and answer.json()["error"]["code"] in (-32700, -32600, -32602)


@pytest.mark.parametrize("body", [b"[]", b"null", b"{}", b'{"jsonrpc": "2.0", "id": 1}'])
def test_what_is_no_message_is_refused(site: Site, body: bytes) -> None:
    answer = post(site, body, x_api_key=site.office.person().key)
    assert answer.status_code == 400 and "error" in answer.json()


def test_a_body_beyond_the_bound_is_413(site: Site) -> None:
    ada = site.office.person()
    padding = b" " * (MAX_BODY - len(PING))
    assert post(site, PING + padding, x_api_key=ada.key).status_code == 200
    answer = post(site, PING + padding + b" ", x_api_key=ada.key)
    assert (answer.status_code, answer.json()["error"]["data"]["code"]) == (413, "BodyTooLarge")


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "OPTIONS"])
def test_only_post_is_taken(site: Site, method: str) -> None:
    answer = site.http.request(method, site.url("/mcp"), headers={"x-api-key": site.office.person().key})
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"


def test_a_package_that_does_not_start_is_an_error_and_no_hang(
    sqlite_office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any) -> Any:
        raise RuntimeError("it does not start")

    monkeypatch.setattr("mcp.server.streamable_http_manager.StreamableHTTPSessionManager.run", broken)

    async def main() -> None:
        endpoint = McpEndpoint(TABLE, sqlite_office.context)
        for _ in range(2):  # who comes next is not kept waiting by it
            with pytest.raises(RuntimeError, match="it does not start"):
                await asyncio.wait_for(endpoint._loaded(), 20)
        await endpoint.stop()

    asyncio.run(main())
