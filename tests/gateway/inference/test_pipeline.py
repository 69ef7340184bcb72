"""What a request meets on its way: keys, scope, limits, the queue, money; and that the books stay right."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import openai
import pytest
from sqlalchemy import create_engine, text, update

from marketplace.keys import service as keys
from marketplace.keys.tables import api_key
from marketplace.ledger import meters
from marketplace.store import epochs
from marketplace.store.db import Database

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "tiny", "messages": HELLO}
PROMPT = len("user\nHi\nassistant\n") + 3


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ("authorization: Bearer ",),
        ("authorization: Bearer hr_u_wrong",),
        ("authorization: Basic abc",),
        ("authorization: Bearer " + "x" * 5000,),
        ("authorization: Bearer \xff\xfe",),
        ("x-api-key: nope",),
        ("x-api-key: ",),
    ],
    ids=lambda headers: str(headers)[:30],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/tiny"])
def test_wrong_and_missing_keys_get_one_answer(shared: Any, headers: tuple[str, ...], path: str) -> None:
    method = "GET" if "models" in path else "POST"
    answer = shared.ask(shared.headed(*headers, method=method, path=path))
    assert answer.refusal() == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"


def test_both_headers_carry_a_key(shared: Any) -> None:
    body = json.dumps(CHAT).encode()
    for header in (
        f"authorization: Bearer {shared.key}",
        f"authorization: bearer {shared.key}",
        f"x-api-key: {shared.key}",
    ):
        assert shared.ask(shared.headed(header, body=body))[0] == 200


def test_a_revoked_key_stops_working_within_a_second(make_house: Any) -> None:
    house = make_house()
    client = house.client()
    assert client.models.list().data
    database = Database(house.database_url)
    with database.write() as unit:
        row = keys.find(unit, "first key")
        keys.revoke(unit, row.id, now=1)
    revoked = time.monotonic()
    while True:
        try:
            client.models.list()
        except openai.AuthenticationError as error:
            assert error.code == "invalid_api_key"
            break
        assert time.monotonic() - revoked < 1.0
    database.close()


def change_key(house: Any, **columns: Any) -> None:
    """Change columns of the first key and wait until the gateway has seen it."""
    database = Database(house.database_url)
    with database.write() as unit:
        row = keys.find(unit, "first key")
        unit.execute(update(api_key).where(api_key.c.id == row.id).values(**columns))
        epoch = epochs.bump(unit, epochs.KEYS)
    database.close()
    house.eventually(lambda: house.gateway.keys._epoch == epoch, "the key map is up to date")


def test_a_key_s_scope_is_not_told_apart_from_a_missing_model(make_house: Any) -> None:
    house = make_house()
    change_key(house, allowed_models='["another"]')
    client = house.client()
    with pytest.raises(openai.NotFoundError) as scoped:
        client.chat.completions.create(**CHAT)
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**{**CHAT, "model": "tine"})
    assert scoped.value.message.replace("tiny", "tine") == missing.value.message.replace(
        missing.value.request_id or "", scoped.value.request_id or ""
    )
    assert client.models.list().data == []
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("tiny")


def test_a_key_may_be_bound_to_addresses(make_house: Any) -> None:
    house = make_house()
    change_key(house, allowed_addresses='["10.0.0.0/8"]')
    with pytest.raises(openai.AuthenticationError) as caught:
        house.client().chat.completions.create(**CHAT)
    assert caught.value.code == "ip_not_authorized"
    change_key(house, allowed_addresses='["127.0.0.0/8"]')
    assert house.client().chat.completions.create(**CHAT).choices


def test_requests_per_minute(make_house: Any) -> None:
    house = make_house()
    change_key(house, requests_per_minute=2)
    client = house.client()
    raw = client.chat.completions.with_raw_response.create(**CHAT)
    assert raw.headers["x-ratelimit-limit-requests"] == "2"
    assert raw.headers["x-ratelimit-remaining-requests"] == "1"
    assert raw.headers["x-ratelimit-reset-requests"]
    client.chat.completions.create(**CHAT)
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(**CHAT)
    assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "requests")
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 30
    assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "0"
    assert len(house.usage()) == 2


def test_requests_at_a_time(make_house: Any) -> None:
    house = make_house({"tokens": 1000, "interval_ms": 5.0})
    change_key(house, max_concurrency=1)
    client = house.client()
    stream = client.chat.completions.create(stream=True, **CHAT)
    next(iter(stream))
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(**CHAT)
    assert caught.value.code == "rate_limit_exceeded"
    assert caught.value.response.headers["retry-after"]
    stream.close()
    house.idle()
    house.script(tokens=4, interval_ms=0.0)
    assert client.chat.completions.create(**CHAT).choices


def test_a_long_prompt_is_tokenised_and_refused_with_both_numbers(shared: Any) -> None:
    long = [{"role": "user", "content": "x" * 100_000}]
    status, _, body = shared.ask(shared.request({"model": "tiny", "messages": long}))
    error = json.loads(body)["error"]
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert "8192 tokens" in error["message"] and f"{100_000 + PROMPT - 2} tokens" in error["message"]


def test_the_queue_is_bounded(make_house: Any) -> None:
    house = make_house({"tokens": 1000, "interval_ms": 5.0})
    house.do(lambda: house.gateway.catalogue.find("tiny").capacity.resize(1, 1))
    client = house.client()
    first = client.chat.completions.create(stream=True, **CHAT)
    second = client.chat.completions.create(stream=True, **CHAT)
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(**CHAT)
    assert caught.value.status_code == 503
    assert caught.value.code == "server_is_overloaded"
    assert int(caught.value.response.headers["retry-after"]) >= 1
    first.close()
    second.close()
    assert len(house.usage()) == 2


def test_an_engine_that_is_away(make_house: Any) -> None:
    house = make_house()
    house.do(house.engine.die)
    house.eventually(lambda: not house.replica.client.connected, "the connection is lost")
    house.do(house.replica.lost)
    with pytest.raises(openai.InternalServerError) as caught:
        house.client().chat.completions.create(**CHAT)
    assert (caught.value.status_code, caught.value.code) == (503, "service_unavailable")
    assert caught.value.response.headers["retry-after"]
    status, _, body = house.ask(house.headed(method="GET", path="/readyz", body=b""))
    assert status == 503 and "down" in json.loads(body)["reasons"]["engine"]
    assert house.ask(house.headed(method="GET", path="/healthz", body=b""))[0] == 200
    assert house.usage() == []


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_in_the_middle_ends_every_request_free_of_charge(make_house: Any, stream: bool) -> None:
    house = make_house({"tokens": 100, "interval_ms": 10.0, "die_after_tokens": 20})
    with pytest.raises(openai.APIError) as caught:
        answer = house.client().chat.completions.create(stream=stream, **CHAT)
        for _ in answer:
            pass
    assert "engine" in str(caught.value)
    assert [(row[0], row[1], row[5]) for row in house.usage()] == [("engine_error", 0, 0)]


def test_a_request_that_takes_too_long(make_house: Any) -> None:
    house = make_house({"tokens": 1000, "interval_ms": 5.0})
    house.limits(request_timeout_s=0.15)
    with pytest.raises(openai.InternalServerError) as caught:
        house.client().chat.completions.create(**CHAT)
    assert (caught.value.status_code, caught.value.code) == (504, "timeout")
    with pytest.raises(openai.APIError, match="longer than"):
        list(house.client().chat.completions.create(stream=True, **CHAT))
    assert [(row[0], row[1], row[5]) for row in house.usage()] == [("timeout", 0, 0)] * 2


def test_without_money_nothing_runs_and_retrying_is_discouraged(make_house: Any) -> None:
    house = make_house(first_balance="0")
    attempts: list[Any] = []
    client = house.client(max_retries=2)
    client._client.event_hooks["request"].append(attempts.append)
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(**CHAT)
    assert (caught.value.code, caught.value.type) == ("insufficient_quota", "insufficient_quota")
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert len(attempts) == 1
    assert house.usage() == []


def test_the_quota_status_is_a_setting(make_house: Any) -> None:
    house = make_house(first_balance="0", quota_status=402)
    with pytest.raises(openai.APIStatusError) as caught:
        house.client().chat.completions.create(**CHAT)
    assert (caught.value.status_code, caught.value.code) == (402, "insufficient_quota")


def test_a_balance_for_m_requests_admits_at_most_m(make_house: Any) -> None:
    """Each request of one token costs at most prompt × 20 + 60 nano-units; the balance covers five."""
    cost = PROMPT * 20 + 60
    balance = f"0.{5 * cost + cost // 2:09d}"
    house = make_house({"tokens": 1000, "first_token_ms": 300.0}, first_balance=balance, clerk=True)
    results: list[str] = []

    def one() -> None:
        try:
            house.client().chat.completions.create(max_tokens=1, **CHAT)
            results.append("served")
        except openai.RateLimitError as error:
            results.append(str(error.code))

    threads = [threading.Thread(target=one) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(results) == ["insufficient_quota"] * 7 + ["served"] * 5
    assert sum(row[5] for row in house.usage()) == 5 * cost


def test_an_answer_that_outgrows_the_balance_is_cut_and_says_so(make_house: Any) -> None:
    balance = f"0.{(PROMPT * 20 + 1500 * 60):09d}"
    house = make_house({"tokens": 5000, "interval_ms": 1.0}, first_balance=balance, clerk=True)
    answer = house.client().chat.completions.create(**CHAT)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.model_extra["error"]["code"] == "insufficient_quota"
    ((outcome, billable, _, _, completion, cost, _),) = house.usage()
    assert (outcome, billable) == ("out_of_funds", 1)
    assert completion == answer.usage.completion_tokens < 5000
    assert cost <= PROMPT * 20 + 1500 * 60


def test_cached_tokens_cost_less_and_dropped_guesses_nothing(make_house: Any) -> None:
    house = make_house({"cached": 10, "tokens": 2, "accepted": 5, "rejected": 3})
    raw = house.client().chat.completions.with_raw_response.create(**CHAT)
    usage = raw.parse().usage
    assert usage.prompt_tokens_details.cached_tokens == 10
    assert usage.completion_tokens == 2
    assert usage.completion_tokens_details.accepted_prediction_tokens == 1
    assert usage.completion_tokens_details.rejected_prediction_tokens == 3
    expected = (usage.prompt_tokens - 10) * 20 + 10 * 10 + 2 * 60
    assert int(raw.headers["x-cost-nanousd"]) == expected == house.usage()[0][5]


def test_a_new_price_is_offered_and_old_requests_keep_theirs(make_house: Any) -> None:
    house = make_house({"tokens": 60, "interval_ms": 10.0})
    client = house.client()
    stream = client.chat.completions.create(stream=True, **CHAT)
    next(iter(stream))
    database = Database(house.database_url)
    with database.write() as unit:
        version = meters.set_price(unit, "tiny", 10**9, 10**9, 10**9, version_id="new", now=2**50)
    house.do(lambda: house.gateway.catalogue.take_prices({"tiny": version}))
    database.close()
    list(stream)
    house.script(tokens=2)
    raw = client.chat.completions.with_raw_response.create(**CHAT)
    assert raw.headers["x-price-version"] == "new"
    old, new = house.usage()
    assert old[5] == PROMPT * 20 + 60 * 60
    assert new[5] == (PROMPT + 2) * 1000


@pytest.mark.slow
def test_the_same_on_postgresql(make_house: Any, postgres_url: str) -> None:
    server = create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(text("CREATE DATABASE front_door"))
    server.dispose()
    house = make_house(database_url=postgres_url.removesuffix("postgres") + "front_door", clerk=True)
    answer = house.client().chat.completions.create(**CHAT)
    list(house.client().chat.completions.create(stream=True, **CHAT))
    assert [row[0] for row in house.usage()] == ["finished", "finished"]
    assert house.usage()[0][4] == answer.usage.completion_tokens
