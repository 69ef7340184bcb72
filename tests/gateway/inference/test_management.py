"""The management API beside inference: one process, one ledger, one key store."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from tests.gateway.inference.conftest import House, MakeHouse, Reply


def ask(house: House, path: str, body: Any, credential: str = "", method: str = "POST") -> Reply:
    """Ask the management API."""
    headers = [f"authorization: Bearer {credential}"] if credential else []
    return house.ask(house.headed(*headers, method=method, path=path, body=json.dumps(body).encode()))


def told(reply: Reply) -> Any:
    """The body of a success."""
    assert reply.status == 200, reply.body
    return json.loads(reply.body, parse_float=Decimal)


def test_from_the_first_password_to_a_revoked_key(make_house: MakeHouse) -> None:
    house = make_house()
    login = {"email": house.first.admin_email, "password": house.first.admin_password}
    token = told(ask(house, "/api/v1/auth/login", login))["token"]
    assert told(ask(house, "/api/v1/auth/me", {}, token))["role"] == "admin"
    before = told(ask(house, "/api/v1/account/info", {}, token))["balance"]
    made = told(ask(house, "/api/v1/api-keys/add", {"name": "laptop"}, token))

    client = house.client(api_key=made["key"])

    def works() -> bool:
        return any(state.key_id == made["id"] for state in house.gateway.keys._keys.values())

    house.eventually(works, "the new key is known")
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
    assert answer.usage is not None and answer.usage.completion_tokens > 0
    house.idle()

    listed = told(ask(house, "/api/v1/account/transactions/list", {}, made["key"]))["transactions"]
    usage = listed[0]["info"]["ServiceUsage"]
    assert (usage["key_name"], usage["model"], usage["requests"]) == ("laptop", "tiny", 1)
    assert usage["completion_tokens"] == answer.usage.completion_tokens
    assert listed[0]["amount"] == told(ask(house, "/api/v1/account/info", {}, token))["balance"] - before < 0

    told(ask(house, "/api/v1/api-keys/delete", {"id": made["id"]}, token))
    house.eventually(lambda: not works(), "the deleted key is forgotten")
    with pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
    told(ask(house, "/api/v1/auth/logout", {}, token))
    assert ask(house, "/api/v1/auth/me", {}, token).status == 401


def test_a_team_pays_for_what_its_key_asks(make_house: MakeHouse) -> None:
    house = make_house()
    login = {"email": house.first.admin_email, "password": house.first.admin_password}
    token = told(ask(house, "/api/v1/auth/login", login))["token"]
    own = told(ask(house, "/api/v1/account/info", {}, token))["balance"]
    team = told(ask(house, "/api/v1/teams/create", {"name": "research"}, token))
    made = told(ask(house, "/api/v1/api-keys/add", {"name": "ci", "team_id": team["id"]}, token))
    assert made["key"].startswith("hr_t_")
    client = house.client(api_key=made["key"])

    def loaded() -> bool:
        return any(state.key_id == made["id"] for state in house.gateway.keys._keys.values())

    house.eventually(loaded, "the team's key is known")
    with pytest.raises(openai.RateLimitError, match="the balance does not cover"):  # the team has nothing yet
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
    funds = {"account": {"ByTeamIds": [team["id"]]}, "amount": 100}
    told(ask(house, "/api/v1/account/transactions/create/external", funds, token))

    house.eventually(lambda: house.money(team["account_id"]) > 0, "the team's money arrives")
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
    house.idle()
    by_team = {"selector": {"ByTeam": team["id"]}}
    usage, funded = told(ask(house, "/api/v2/account/transactions/list", by_team, token))["transactions"]
    assert usage["info"]["ServiceUsage"]["key_name"] == "ci" and usage["amount"] < 0 and funded["amount"] == 100
    assert told(ask(house, "/api/v1/account/info", {}, made["key"]))["balance"] == 100 + usage["amount"]
    assert told(ask(house, "/api/v1/account/info", {}, token))["balance"] == own
    assert ask(house, f"/api/v1/teams/{team['id']}/delete", {}, token).status == 409
    got = told(ask(house, f"/api/v1/teams/{team['id']}", {}, made["key"], "GET"))
    assert [one["role"] for one in got["members"]] == ["Owner"]


def test_the_document_and_unknown_paths(make_house: MakeHouse) -> None:
    house = make_house()
    document = told(ask(house, "/api/openapi.json", None, method="GET"))
    assert document["openapi"] == "3.1.0" and "/api/v1/auth/login" in document["paths"]
    assert ask(house, "/swagger-ui", None, method="GET").status == 200
    assert ask(house, "/rapidoc", None, method="GET").status == 200
    unknown = ask(house, "/api/v1/nothing", {})
    assert unknown.status == 404 and json.loads(unknown.body)["error"]["code"] == "NotFound"
    metrics = house.ask(house.headed(method="GET", path="/metrics", body=b"")).body.decode()
    assert 'headrace_requests_total{route="/api",status="404"}' in metrics


def test_mcp_is_mounted_beside_them(make_house: MakeHouse) -> None:
    house = make_house()
    question = b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "get_account_info"}}'
    headers = ["accept: application/json", "content-type: application/json", f"x-api-key: {house.key}"]
    answer = json.loads(house.ask(house.headed(*headers, path="/mcp", body=question)).body)
    assert answer["result"]["structuredContent"]["balance"] == 1000
    assert house.ask(house.headed(*headers[:2], path="/mcp", body=question)).status == 401
    metrics = house.ask(house.headed(method="GET", path="/metrics", body=b"")).body.decode()
    assert 'headrace_requests_total{route="/mcp",status="200"} 1' in metrics


def test_the_status_of_an_empty_account_is_a_setting_that_counts_at_once(make_house: MakeHouse) -> None:
    house = make_house(first_balance="0")
    login = {"email": house.first.admin_email, "password": house.first.admin_password}
    token = told(ask(house, "/api/v1/auth/login", login))["token"]
    client = house.client()

    def status_of_a_refusal() -> int:
        with pytest.raises(openai.APIStatusError, match="the balance does not cover") as caught:
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
        return caught.value.status_code

    assert status_of_a_refusal() == 429
    services = house.gateway.services
    for chosen, status in ((402, 402), (None, 429)):
        told(ask(house, "/api/v1/app-settings/update", {"settings": {"quota_status": chosen}}, token))
        house.eventually(lambda wanted=status: services.limits.quota_status == wanted, "it counts")  # type: ignore[misc]
        assert status_of_a_refusal() == status
