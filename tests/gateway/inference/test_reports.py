"""What a key's account used, what the key may do, what there is to spend: read back as it was metered."""

from __future__ import annotations

import csv
import http.client
import io
import json
import os
from decimal import Decimal
from typing import Any

import openai
import pytest
from sqlalchemy import create_engine, text

from marketplace.accounts import service as accounts
from marketplace.keys import service as keys
from marketplace.store.db import Database
from marketplace.users import service as users
from tests.gateway.inference.test_budgets import ASK, COST, PRICE
from tests.gateway.inference.test_pipeline import PROMPT, change_key

TOKENS = PROMPT + 8


def get(house: Any, path: str, key: str | None = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """A whole answer, chunked or not."""
    connection = http.client.HTTPConnection("127.0.0.1", house.port, timeout=20)
    try:
        connection.request("GET", path, headers={"authorization": f"Bearer {key or house.key}", **headers})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def body(house: Any, path: str, key: str | None = None) -> Any:
    status, _, content = get(house, path, key)
    assert status == 200, content
    return json.loads(content, parse_float=Decimal)


@pytest.fixture
def used(make_house: Any) -> Any:
    """A gateway that answered five requests, three with the first key and two with one of somebody else."""
    house = make_house({"tokens": 8}, **PRICE)
    database = Database(house.database_url)
    pepper, now = house.gateway._management.pepper, house.gateway._management.clock
    with database.write() as unit:
        user = users.create(unit, email="eve@example.com", role="user", password_hash="x", now=now(), random=os.urandom)
        accounts.top_up(unit, user.account_id, 10**9, key="eve", now=now(), random=os.urandom)
        _, secret = keys.create(
            unit,
            kind="user",
            owner_id=user.id,
            account_id=user.account_id,
            name="eve's",
            pepper=pepper,
            now=now(),
            random=os.urandom,
        )
        epoch = keys.key_epoch(unit)
    database.close()
    house.eventually(lambda: house.gateway.keys._epoch == epoch, "the key map is up to date")
    house.eve = secret.text
    for _ in range(3):
        house.client().chat.completions.create(**ASK)
    for _ in range(2):
        house.client(api_key=secret.text).chat.completions.create(**ASK)
    house.idle()
    return house


def test_every_request_is_one_record_and_pages_follow_one_another(used: Any) -> None:
    whole = body(used, "/v1/usage")
    assert whole["object"] == "list" and whole["has_more"] is False and whole["next_cursor"] is None
    assert len(whole["data"]) == 3
    one = whole["data"][0]
    assert (one["prompt_tokens"], one["completion_tokens"], one["total_tokens"]) == (PROMPT, 8, TOKENS)
    assert one["cost"] == Decimal(COST) / 10**9 and 0 <= one["cached_tokens"] <= PROMPT
    assert (one["model"], one["key_name"], one["outcome"], one["billable"]) == ("tiny", "first key", "finished", True)
    assert one["created_at"].endswith("Z") and one["created"] > 1_700_000_000
    seen, cursor = [], ""
    for _ in range(3):
        page = body(used, f"/v1/usage?limit=1{cursor}")
        seen += page["data"]
        cursor = f"&cursor={page['next_cursor']}"
    assert seen == whole["data"] and page["next_cursor"] is None
    assert len({record["id"] for record in seen}) == 3
    assert [record["created"] for record in seen] == sorted((record["created"] for record in seen), reverse=True)


def test_an_account_sees_nothing_of_another(used: Any) -> None:
    mine = {record["id"] for record in body(used, "/v1/usage")["data"]}
    theirs = {record["id"] for record in body(used, "/v1/usage", used.eve)["data"]}
    assert len(mine) == 3 and len(theirs) == 2 and not mine & theirs
    borrowed = body(used, "/v1/usage?limit=1")["next_cursor"]
    page = body(used, f"/v1/usage?cursor={borrowed}", used.eve)["data"]
    assert {record["id"] for record in page} <= theirs
    assert body(used, "/v1/usage?group_by=key", used.eve)["data"][0]["key_name"] == "eve's"
    assert body(used, "/v1/key", used.eve)["data"]["name"] == "eve's"


@pytest.mark.parametrize("by", ["model", "key", "day"])
def test_sums(used: Any, by: str) -> None:
    answer = body(used, f"/v1/usage?group_by={by}")
    (found,) = answer["data"]
    assert answer["group_by"] == by
    assert (found["requests"], found["total_tokens"], found["cost"]) == (3, 3 * TOKENS, Decimal(3 * COST) / 10**9)
    records = body(used, "/v1/usage")["data"]
    assert found["cached_tokens"] == sum(record["cached_tokens"] for record in records)
    if by == "day":
        assert found["day"] == records[0]["created_at"][:10]
    else:
        assert found["model" if by == "model" else "key_id"] == records[0]["model" if by == "model" else "key_id"]


def test_a_range_of_time(used: Any) -> None:
    newest = body(used, "/v1/usage")["data"][0]
    assert body(used, "/v1/usage?from=2020-01-01&to=2020-02-01")["data"] == []
    assert len(body(used, f"/v1/usage?from={newest['created_at'][:10]}")["data"]) == 3
    exact = body(used, f"/v1/usage?from={newest['created_at']}")["data"]
    assert [record["id"] for record in exact] == [newest["id"]]
    assert len(body(used, f"/v1/usage?to={newest['created_at']}")["data"]) == 2
    assert len(body(used, f"/v1/usage?from={newest['created'] - 3600}&to={newest['created'] + 5}")["data"]) == 3


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("from=yesterday", "from"),
        ("to=2026-13-01", "to"),
        ("from=2026-02-01&to=2026-01-01", "from"),
        ("group_by=colour", "group_by"),
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=x", "limit"),
        ("cursor=nonsense", "cursor"),
        ("format=xml", "format"),
        ("surprise=1", "surprise"),
        ("a", None),
        ("from=%ff", None),
    ],
)
def test_what_cannot_be_read_is_named(shared: Any, query: str, param: str | None) -> None:
    reply = shared.ask(shared.request(b"", f"/v1/usage?{query}", "GET"))
    assert reply.status == 400 and reply.refusal()[1] in ("invalid_value", "unknown_parameter")
    assert json.loads(reply.body)["error"]["param"] == param


