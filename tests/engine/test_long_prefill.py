"""Which steps go by FlashAttention, and what is measured for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import KVTensors
from engine.config import EngineConfig
from engine.long_prefill import Attention, Costs, LongPrefills, long_prefills, measure, seen
from kernels.long_prefill import TENSOR_CORE_TYPES, Library, definition, library
from kernels.reference import ReferenceOps


@given(st.integers(0, 30), st.integers(1, 40))
def test_a_query_sees_the_keys_up_to_its_own(queries: int, more: int) -> None:
    keys = queries + more
    assert seen(queries, keys) == sum(keys - queries + number + 1 for number in range(queries))


def test_it_pays_where_the_attention_is_much() -> None:
    costs = Costs(paged_s=3e-9, library_s=1e-9, gather_s=1e-6, launch_s=2e-3)
    assert costs.saved_s([2048], [8192], 32) > 0.5
    assert costs.saved_s([16], [8192], 32) < 0, "a short rest of a long prompt is not worth its gathering"
    assert costs.saved_s([512], [512], 2) < 0, "nor a short prompt its launch"
    assert costs.saved_s([2048], [8192], 32) > costs.saved_s([2048, *[1] * 64], [8192, *[8192] * 64], 32), (
        "many long decodes beside it are gathered in vain"
    )
    slower = Costs(paged_s=1e-9, library_s=3e-9, gather_s=0.0, launch_s=0.0)
    assert slower.saved_s([8192], [8192], 80) < 0


FAST = Costs(paged_s=3e-9, library_s=1e-9, gather_s=1e-6, launch_s=2e-3)
LIBRARY = Library("a library", definition, softcap=False)


def cache(kind: torch.dtype = torch.float32) -> KVTensors:
    return KVTensors.allocate(layers=1, num_pages=8, kv_heads=2, page_size=16, head_dim=8, dtype=kind, device="cpu")


@dataclass
class Layer:
    q_heads: int = 4
    window: int = 0
    softcap: float = 0.0
    scale: float = 0.3
    sinks: torch.Tensor | None = None


@dataclass
class Model:
    attentions: list[Layer] = field(default_factory=lambda: [Layer()] * 32)


def choose(
    monkeypatch: pytest.MonkeyPatch, model: object, costs: Costs = FAST, by: Library | None = LIBRARY, **settings: Any
) -> LongPrefills | None:
    """As on a GPU."""
    monkeypatch.setattr("engine.long_prefill.library", lambda device: by)

    def measured(by: Library, layer: Attention) -> Costs:
        assert layer.window == 0, "a layer that it can do"
        return costs

    return long_prefills(EngineConfig(**settings), model, cache(), "cuda", measured, activations=torch.float32)


def test_a_gpu_decides_by_what_it_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    long = choose(monkeypatch, Model())
    assert long is not None and long.costs == FAST and "long prompts by a library: 1000.0 ps" in long.summary
    assert choose(monkeypatch, Model(), Costs(1e-9, 1e-9, 0.0, 0.0)) is None, "not faster"
    assert choose(monkeypatch, Model(), by=None) is None, "not there"
    assert choose(monkeypatch, Model(), flash_prefill="off") is None
    assert choose(monkeypatch, Model(), deterministic=True) is None
    always = choose(monkeypatch, Model(), Costs(1.0, 9.0, 9.0, 9.0), flash_prefill="on")
    assert always is not None and always.costs is None


def test_layers_that_it_cannot_do_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [Layer(window=128), Layer(softcap=30.0), Layer(sinks=torch.zeros(4))]
    assert choose(monkeypatch, Model(others)) is None
    assert choose(monkeypatch, Model([*others, Layer()])) is not None
    assert choose(monkeypatch, object()) is None, "a model without such attention"
    with pytest.raises(ValueError, match="flash_prefill is on, but a library can do no layer"):
        choose(monkeypatch, Model(others), flash_prefill="on")


@pytest.mark.parametrize(
    ("activations", "kept", "refusal"),
    [
        (torch.bfloat16, torch.float8_e4m3fn, "bfloat16 queries with a fp8 KV cache (kv_dtype): the types must be the"),
        (torch.bfloat16, torch.float16, "bfloat16 queries with a float16 KV cache (kv_dtype): the types must be the"),
        (torch.float32, torch.float32, "float32 queries with a float32 KV cache (kv_dtype)"),
        (torch.bfloat16, torch.bfloat16, ""),
        (torch.float16, torch.float16, ""),
    ],
)
def test_a_cache_that_no_library_takes_stays_with_the_paged_kernels(
    monkeypatch: pytest.MonkeyPatch, activations: torch.dtype, kept: torch.dtype, refusal: str
) -> None:
    """Nothing can be measured with it either."""
    by = Library("a library", definition, softcap=False, types=TENSOR_CORE_TYPES)
    monkeypatch.setattr("engine.long_prefill.library", lambda device: by)

    def choose(wish: Literal["auto", "on"]) -> LongPrefills | None:
        def measured(by: Library, layer: Attention) -> Costs:
            assert not refusal, "asked for what it does not take"
            return FAST

        config = EngineConfig(flash_prefill=wish)
        return long_prefills(config, Model(), cache(kept), "cuda", measured, activations=activations)

    assert (choose("auto") is None) == bool(refusal)
    if refusal:
        with pytest.raises(ValueError, match=re.escape(f"flash_prefill is on, but a library takes no {refusal}")):
            choose("on")
    else:
        assert choose("on") is not None


def flight(work: list[tuple[int, int]], *, same: bool = False, guesses: int = 0) -> Any:
    """A step of so many queries at the end of so many keys each."""
    lens = np.array([keys for _, keys in work] + [9] * guesses, dtype=np.int32)
    packed = SimpleNamespace(same=same, tokens=sum(q for q, _ in work) + guesses, seqs=len(work), lens=lens)
    return SimpleNamespace(packed=packed, work=[SimpleNamespace(tokens=q) for q, _ in work])


def test_steps_with_long_prompts_go_that_way_and_no_others() -> None:
    long = LongPrefills(LIBRARY, cache(), 32, FAST)
    assert long.lengths(flight([(2048, 8192), (1, 40)])) == ([2048, 1], [8192, 40])
    assert long.lengths(flight([(16, 200)])) is None, "too short to pay"
    assert long.lengths(flight([(1, 8192)] * 4)) is None, "decodes"
    assert long.lengths(flight([(2048, 8192)], same=True)) is None
    assert long.lengths(flight([(2048, 8192)], guesses=2)) is None, "guesses are sequences of their own"
    row = 2 * 8 * 4 * 2
    assert long.lengths(flight([(2048, (128 << 20) // row + 1)])) is None, "more than may be gathered"


def test_costs_are_for_each_pair_and_key() -> None:
    kv, by = cache(), library("cpu")
    assert by is not None
    took = iter([10.0, 4.0, 30.0])

    def seconds(work: Callable[[], object]) -> float:
        work()
        return next(took)

    costs = measure(
        ReferenceOps(), by, kv, num_heads=4, scale=0.3, step_tokens=32, max_context=1000, dtype=torch.float32,
        seconds=seconds, launch_s=0.5,
    )  # fmt: skip
    pairs = seen(32, 128)
    assert costs.paged_s == pytest.approx(30.0 / pairs) and costs.library_s == pytest.approx(6.0 / pairs)
    assert costs.gather_s == pytest.approx(4.0 / 128) and costs.launch_s == 0.5
