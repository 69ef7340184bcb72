"""Several models behind one gateway: found by name, asleep while nobody asks, awake when somebody does."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest
from sqlalchemy import update

from gateway.fleet.budget import Rest
from marketplace.store.db import Database
from marketplace.users.tables import users

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]


def ask(house: Any, model: str) -> Any:
    return house.client().chat.completions.create(model=model, messages=HELLO)


def rest_of(house: Any, model: str) -> Rest:
    rest: Rest = house.do(lambda: house.gateway.fleet.find(model).rest)
    return rest


def begin(house: Any, work: Callable[[], Any]) -> Any:
    """Start a coroutine on the gateway's loop; returns its future."""

    return asyncio.run_coroutine_threadsafe(work(), house._loop)


def test_each_is_found_by_its_name_and_computed_by_its_engine(make_house: Any) -> None:
    house = make_house(more_models=("other",))
    assert [model.id for model in house.client().models.list().data] == ["tiny", "other"]
    for name in ("tiny", "other", "other"):
        answer = ask(house, name)
        assert (answer.model, answer.usage.completion_tokens) == (name, 32)
    house.idle()
    prompts = [house.do(lambda engine=engine: engine.core.snapshot(0).prompt_tokens) for engine in house.engines]
    assert prompts[1] == 2 * prompts[0] > 0
    assert house.rows("SELECT model, count(*) FROM usage_record GROUP BY model ORDER BY model") == [
        ("other", 2), ("tiny", 1),
    ]  # fmt: skip
    with pytest.raises(openai.NotFoundError):
        ask(house, "a third")


def test_a_request_wakes_a_model_that_sleeps_and_one_that_is_not_loaded(make_house: Any) -> None:
    house = make_house(more_models=("other",))
    fleet = house.gateway.fleet
    other = fleet.find("other")
    begin(house, lambda: fleet.sleep(other)).result(10)
    assert rest_of(house, "other") is Rest.ASLEEP and house.engines[1].core.asleep
    assert not house.engines[0].core.asleep
    assert ask(house, "other").usage.completion_tokens == 32
    assert rest_of(house, "other") is Rest.AWAKE and not house.engines[1].core.asleep
    begin(house, lambda: fleet.unload(other)).result(10)
    assert rest_of(house, "other") is Rest.AWAY and not house.replicas[1].client.connected
    assert house.ask(house.headed(method="GET", path="/readyz", body=b"")).status == 200, "nothing is wrong with it"
    assert ask(house, "other").usage.completion_tokens == 32
    metrics = house.ask(house.headed(method="GET", path="/metrics", body=b"")).body
    assert b'headrace_model_awake{model="other"} 1.0' in metrics


def test_a_move_waits_for_requests_and_requests_wait_for_a_move(make_house: Any) -> None:
    house = make_house(more_models=("other",))
    fleet = house.gateway.fleet
    other, engine = fleet.find("other"), house.engines[1]
    answers: list[Any] = []
    asking = [threading.Thread(target=lambda: answers.append(ask(house, "other"))) for _ in range(2)]
    house.do(engine.stall)
    asking[0].start()
    house.eventually(lambda: other.visits == 1, "the first uses it")
    going = begin(house, lambda: fleet.sleep(other))
    house.eventually(lambda: other.moving == "leaving", "the model is about to sleep")
    asking[1].start()
    house.eventually(lambda: "other" in fleet._waking, "the second waits for it to wake again")
    assert house.do(lambda: (other.visits, engine.core.asleep)) == (1, False)
    house.do(engine.resume)
    going.result(10)
    for thread in asking:
        thread.join(20)
    assert [answer.usage.completion_tokens for answer in answers] == [32, 32]
    assert rest_of(house, "other") is Rest.AWAKE


def test_a_model_makes_room_for_another_when_nobody_uses_it(make_house: Any) -> None:
    house = make_house(more_models=("other",), memory_mib=800)
    assert (rest_of(house, "tiny"), rest_of(house, "other")) == (Rest.AWAKE, Rest.AWAY), "there is room for one"
    assert ask(house, "other").usage.completion_tokens == 32
    assert rest_of(house, "other") is Rest.AWAKE and rest_of(house, "tiny") is not Rest.AWAKE
    house.script(tokens=100_000, interval_ms=5.0)
    stream = house.client().chat.completions.create(model="other", messages=HELLO, stream=True)
    house.do(lambda: setattr(house.gateway.fleet, "_wake_s", 0.1))
    with pytest.raises(openai.InternalServerError) as caught:
        ask(house, "tiny")
    assert (caught.value.status_code, caught.value.code) == (503, "service_unavailable")
    assert "no room" in caught.value.message and int(caught.value.response.headers["retry-after"]) == 5
    assert rest_of(house, "other") is Rest.AWAKE, "whoever is in use stays"
    stream.close()


