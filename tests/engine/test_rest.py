"""An engine sleeps and wakes: its memory is given back, its answers are the same, nothing that it knew is lost."""

from __future__ import annotations

import asyncio
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.generation import EngineError
from engine.models.registry import load_model
from engine.rest import ParkedWeights, RestingCore, tensors_of
from engine.sampling_params import SamplingParams
from engine.weights.sources import ModelSource
from engine.wire import AdapterQuery, AdapterReply, Submit, pack_tokens, unpack_tokens
from kernels.fallback import TorchOps
from tests.engine.processes import engine
from tests.engine.tiny_models import tiny_checkpoint

PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama")


def load(checkpoint: Path, **config: Any) -> RestingCore:
    chosen = {"kernels": "reference", "kv_memory_mib": 1, "threads": 1, **config}
    return RestingCore(EngineCore.load(EngineConfig(model=str(checkpoint), device="cpu", **chosen)))


def answer(core: RestingCore, request_id: str) -> list[int]:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    assert core.submit(Submit(request_id=request_id, prompt=pack_tokens(PROMPT), params=params)) is None
    tokens: list[int] = []
    while core.has_work():
        for said in core.step():
            assert said.error is None
            tokens += unpack_tokens(said.tokens)
    return tokens


def test_it_gives_back_its_cache_and_says_the_same_when_it_is_awake(checkpoint: Path) -> None:
    core = load(checkpoint)
    before = answer(core, "a")
    tokens, epoch, told = core.kv_tokens, core.epoch, core.snapshot(1)
    page = weakref.ref(core.awake.steps._kv.keys[0])  # type: ignore[attr-defined]
    model = core.awake.model
    core.rest(True)
    assert core.asleep and page() is None, "nothing holds the cache any more"
    assert not core.has_work() and core.step() == [] and core.in_flight() == []
    asleep = core.snapshot(2)
    assert (asleep.query_id, asleep.kv_pages_total) == (2, 0)
    assert (asleep.prompt_tokens, asleep.completion_tokens) == (told.prompt_tokens, told.completion_tokens)
    assert core.usage(["a", "b"]).keys() == {"a"}
    core.rest(True)
    core.rest(False)
    assert core.awake.model is model and core.epoch == core.awake.epoch == epoch
    assert core.awake.kv_tokens >= tokens and core.max_context == core.awake.max_context
    assert answer(core, "b") == before and len(before) == 12
    assert core.usage(["a", "b"]).keys() == {"a", "b"}
    assert core.snapshot(3).completion_tokens == 24
    core.awake.check()


def test_a_request_wakes_it(checkpoint: Path) -> None:
    core = load(checkpoint)
    before = answer(core, "a")
    core.rest(True)
    assert answer(core, "b") == before and not core.asleep


def test_its_draft_model_sleeps_and_wakes_with_it(checkpoint: Path) -> None:
    config = EngineConfig(device="cpu", kv_memory_mib=1, threads=1, speculate="draft", draft_model="itself")
    ops = TorchOps()
    model = load_model(ModelSource(checkpoint, "safetensors", "tiny"), config, ops)
    core = RestingCore(EngineCore(config, model, ops, draft=model))
    before = answer(core, "a")
    core.rest(True)
    assert answer(core, "b") == before and core.awake.draft is model


def test_who_cannot_wake_it_is_told_and_it_lives(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = load(checkpoint)
    before = answer(core, "a")
    core.rest(True)
    submit = Submit(request_id="b", prompt=pack_tokens(PROMPT), params=SamplingParams(max_tokens=3))

    def full(*_: Any, **__: Any) -> EngineCore:
        raise torch.OutOfMemoryError("no room on the device")

    with monkeypatch.context() as taken:
        taken.setattr("engine.rest.EngineCore", full)
        refused = core.submit(submit)
        assert refused is not None and refused.code == "overloaded" and "no room" in refused.message
        told: list[AdapterReply] = []
        core.adapter(AdapterQuery(1, "one"), told.append)
        assert "no room" in told[0].error and core.asleep
    assert answer(core, "b") == before


def test_it_does_not_sleep_over_requests(checkpoint: Path) -> None:
    core = load(checkpoint)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    assert core.submit(Submit(request_id="a", prompt=pack_tokens(PROMPT), params=params)) is None
    with pytest.raises(ValueError, match="requests"):
        core.rest(True)
    core.abort("a")
    while core.has_work():
        core.step()
    core.rest(True)
    assert core.asleep


def test_weights_are_parked_and_brought_back_bit_by_bit() -> None:
    """As on a GPU, whose memory is freed; here it is the allocator's own."""
    whole = torch.randn(6, 4)

    class Layer:
        __slots__ = ("bias", "weight")

        def __init__(self) -> None:
            self.weight = whole[2:]
            self.bias = torch.arange(5, dtype=torch.int16)

    model = {"layers": [Layer(), (whole, "name", 3)], "none": None}
    model["itself"] = model  # type: ignore[assignment]
    tensors = tensors_of(model)
    assert {id(tensor) for tensor in tensors} == {id(whole), id(model["layers"][0].weight), id(model["layers"][0].bias)}  # type: ignore[index]
    kept = [tensor.clone() for tensor in tensors]
    parked = ParkedWeights(tensors)
    assert parked.bytes == 6 * 4 * 4 + 5 * 2, "what shares memory is parked once"
    assert all(tensor.untyped_storage().size() == 0 for tensor in tensors)
    parked.bring_back()
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, kept, strict=True))


def test_weights_that_cannot_all_be_parked_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.randn(6, 4), torch.randn(3, 3)
    kept = [first.clone(), second.clone()]
    empty = torch.empty

    def full(*size: Any, **kinds: Any) -> torch.Tensor:
        if size == (second.nbytes,):
            raise RuntimeError("no host memory is left")
        return empty(*size, **kinds)

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(RuntimeError, match="no host memory"):
        ParkedWeights([first, second])
    assert torch.equal(first, kept[0]) and torch.equal(second, kept[1])


def test_it_is_asked_over_the_wire(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), engine("worker", tmp_path, tokens=1000) as running:
            assert (await running.client.rest(asleep=True)).asleep
            assert not (await running.client.rest(asleep=False)).asleep
            generation = running.generate("a", max_tokens=1000)
            await generation.next()
            with pytest.raises(EngineError, match="1 requests run or wait"):
                await running.client.rest(asleep=True)
            generation.abort()
            await generation.final()
            assert (await running.client.rest(asleep=True)).asleep

    assert asyncio.run(main()) is None