@pytest.mark.parametrize("path", ["/v1/usage", "/v1/key", "/v1/credits"])
def test_they_want_a_key(shared: Any, path: str) -> None:
    reply = shared.ask(shared.headed(method="GET", path=path, body=b""))
    assert reply.refusal() == (401, "invalid_api_key")
    assert shared.ask(shared.request(b"", path, "POST")).refusal() == (405, "method_not_supported")


def test_csv_is_what_json_says_and_no_formula(used: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.inference.reports.CSV_PAGE", 2)
    change_key(used, name='=HYPERLINK("http://evil","x"),\n')
    records = body(used, "/v1/usage")["data"]
    for path, headers in (("/v1/usage?format=csv", {}), ("/v1/usage", {"accept": "text/csv"})):
        status, sent, content = get(used, path, **headers)
        assert status == 200 and sent["content-type"] == "text/csv; charset=utf-8"
        assert sent["transfer-encoding"] == "chunked" and "attachment" in sent["content-disposition"]
        rows = list(csv.DictReader(io.StringIO(content.decode(), newline="")))
        assert [row["request_id"] for row in rows] == [record["id"] for record in records]
        assert [Decimal(row["cost"]) for row in rows] == [record["cost"] for record in records]
        assert {row["key_name"] for row in rows} == {'\'=HYPERLINK("http://evil","x"),\n'}
    _, _, content = get(used, "/v1/usage?format=csv&group_by=day")
    (row,) = csv.DictReader(io.StringIO(content.decode(), newline=""))
    assert (row["requests"], row["day"]) == ("3", records[0]["created_at"][:10])


def test_the_key_tells_its_limits_and_what_is_left(used: Any) -> None:
    free = body(used, "/v1/key")["data"]
    assert (free["limit"], free["limit_remaining"], free["limit_reset"], free["allowed_models"]) == (None,) * 4
    assert free["usage"] == free["usage_daily"] == free["usage_monthly"] == Decimal(3 * COST) / 10**9
    change_key(
        used,
        budget=10 * COST,
        budget_period="month",
        requests_per_minute=60,
        tokens_per_minute=1000,
        allowed_models='["tiny", "llama-*"]',
        expires_at=4_000_000_000_000_000,
    )
    bound = body(used, "/v1/key")["data"]
    assert used.key.startswith(bound["label"]) and bound["kind"] == "user" and bound["name"] == "first key"
    assert bound["limit"] == Decimal(10 * COST) / 10**9
    assert bound["limit_remaining"] == Decimal(7 * COST) / 10**9 == bound["limit"] - bound["limit_spent"]
    assert (bound["limit_reset"], bound["limit_held"]) == ("monthly", 0)
    assert bound["limit_resets_at"].endswith("-01T00:00:00Z")
    assert bound["expires_at"] == "2096-10-02T07:06:40Z"
    assert bound["allowed_models"] == ["llama-*", "tiny"]
    assert bound["rate_limit"] == {
        "requests_per_minute": 60,
        "requests_remaining": 60,
        "tokens_per_minute": 1000,
        "tokens_remaining": 1000,
        "max_concurrency": None,
    }


def test_credits_are_what_the_ledger_has(used: Any) -> None:
    found = body(used, "/v1/credits", used.eve)["data"]
    assert found == {
        "total_credits": 1,
        "total_usage": Decimal(2 * COST) / 10**9,
        "balance": 1 - Decimal(2 * COST) / 10**9,
        "held": 0,
        "available": 1 - Decimal(2 * COST) / 10**9,
        "credit_limit": 0,
        "unlimited": False,
        "currency": "USD",
    }
    engine = create_engine(used.database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE account SET unlimited = true WHERE kind = 'customer'"))
    engine.dispose()
    endless = body(used, "/v1/credits", used.eve)["data"]
    assert (endless["unlimited"], endless["available"]) == (True, None)


def test_reports_have_a_rate_of_their_own(make_house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.inference.reports.PER_MINUTE", 2)
    house = make_house()
    assert [get(house, "/v1/credits")[0] for _ in range(2)] == [200, 200]
    status, headers, content = get(house, "/v1/key")
    assert (status, json.loads(content)["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(headers["retry-after"]) >= 1
    assert house.client().chat.completions.create(**ASK).choices


def test_an_exhausted_key_can_still_ask_why(make_house: Any) -> None:
    house = make_house(**PRICE)
    change_key(house, budget=1, budget_period="day")
    with pytest.raises(openai.RateLimitError):
        house.client().chat.completions.create(**ASK)
    assert body(house, "/v1/key")["data"]["limit_remaining"] == Decimal("0.000000001")
