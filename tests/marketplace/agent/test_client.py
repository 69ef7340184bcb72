"""Credentials of a node, and how it takes what a server answers."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx2
import pytest

from marketplace.agent import credentials
from marketplace.agent.client import RefusedError, ServerClient, StaleSessionError, UnreachableError
from marketplace.agent.credentials import CredentialError, Credentials, load
from marketplace.agent.inventory_wire import Cpu, Disk, Inventory
from marketplace.agent.wire import Capabilities, Ready, Register

KEY = "hr_n_" + "k" * 49
REGISTER = Register(
    machine_id="m",
    boot_id="b",
    agent_version="1",
    inventory=Inventory(
        hostname="h",
        cpu=Cpu(brand="", architecture="x86_64", threads=[]),
        memory_bytes=1,
        numa=[],
        disk=Disk(path="/", total_bytes=1, free_bytes=1),
    ),
    capabilities=Capabilities(),
)


class Server:
    """Answers as it is told, and remembers the questions."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self.answers = list(answers)
        self.requests: list[httpx2.Request] = []

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        status, body = self.answers.pop(0)
        return httpx2.Response(status, json=body) if body is not None else httpx2.Response(status)


def ask(server: Server, credential: Credentials, call: Any) -> Any:
    async def run() -> Any:
        async with ServerClient("http://server", credential, transport=httpx2.MockTransport(server)) as client:
            return await call(client)

    return asyncio.run(run())


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "credentials.json"
    file.write_text(json.dumps({"api_key": "hr_n_other"}))
    assert load({credentials.ENVIRONMENT: f" {KEY}\n"}, file).headers() == {"X-API-Key": KEY}


@pytest.mark.parametrize(
    ("text", "headers", "deprecated"),
    [
        (json.dumps({"api_key": KEY}), {"X-API-Key": KEY}, False),
        (KEY + "\n", {"X-API-Key": KEY}, False),
        (json.dumps({"token": "t0"}), {"Authorization": "Bearer t0"}, True),
        (json.dumps({"pat": "p0"}), {"Authorization": "Bearer p0"}, True),
        (json.dumps({"email": "a@b.c", "password": "pw"}), {}, True),
        (json.dumps({"api_key": KEY, "token": "t0"}), {"X-API-Key": KEY}, False),
    ],
)
def test_every_kind_of_credentials_file_loads_and_is_left_as_it_is(
    tmp_path: Path, text: str, headers: dict[str, str], deprecated: bool
) -> None:
    file = tmp_path / "credentials.json"
    file.write_text(text)
    found = load({}, file)
    assert found.headers() == headers
    assert (found.deprecated is not None) == deprecated
    credentials.protect(file)
    assert file.read_text() == text
    assert file.stat().st_mode & 0o077 == 0
    for secret in (KEY, "t0", "p0", "pw"):
        assert secret not in repr(found)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "neither a key nor"),
        ("{}", "needs api_key"),
        ('{"api-key": "x"}', "neither a key nor"),
        ('{"token": "t\\n0"}', "token in .* has characters"),
    ],
)
def test_a_file_without_a_credential_is_explained(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "credentials.json"
    with pytest.raises(CredentialError, match="set HEADRACE_NODE_KEY"):
        load({}, file)
    file.write_text(text)
    with pytest.raises(CredentialError, match=why):
        load({}, file)


def test_a_key_is_sent_and_nothing_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    server = Server((200, {"node_id": "n", "session_id": "s", "epoch": 4}))
    answer = ask(server, Credentials(api_key=KEY), lambda client: client.register(REGISTER))
    assert (answer.node_id, answer.epoch, answer.settings.readiness_timeout_s) == ("n", 4, 600)
    assert server.requests[0].headers["x-api-key"] == KEY
    assert server.requests[0].url.path == "/agent/v1/register"
    assert caplog.records == []


def test_a_password_becomes_a_token_and_each_registration_warns(caplog: pytest.LogCaptureFixture) -> None:
    server = Server((200, {"token": "t1", "expires_at": "…"}), (200, {"node_id": "n", "session_id": "s", "epoch": 1}))
    with caplog.at_level(logging.WARNING):
        ask(server, Credentials(email="a@b.c", password="pw"), lambda client: client.register(REGISTER))
    assert [request.url.path for request in server.requests] == ["/api/v1/auth/login", "/agent/v1/register"]
    assert server.requests[1].headers["authorization"] == "Bearer t1"
    assert "signing in by password is deprecated" in caplog.text
    assert "pw" not in caplog.text


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (409, {"error": {"code": "StaleSession", "message": "register again"}}, StaleSessionError),
        (409, {"error": {"code": "Conflict", "message": "no"}}, RefusedError),
        (401, {"error": {"code": "InvalidApiKey", "message": "unknown"}}, RefusedError),
        (404, {"error": {"code": "InstanceNotFound", "message": "unknown"}}, RefusedError),
        (503, {"error": {"code": "ServiceUnavailable", "message": "later"}}, UnreachableError),
        (429, {"error": {"code": "RateLimited", "message": "slower"}}, UnreachableError),
        (502, None, UnreachableError),
        (200, {"ok": "what"}, UnreachableError),
    ],
)
def test_answers_are_told_apart_by_what_the_node_can_do(status: int, body: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        ask(
            Server((status, body)),
            Credentials(api_key=KEY),
            lambda client: client.ready(Ready(instance_id="i", token="t", via="ssh")),
        )


def test_no_answer_is_not_a_refusal() -> None:
    async def dead(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("refused")

    with pytest.raises(UnreachableError, match="refused"):
        ask(dead, Credentials(api_key=KEY), lambda client: client.register(REGISTER))  # type: ignore[arg-type]
