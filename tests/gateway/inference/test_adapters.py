"""Adapters by HTTP: loaded, named as models, billed as their base, unloaded while answers run."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import threading
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest

from gateway.cli import make_parser, read_settings
from gateway.fleet.replicas import StartError
from gateway.inference import adapters

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


def post(house: Any, path: str, key: str | None = None, **body: Any) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{house.port}/v1/{path}",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {key or house.key}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_an_adapter_comes_is_used_and_goes_while_it_is_used(make_house: Any) -> None:
    house = make_house({"tokens": 40, "interval_ms": 5})
    client = house.client()
    assert post(house, "load_lora_adapter", lora_name="mine", lora_path="/adapters/mine") == (
        200, {"object": "lora_adapter", "id": "mine", "base_model": "tiny"},
    )  # fmt: skip
    models = {model.id: model for model in client.models.list().data}
    assert set(models) == {"tiny", "mine"}
    assert models["mine"].model_extra["pricing"] == models["tiny"].model_extra["pricing"]
    assert house.replica.config.lora == ("mine=/adapters/mine",), "an engine that starts again has it"
    stream = client.chat.completions.create(model="mine", stream=True, **CHAT)
    first = next(iter(stream))
    assert first.model == "mine"
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        gone = other.submit(post, house, "unload_lora_adapter", lora_name="mine").result(20)
    assert gone == (200, {"object": "lora_adapter", "id": "mine", "deleted": True})
    assert list(stream)[-1].choices[0].finish_reason == "stop", "who uses it goes on"
    assert house.engine.core.adapters == [] and house.replica.config.lora == ()
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="mine", **CHAT)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    told = house.rows("SELECT action, subject_id, detail FROM event WHERE action LIKE 'models.%' ORDER BY at")
    assert told == [
        ("models.load_adapter", "mine", '{"base_model":"tiny","lora_path":"/adapters/mine"}'),
        ("models.unload_adapter", "mine", "{}"),
    ]
    # An engine that has lost an adapter says so, and nothing is charged
    assert post(house, "load_lora_adapter", lora_name="mine", lora_path="/adapters/mine")[0] == 200
    house.do(house.engine.core.adapters.clear)
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="mine", **CHAT)
    assert "mine" in caught.value.message
    settled = {row[0]: row[5] for row in house.usage()}
    assert set(settled) == {"finished", "refused"} and settled["finished"] > 0 == settled["refused"]


def test_an_adapter_goes_though_its_model_cannot_be_loaded_or_an_engine_has_lost_it(
    make_house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = make_house(replicas=2)
    for name in ("gone", "lost"):
        assert post(house, "load_lora_adapter", lora_name=name, lora_path=f"/adapters/{name}")[0] == 200
    house.do(house.engines[0].core.adapters.clear)
    status, answer = post(house, "unload_lora_adapter", lora_name="lost")
    assert (status, answer["error"]["code"]) == (503, "service_unavailable")
    assert house.engines[1].core.adapters == ["gone"], "the other engine has forgotten it"

    async def broken(self: Any, *, once: bool = False) -> None:
        raise StartError("/adapters/gone/adapter_config.json: cannot be read")

    assert post(house, "unload_model", model="tiny")[0] == 200
    monkeypatch.setattr(type(house.replica), "ready", broken)
    assert post(house, "load_model", model="tiny")[0] == 503
    assert post(house, "unload_lora_adapter", lora_name="gone")[0] == 200
    assert [replica.config.lora for replica in house.replicas] == [(), ()], "it can be loaded again"


def test_of_two_bases_that_load_a_name_at_once_one_has_it(make_house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    house = make_house(more_models=("other",))
    both = threading.Barrier(2)
    load_all = adapters._load_all

    async def together(replicas: Any, ask: Any) -> None:
        await load_all(replicas, ask)
        await asyncio.to_thread(both.wait, 10)

    monkeypatch.setattr(adapters, "_load_all", together)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        asked = [
            pool.submit(post, house, "load_lora_adapter", lora_name="x", lora_path="/x", base_model=base)
            for base in ("tiny", "other")
        ]
        answers = sorted((one.result(20) for one in asked), key=lambda answer: answer[0])
    assert [status for status, _ in answers] == [200, 400] and answers[1][1]["error"]["param"] == "lora_name"
    kept = {base: engine.core.adapters for base, engine in zip(("tiny", "other"), house.engines)}
    assert [base for base, names in kept.items() if names] == [answers[0][1]["base_model"]]


def test_what_cannot_be_loaded_is_refused_by_field(shared: Any) -> None:
    refusals = [
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "", "lora_path": "/x"}, "lora_name"),
        ({"lora_name": "a=b", "lora_path": "/x"}, "lora_name"),
        ({"lora_name": "a\0b", "lora_path": "/x"}, "lora_name"),
        ({"lora_name": "x", "lora_path": ""}, "lora_path"),
        ({"lora_name": "tiny", "lora_path": "/x"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "/x/broken"}, "lora_path"),
    ]
    for body, field in refusals:
        status, answer = post(shared, "load_lora_adapter", **body)
        assert (status, answer["error"]["param"]) == (400, field), body
    assert "/x/broken/adapter_config.json" in answer["error"]["message"]
    assert post(shared, "load_lora_adapter", lora_name="x", lora_path="/x", base_model="other")[0] == 404
    for path in ("unload_lora_adapter", "unload_model"):
        told = shared.ask(shared.request({"lora_name": "x", "model": "x", "force": True}, f"/v1/{path}"))
        assert told.status == 404 and "force" in told.headers["x-ignored-parameters"].split(","), path
    assert post(shared, "unload_lora_adapter", lora_name="tiny")[0] == 404, "a model is no adapter"
    assert post(shared, "load_lora_adapter", key="hr_u_nobody", lora_name="x", lora_path="/x")[0] == 401
    assert [model.id for model in shared.client().models.list().data] == ["tiny"]


def test_only_admins_load_and_unload(shared: Any) -> None:
    keys = shared.gateway.services.keys
    state = next(iter(shared.do(lambda: list(keys._keys.values()))))
    owner, state.owner_id = state.owner_id, "somebody else"
    try:
        for path, body in (("load_lora_adapter", {"lora_path": "/x"}), ("unload_lora_adapter", {})):
            status, answer = post(shared, path, lora_name="x", **body)
            assert (status, answer["error"]["code"]) == (403, "permission_denied")
    finally:
        state.owner_id = owner


def test_a_key_reaches_no_further_than_its_models_for_admins_either(
    shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = next(iter(shared.do(lambda: list(shared.gateway.services.keys._keys.values()))))
    monkeypatch.setattr(state, "allowed_models", frozenset({"another"}))
    for path, body in (
        ("load_lora_adapter", {"lora_name": "x", "lora_path": "/x"}),
        ("sleep_model", {"model": "tiny"}),
        ("unload_model", {"model": "tiny"}),
        ("load_model", {"model": "tiny"}),
    ):
        status, answer = post(shared, path, **body)
        assert (status, answer["error"]["code"]) == (404, "model_not_found"), path
    seen = shared.ask(shared.headed(f"authorization: Bearer {shared.key}", method="GET", path="/v1/model_states"))
    assert json.loads(seen.body)["data"] == []
    assert shared.do(lambda: shared.gateway.fleet.find("tiny").awake)


def test_adapters_of_the_start_are_options_that_repeat() -> None:
    options = make_parser().parse_args(["serve", "--lora", "a=/x", "--lora", "b=/y"])
    assert read_settings(options).engine.lora == ("a=/x", "b=/y")
    assert read_settings(make_parser().parse_args(["serve"])).engine.lora == ()
