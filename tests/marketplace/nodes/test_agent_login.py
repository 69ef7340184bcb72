"""How nodes sign in: with their own key, and for a while in older ways, each of which is told that it ends."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import httpx2
import msgspec
import pytest
from sqlalchemy import select

from marketplace.agent.client import RefusedError, ServerClient
from marketplace.agent.credentials import Credentials
from marketplace.agent.wire import Capabilities, Register, Registered
from marketplace.events.tables import event
from marketplace.nodes.agent_api import AgentDoor
from marketplace.providers import service as providers
from tests.marketplace.rack import Rack, inventory

if TYPE_CHECKING:
    from tests.marketplace.conftest import Caller, Office

ASKED = Register(
    machine_id="machine-g01", boot_id="b", agent_version="1", inventory=inventory(), capabilities=Capabilities()
)


class Door:
    """The door for nodes, spoken to with any headers."""

    def __init__(self, rack: Rack) -> None:
        self.logins: list[str] = []
        self._door = AgentDoor(rack.office.context, deprecated=self.logins.append)

    def register(self, **headers: str) -> tuple[int, dict[str, str], dict[str, Any]]:
        """Status, headers and body of an answer."""
        return asyncio.run(self._ask(headers))

    async def _ask(self, headers: dict[str, str]) -> tuple[int, dict[str, str], dict[str, Any]]:
        sent: list[Any] = []
        shown = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": "POST", "path": "/agent/v1/register", "headers": shown}

        async def receive() -> Any:
            return {"type": "http.request", "body": msgspec.json.encode(ASKED), "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await self._door(scope, receive, send)
        told = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], told, msgspec.json.decode(sent[1]["body"])

    def refusal(self, **headers: str) -> str:
        """What it says to those whom it does not let in."""
        status, told, body = self.register(**headers)
        assert "deprecation" not in told
        return f"{status} {body['error']['code']}: {body['error']['message']}"


def test_a_node_with_its_own_key_is_told_nothing(rack: Rack, office: Office) -> None:
    door = Door(rack)
    for headers in ({"x_api_key": rack.key}, {"authorization": f"Bearer {rack.key}"}):
        status, told, body = door.register(**headers)
        assert status == 200 and "deprecation" not in told and "sunset" not in told
        assert msgspec.convert(body, Registered).warnings == []
    assert door.logins == []


def test_older_ways_work_and_are_told_that_they_end(
    rack: Rack, office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    door, operator = Door(rack), rack.operator()
    token = office.login(operator)
    for headers, way in (
        ({"authorization": f"Bearer {token}"}, "a token or password"),
        ({"authorization": f"Bearer {operator.key}"}, "a personal key"),
        ({"x_api_key": operator.key}, "a personal key"),
    ):
        with caplog.at_level(logging.WARNING):
            status, told, body = door.register(**headers)
        assert status == 200
        assert (told["deprecation"], told["sunset"]) == ("true", "2027-06-30")
        begun = msgspec.convert(body, Registered)
        assert begun.warnings == [
            f"signing in with {way} is deprecated and ends on 2027-06-30: make a key of kind node"
        ]
        assert f"{begun.node_id} signed in with {way}" in caplog.text
        assert operator.key not in caplog.text and token not in caplog.text
        caplog.clear()
    assert door.logins == ["a token or password", "a personal key", "a personal key"]
    with office.database.read() as unit:
        rows = unit.select(select(event).where(event.c.action == "node.deprecated_login").order_by(event.c.at)).all()
    assert len(rows) == 3 and {row.owner_id for row in rows} == {rack.provider_id}
    assert {row.subject_id for row in rows} == {begun.node_id}
    assert msgspec.json.decode(rows[0].detail) == {"with": "a token or password", "until": "2027-06-30"}


def test_each_who_may_not_come_in_is_told_why(rack: Rack, ada: Caller, office: Office) -> None:
    door, operator = Door(rack), rack.operator()
    team, admin = office.team(ada), office.person("admin")
    token, members = office.login(operator), office.login(ada)
    assert door.refusal() == "401 NotAuthenticated: No credential: send 'X-API-Key: <key of a node>'."
    assert door.refusal(x_api_key="hr_n_wrong").startswith("401 InvalidApiKey")
    assert door.refusal(x_api_key="hr_u_wrong").startswith("401 InvalidApiKey")
    assert door.refusal(authorization="Bearer wrong").startswith("401 InvalidToken")
    assert door.refusal(authorization="Basic eDp5").startswith("401 InvalidToken")
    for headers, reason in (
        ({"x_api_key": ada.key}, "403 PermissionDenied: Only people who act for a provider"),
        ({"authorization": f"Bearer {members}"}, "403 PermissionDenied: Only people who act for a provider"),
        ({"x_api_key": team.key}, "403 CredentialsNotPermitted: A team key is not for nodes."),
        ({"x_api_key": office.service().key}, "403 CredentialsNotPermitted: A service key is not for nodes."),
        ({"x_api_key": admin.key}, "403 CredentialsNotPermitted: The person acts for no provider"),
        ({"x_api_key": ada.key, "authorization": f"Bearer {token}"}, "400 AmbiguousCredentials"),
    ):
        assert door.refusal(**headers).startswith(reason)
    office.wait(400 * 86_400)
    assert door.refusal(authorization=f"Bearer {token}").startswith("401 ExpiredToken")
    office.ask("app_settings.update", {"settings": {"node_legacy_auth": False}}, admin)
    only = "403 CredentialsNotPermitted: Nodes sign in with a key of their own here"
    assert door.refusal(x_api_key=operator.key).startswith(only)
    assert door.register(x_api_key=rack.key)[0] == 200
    assert door.logins == []


def test_a_machine_of_another_provider_is_not_taken_over(rack: Rack, office: Office) -> None:
    door = Door(rack)
    assert door.register(x_api_key=rack.key)[0] == 200
    who = office.person("provider")
    with office.database.write() as unit:
        rival = providers.create(unit, name="rival", now=office.clock(), random=office.random)
        providers.add_member(unit, rival.id, who.id, is_root=True, now=office.clock())
    assert "another provider's" in door.refusal(x_api_key=who.key)


def test_an_account_with_a_second_factor_cannot_be_a_nodes() -> None:
    async def server(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, json={"partial_token": "p"})

    async def main() -> None:
        credential = Credentials(email="a@b.c", password="pw")
        async with ServerClient("http://x", credential, transport=httpx2.MockTransport(server)) as client:
            with pytest.raises(RefusedError, match=r"second factor.*make a key of kind node"):
                await client.register(ASKED)

    asyncio.run(main())
