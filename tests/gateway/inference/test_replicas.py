"""Several replicas of one model behind one gateway: who gets a request, and what becomes of one whose replica dies."""

from __future__ import annotations

import threading
from typing import Any

import openai
import pytest

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": HELLO}
LONG: list[Any] = [{"role": "system", "content": "You are a most helpful assistant. " * 20}]


def prompts_of(house: Any) -> list[int]:
    """Prompts that each replica has taken in, in tokens."""
    return [house.do(lambda engine=engine: engine.core.snapshot(0).prompt_tokens) for engine in house.engines]


def test_requests_with_the_same_beginning_go_to_the_same_replica(make_house: Any) -> None:
    house = make_house(replicas=2)
    client = house.client()
    taken = []
    for question in ("One?", "Two?", "Three?"):
        client.chat.completions.create(model="tiny", messages=[*LONG, {"role": "user", "content": question}])
        house.idle()
        taken.append(prompts_of(house))
    assert sum(taken[0]) > 600 and 0 in taken[0]
    assert [0 in now for now in taken] == [True] * 3, "all three went to one"
    client.chat.completions.create(**CHAT)
    house.idle()
    assert 0 not in prompts_of(house), "it has nothing in common with them, and it was the other one's turn"


@pytest.mark.slow
def test_each_gets_one_in_turn_where_prefixes_do_not_count(make_house: Any) -> None:
    house = make_house(replicas=2, routing="round-robin")
    client = house.client()
    for _ in range(4):
        client.chat.completions.create(**CHAT)
    house.idle()
    first, second = prompts_of(house)
    assert first == second > 0


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_replica_that_dies_before_its_first_token_costs_nobody_anything(make_house: Any, stream: bool) -> None:
    house = make_house({"first_token_ms": 60_000.0}, replicas=2)
    done: list[Any] = []

    def ask() -> None:
        answer = house.client().chat.completions.create(stream=stream, **CHAT)
        done.append("".join(c.choices[0].delta.content or "" for c in answer if c.choices) if stream else answer)

    asking = threading.Thread(target=ask)
    asking.start()
    busy: list[int] = []

    def sent() -> bool:
        busy[:] = [index for index, engine in enumerate(house.engines) if engine.sessions.live]
        return bool(busy)

    house.eventually(sent, "a replica has the request")
    house.script(first_token_ms=0.0)
    house.do(house.engines[busy[0]].die)
    asking.join(20)
    text = done[0] if stream else done[0].choices[0].message.content
    assert text.startswith("Hello, wörld!")
    ((outcome, billable, prompt, _, completion, cost, _),) = house.usage()
    assert (outcome, billable, completion) == ("finished", 1, 32) and prompt > 0 and cost > 0
    stats = house.do(lambda: house.gateway.metering.meter.stats)
    assert (stats.opened, stats.settled, stats.voided) == (1, 1, 0), "one hold, one settlement"
    assert house.do(lambda: house.gateway.telemetry.model("tiny").moved) == 1
    assert (
        b'headrace_requests_moved_total{model="tiny"} 1.0'
        in house.ask(house.headed(method="GET", path="/metrics", body=b"")).body
    )


@pytest.mark.slow
def test_what_was_handed_over_is_not_said_twice(make_house: Any) -> None:
    house = make_house({"tokens": 100, "interval_ms": 10.0, "die_after_tokens": 20}, replicas=2)
    with pytest.raises(openai.APIError, match="engine"):
        for _ in house.client().chat.completions.create(stream=True, **CHAT):
            pass
    assert [(row[0], row[1], row[5]) for row in house.usage()] == [("engine_error", 0, 0)]
    assert house.do(lambda: house.gateway.telemetry.model("tiny").moved) == 0


def test_a_request_is_sent_again_once(make_house: Any) -> None:
    """One that ends every engine it meets ends two of them, not all."""
    house = make_house({"first_token_ms": 60_000.0}, replicas=3)
    failures: list[openai.APIStatusError] = []

    def ask() -> None:
        with pytest.raises(openai.InternalServerError) as caught:
            house.client().chat.completions.create(**CHAT)
        failures.append(caught.value)

    asking = threading.Thread(target=ask)
    asking.start()
    killed: list[int] = []

    def kill() -> bool:
        for index, engine in enumerate(house.engines):
            if index not in killed and engine.sessions.live:
                killed.append(index)
                engine.die()
        return len(killed) == 2

    house.eventually(kill, "two replicas had it")
    asking.join(20)
    assert failures[0].status_code == 503 and int(failures[0].response.headers["retry-after"]) >= 1
    assert [(row[0], row[1], row[5]) for row in house.usage()] == [("engine_error", 0, 0)]
    assert house.do(lambda: next(iter(house.gateway.fleet)).connected)


@pytest.mark.slow
def test_one_replica_that_is_away_is_no_trouble(make_house: Any) -> None:
    house = make_house(replicas=2)
    house.do(house.engine.die)
    house.eventually(lambda: not house.replica.client.connected, "the connection is lost")
    house.do(house.replica.lost)
    for _ in range(3):
        assert house.client().chat.completions.create(**CHAT).usage.completion_tokens == 32
    assert house.ask(house.headed(method="GET", path="/readyz", body=b"")).status == 200
    metrics = house.ask(house.headed(method="GET", path="/metrics", body=b"")).body
    assert b'headrace_engine_ready_replicas{model="tiny"} 1.0' in metrics
    assert b'headrace_engine_up{model="tiny"} 1.0' in metrics