def test_a_model_is_in_use_until_its_engine_has_stopped_who_left(make_house: Any) -> None:
    house = make_house({"tokens": 100_000, "interval_ms": 2.0}, more_models=("other",))
    other = house.gateway.fleet.find("other")
    stream = house.client().chat.completions.create(model="other", messages=HELLO, stream=True)
    next(iter(stream))
    house.do(house.engines[1].stall)
    stream.close()
    house.eventually(lambda: not house.gateway.services.answers, "the answer is over")
    assert house.do(lambda: (other.visits, other.holding.free)) == (1, False)
    house.do(house.engines[1].resume)
    house.eventually(lambda: other.holding.free, "the engine has stopped")


def test_who_cannot_pay_wakes_nobody(make_house: Any) -> None:
    house = make_house(more_models=("other",), memory_mib=800, first_balance="0")
    for _ in range(2):
        with pytest.raises(openai.RateLimitError) as caught:
            ask(house, "other")
        assert caught.value.code == "insufficient_quota"
    assert (rest_of(house, "tiny"), rest_of(house, "other")) == (Rest.AWAKE, Rest.AWAY)
    key = next(iter(house.do(lambda: list(house.gateway.services.keys._keys.values()))))
    assert house.do(lambda: key.limits.running) == 0


@pytest.mark.slow
def test_nobody_asks_and_they_sleep_then_go(make_house: Any) -> None:
    house = make_house(more_models=("other",), idle_sleep_s=0.01)
    house.eventually(lambda: all(d.rest is Rest.ASLEEP for d in house.gateway.fleet), "all sleep")
    assert ask(house, "tiny").usage.completion_tokens == 32
    assert house.do(lambda: house.gateway.fleet.find("tiny").woke_in_s) < 1.0


def test_an_admin_moves_models(make_house: Any) -> None:
    house = make_house(more_models=("other",), drain_s=0.05)

    def post(path: str, model: str = "other") -> Any:
        return house.ask(house.request({"model": model}, f"/v1/{path}"))

    def states() -> dict[str, str]:
        answer = house.ask(house.headed(f"authorization: Bearer {house.key}", method="GET", path="/v1/model_states"))
        return {one["id"]: one["state"] for one in json.loads(answer.body)["data"]}

    assert states() == {"tiny": "awake", "other": "awake"}
    for path, state in (("sleep_model", "asleep"), ("unload_model", "unloaded"), ("load_model", "awake")):
        answer = post(path)
        assert (answer.status, json.loads(answer.body)["state"]) == (200, state)
        assert states() == {"tiny": "awake", "other": state}
        assert post(path).status == 200, "it is that already"
    house.script(tokens=100_000, interval_ms=5.0)
    stream = house.client().chat.completions.create(model="other", messages=HELLO, stream=True)
    for path in ("sleep_model", "unload_model"):
        assert post(path).refusal() == (409, "model_in_use")
    assert states()["other"] == "awake" and next(iter(stream)) is not None, "it goes on"
    stream.close()
    assert post("load_model", "a third").refusal() == (404, "model_not_found")
    assert house.ask(house.request({"name": "other"}, "/v1/load_model")).status == 400
    assert house.ask(house.headed("authorization: Bearer hr_u_x", path="/v1/load_model")).status == 401
    house.idle()
    told = house.rows(
        "SELECT action, subject_id, actor_kind, actor_id <> '' FROM event WHERE action LIKE 'models.%' ORDER BY at"
    )
    assert told == [(f"models.{verb}", "other", "user", 1) for verb in ("sleep", "unload", "load") for _ in range(2)]
    database = Database(house.database_url)
    with database.write() as unit:
        unit.execute(update(users).values(role="user"))
    database.close()
    assert post("sleep_model").refusal() == (403, "permission_denied")
