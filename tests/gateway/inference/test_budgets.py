"""Budgets and tokens per minute of a key, on a real socket with the official client."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

import openai
import pytest

from marketplace.keys import service as keys
from marketplace.store.db import Database
from tests.gateway.inference.test_pipeline import CHAT, PROMPT, change_key

PRICE = {"price_prompt": "1", "price_cached": "1", "price_completion": "1"}
"""1 unit per million tokens: 1,000 nano-units for each."""
ASK = {**CHAT, "max_tokens": 8}
COST = (PROMPT + 8) * 1000
"""What ASK holds and costs when 8 tokens are generated."""


def test_fifty_at_once_against_a_budget_for_seven(make_house: Any) -> None:
    house = make_house({"tokens": 8, "interval_ms": 20.0}, **PRICE)
    change_key(house, budget=7 * COST, budget_period="day")
    outcomes: list[str] = []
    gate = threading.Barrier(50)
    client = house.client()

    def ask() -> None:
        gate.wait()
        try:
            outcomes.append(client.chat.completions.create(**ASK).choices[0].finish_reason)
        except openai.RateLimitError as error:
            outcomes.append(str(error.code))

    threads = [threading.Thread(target=ask) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["insufficient_quota"] * 43 + ["length"] * 7
    assert [row[5] for row in house.usage()] == [COST] * 7
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(**ASK)


def test_a_refusal_names_the_budget_and_is_not_tried_again(make_house: Any) -> None:
    house = make_house(**PRICE)
    change_key(house, budget=COST, budget_period="month")
    client = house.client(max_retries=2)
    client.chat.completions.create(**ASK)
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(**ASK)
    error = caught.value
    assert (error.status_code, error.code, error.type) == (429, "insufficient_quota", "insufficient_quota")
    assert error.response.headers["x-should-retry"] == "false"
    assert error.response.request.headers["x-stainless-retry-count"] == "0"
    assert "budget of the API key 'first key'" in error.message and "per month" in error.message
    assert f"{COST / 1e9:.9f}".rstrip("0") in error.message and "It is renewed at " in error.message
    house.limits(quota_status=402)
    with pytest.raises(openai.APIStatusError) as paid:
        client.chat.completions.create(**ASK)
    assert paid.value.status_code == 402


def test_what_was_held_and_not_used_comes_back(make_house: Any) -> None:
    house = make_house({"tokens": 4}, **PRICE)
    used, held = (PROMPT + 4) * 1000, COST
    change_key(house, budget=used * 2 + held, budget_period="total")
    client = house.client()
    for _ in range(3):
        client.chat.completions.create(**ASK)
    house.idle()
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(**ASK)
    assert "renewed" not in caught.value.message and "0 are held" in caught.value.message
    assert [row[5] for row in house.usage()] == [used] * 3


def test_a_long_answer_is_cut_where_the_budget_ends(make_house: Any) -> None:
    house = make_house({"tokens": 3000}, **PRICE)
    change_key(house, budget=(PROMPT + 1024 + 500) * 1000, budget_period="day")
    answer = house.client().chat.completions.create(**CHAT, max_tokens=4000)
    assert answer.choices[0].finish_reason == "length"
    ((outcome, billable, _, _, completion, cost, _),) = house.usage()
    assert (outcome, bool(billable)) == ("out_of_funds", True)
    assert 512 <= completion <= 1024 and cost == (PROMPT + completion) * 1000


def test_a_long_answer_goes_on_while_the_budget_lasts(make_house: Any) -> None:
    house = make_house({"tokens": 3000}, **PRICE)
    change_key(house, budget=(PROMPT + 3000) * 1000, budget_period="day")
    answer = house.client().chat.completions.create(**CHAT, max_tokens=3000)
    assert answer.usage is not None and answer.usage.completion_tokens == 3000
    assert [(row[0], row[5]) for row in house.usage()] == [("finished", (PROMPT + 3000) * 1000)]
    spending = next(iter(house.gateway.keys._spendings.values()))
    assert (spending.spent, spending.held) == ((PROMPT + 3000) * 1000, 0)


def test_a_client_that_leaves_pays_and_gives_back(make_house: Any) -> None:
    house = make_house({"tokens": 1000, "interval_ms": 5.0}, **PRICE)
    change_key(house, budget=10**9, budget_period="day", tokens_per_minute=100_000)
    stream = house.client().chat.completions.create(stream=True, **CHAT, max_tokens=1000)
    next(iter(stream))
    stream.close()
    ((outcome, *_, completion, cost, _),) = house.usage()
    state = next(iter(house.gateway.keys._keys.values()))
    assert outcome == "disconnected" and cost == (PROMPT + completion) * 1000
    assert (state.budget.spending.spent, state.budget.spending.held) == (cost, 0)
    level = house.do(lambda: state.limits.tokens.allowance(0).remaining)
    assert level > 100_000 - 1000 - PROMPT, "what was not used is back"


def test_failures_of_ours_cost_no_budget(make_house: Any) -> None:
    house = make_house({"tokens": 100, "interval_ms": 10.0, "die_after_tokens": 20}, **PRICE)
    change_key(house, budget=10**9, budget_period="day", tokens_per_minute=10_000)
    with pytest.raises(openai.APIError):
        house.client().chat.completions.create(**CHAT, max_tokens=100)
    house.idle()
    state = next(iter(house.gateway.keys._keys.values()))
    assert (state.budget.spending.spent, state.budget.spending.held) == (0, 0)


def test_a_refusal_further_on_gives_everything_back(make_house: Any) -> None:
    house = make_house({"tokens": 1000, "interval_ms": 5.0}, **PRICE)
    change_key(house, budget=10**9, budget_period="day", tokens_per_minute=1_000_000)
    house.do(lambda: house.gateway.catalogue.find("tiny").capacity.resize(1, 0))
    client = house.client()
    stream = client.chat.completions.create(stream=True, **CHAT, max_tokens=1000)
    state = next(iter(house.gateway.keys._keys.values()))
    before = state.budget.spending.held
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(**ASK)
    assert caught.value.code == "server_is_overloaded"
    assert state.budget.spending.held == before == (PROMPT + 1000) * 1000
    stream.close()
    poor = {**ASK, "max_tokens": 8000}
    house.idle()
    house.do(lambda: house.gateway.metering.purses.get(state.account_id)._standing)
    change_key(house, budget=10**18, budget_period="day", tokens_per_minute=None)
    database = Database(house.database_url)
    with database.write() as unit:
        from marketplace.accounts import service as accounts

        have = accounts.get(unit, state.account_id).posted
        accounts.adjust(unit, state.account_id, -have, key="all", now=1, random=os.urandom)
    database.close()
    house.eventually(lambda: house.gateway.metering.purses.get(state.account_id).available <= 0, "the account is empty")
    with pytest.raises(openai.RateLimitError) as broke:
        client.chat.completions.create(**poor)
    assert "balance does not cover" in broke.value.message
    assert state.budget.spending.held == 0


def test_several_prompts_hold_together_or_not_at_all(make_house: Any) -> None:
    house = make_house({"tokens": 8}, **PRICE)
    one = (3 + 8) * 1000
    client = house.client()
    first = client.completions.create(model="tiny", prompt=["abc", "def"], max_tokens=8)
    assert first.usage is not None
    one = first.usage.total_tokens * 1000 // 2
    change_key(house, budget=2 * one + 3 * one - 1, budget_period="day")
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="tiny", prompt=["abc", "def", "ghi"], max_tokens=8)
    assert client.completions.create(model="tiny", prompt=["abc", "def"], max_tokens=8).choices
    house.idle()
    spending = next(iter(house.gateway.keys._spendings.values()))
    assert (spending.spent, spending.held) == (4 * one, 0)


def test_a_rotated_key_goes_on_with_what_is_left(make_house: Any) -> None:
    house = make_house(**PRICE)
    change_key(house, budget=3 * COST, budget_period="week")
    house.client().chat.completions.create(**ASK)
    database = Database(house.database_url)
    with database.write() as unit:
        old = keys.find(unit, "first key")
        _, secret = keys.rotate(
            unit,
            old,
            overlap=3_600_000_000,
            pepper=house.gateway._management.pepper,
            now=house.gateway.services.spendings.clock(),
            random=os.urandom,
        )
        epoch = keys.key_epoch(unit)
    database.close()
    house.eventually(lambda: house.gateway.keys._epoch == epoch, "the key map is up to date")
    both = [house.client(), house.client(api_key=secret.text)]
    for client in both:
        client.chat.completions.create(**ASK)
    for client in both:
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(**ASK)


def test_a_budget_that_is_set_while_a_request_runs_counts_it(make_house: Any) -> None:
    house = make_house({"tokens": 200, "interval_ms": 5.0}, **PRICE)
    client = house.client()
    house.script(tokens=8)
    client.chat.completions.create(**ASK)
    house.script(tokens=200)
    running = client.chat.completions.create(stream=True, **CHAT, max_tokens=200)
    next(iter(running))
    change_key(house, budget=10**12, budget_period="day")
    house.script(tokens=8)
    client.chat.completions.create(**ASK)
    spending = next(iter(house.gateway.keys._spendings.values()))
    for _ in running:
        pass
    house.idle()
    total = sum(row[5] for row in house.usage())
    assert total == 2 * COST + (PROMPT + 200) * 1000
    assert (spending.spent, spending.held) == (total, 0)


def test_a_restart_forgets_nothing(make_house: Any, house_maker: Any) -> None:
    house = make_house(**PRICE)
    change_key(house, budget=3 * COST, budget_period="month")
    for _ in range(2):
        house.client().chat.completions.create(**ASK)
    house.idle()
    spent = next(iter(house.gateway.keys._spendings.values())).spent
    # A new key map and new spendings over the same ledger are what a new process has.
    from gateway.admission.keymap import KeyMap
    from gateway.app import wall_us

    fresh = KeyMap(house.gateway._database, house.gateway._management.pepper, wall_us)
    fresh.load()
    house.do(lambda: setattr(house.gateway.services, "keys", fresh))
    (unread,) = fresh._spendings.values()
    assert not unread.known and spent == 2 * COST
    house.client().chat.completions.create(**ASK)
    with pytest.raises(openai.RateLimitError):
        house.client().chat.completions.create(**ASK)
    house.idle()
    assert unread.spent == 3 * COST


def test_a_ledger_that_does_not_answer_is_no_reason_to_overspend(make_house: Any) -> None:
    house = make_house(**PRICE)
    change_key(house, budget=3 * COST, budget_period="month")
    spendings = house.gateway.services.spendings
    right = spendings._caught_up

    async def never() -> None:
        raise TimeoutError

    spendings._caught_up = never
    with pytest.raises(openai.InternalServerError) as caught:
        house.client().chat.completions.create(**ASK)
    assert (caught.value.status_code, caught.value.code) == (503, "service_unavailable")
    spendings._caught_up = right
    assert house.client().chat.completions.create(**ASK).choices


def test_tokens_per_minute(make_house: Any) -> None:
    house = make_house({"tokens": 8})
    change_key(house, tokens_per_minute=2 * (PROMPT + 8) + 40, requests_per_minute=100)
    client = house.client()
    raw = client.chat.completions.with_raw_response.create(**ASK)
    assert raw.headers["x-ratelimit-limit-tokens"] == str(2 * (PROMPT + 8) + 40)
    assert raw.headers["x-ratelimit-remaining-tokens"] == str(PROMPT + 8 + 40)
    assert raw.headers["x-ratelimit-reset-tokens"].endswith("s")
    assert raw.headers["x-ratelimit-remaining-requests"] == "99"
    client.chat.completions.create(**ASK)
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(**{**ASK, "max_tokens": 60})
    assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "tokens")
    headers = caught.value.response.headers
    assert 1 <= int(headers["retry-after"]) <= 60 and int(headers["retry-after-ms"]) > 0
    assert int(headers["x-ratelimit-remaining-tokens"]) <= 40
    assert len(house.usage()) == 2


def test_a_key_without_limits_gets_no_such_headers(shared: Any) -> None:
    raw = shared.client().chat.completions.with_raw_response.create(**ASK)
    assert not [name for name in raw.headers if name.startswith("x-ratelimit")]


def test_a_prompt_that_can_never_fit_is_not_tried_again(make_house: Any) -> None:
    house = make_house()
    change_key(house, tokens_per_minute=10)
    with pytest.raises(openai.RateLimitError) as caught:
        house.client(max_retries=2).chat.completions.create(**ASK)
    assert caught.value.type == "tokens" and f"the prompt alone has {PROMPT}" in caught.value.message
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_an_answer_without_a_bound_needs_the_whole_minute_and_gives_back_the_rest(make_house: Any) -> None:
    house = make_house({"tokens": 8})
    change_key(house, tokens_per_minute=500)
    client = house.client()
    assert client.chat.completions.create(**CHAT).choices
    house.idle()
    assert client.chat.completions.create(**ASK).choices
    house.idle()
    rate = next(iter(house.gateway.keys._keys.values())).limits.tokens
    assert house.do(lambda: rate.allowance(0).remaining) >= 500 - 2 * (PROMPT + 8)
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(**CHAT)
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60 * 2 * (PROMPT + 8) // 500 + 1


@pytest.mark.parametrize("kind", ["node", "service"])
def test_keys_of_nodes_and_services_ask_for_nothing(make_house: Any, kind: str) -> None:
    house = make_house()
    database = Database(house.database_url)
    with database.write() as unit:
        first = keys.find(unit, "first key")
        _, secret = keys.create(
            unit,
            kind=kind,  # type: ignore[arg-type]
            owner_id="provider",
            account_id=first.account_id if kind == "service" else None,
            name=kind,
            pepper=house.gateway._management.pepper,
            now=1,
            random=os.urandom,
            provider="acme",
        )
        epoch = keys.key_epoch(unit)
    database.close()
    house.eventually(lambda: house.gateway.keys._epoch == epoch, "the key map is up to date")
    reply = house.ask(house.headed(f"authorization: Bearer {secret.text}", body=json.dumps(ASK).encode()))
    assert reply.refusal() == (401, "invalid_api_key")


def test_a_star_allows_every_model_that_begins_so(make_house: Any) -> None:
    house = make_house()
    change_key(house, allowed_models='["other", "ti*"]')
    assert house.client().chat.completions.create(**ASK).choices
    assert [model.id for model in house.client().models.list()] == ["tiny"]
    change_key(house, allowed_models='["other*"]')
    with pytest.raises(openai.NotFoundError):
        house.client().chat.completions.create(**ASK)
