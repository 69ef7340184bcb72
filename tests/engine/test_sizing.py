"""Sizes of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.sizing import MIB, free_host_bytes, plan_kv


@dataclass(frozen=True)
class Shape:
    vocab_size: int = 100
    num_layers: int = 2
    num_kv_heads: int = 4
    shared_kv: bool = False
    head_dim: int = 64
    max_position: int = 2048
    eos_token_ids: tuple[int, ...] = ()
    torch_dtype: str = "bfloat16"


def plan(packed: bool = True, device: str = "cpu", free: int = 100 * MIB, **settings: Any) -> Any:
    return plan_kv(EngineConfig(**settings), Shape(), packed=packed, device=device, free_bytes=free)


def test_a_token_costs_keys_and_values_in_every_layer() -> None:
    assert plan(kv_memory_mib=1).token_bytes == 2 * 2 * 4 * 64 * 2
    assert plan(kv_memory_mib=1, kv_dtype="float32").token_bytes == 2 * 2 * 4 * 64 * 4
    assert plan(kv_memory_mib=1).bytes == MIB


@pytest.mark.parametrize(
    ("packed", "device", "settings", "dtype"),
    [
        (True, "cpu", {}, "float16"),
        (False, "cpu", {}, "float32"),
        (False, "cuda", {}, "bfloat16"),
        (False, "cuda", {"dtype": "float16"}, "float16"),
        (True, "cpu", {"kv_dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_automatic_types(packed: bool, device: str, settings: dict[str, Any], dtype: str) -> None:
    assert plan(packed, device, **settings).dtype == dtype


def test_automatic_sizes() -> None:
    assert plan(free=100 * MIB).bytes == 25 * MIB
    assert plan(free=100_000 * MIB).bytes == 2048 * MIB
    assert plan(device="cuda", packed=False, free=100 * MIB).bytes == 90 * MIB


def test_the_context_is_the_models_cut_to_the_cache() -> None:
    assert plan(kv_memory_mib=8).max_context == 2048
    small = plan(kv_memory_mib=1)
    assert (small.tokens, small.max_context) == (512, 512)
    assert plan(kv_memory_mib=1, max_context=300).max_context == 300


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"page_size": 8}, "page_size must be 16, 32 or 64, not 8"),
        ({"max_running": 0}, "max_running"),
        ({"step_tokens": 0}, "step_tokens"),
        ({"max_queued": -1}, "max_queued"),
        ({"max_context": 4096}, "max_context 4096 is over the model's own 2048 tokens"),
        ({"max_context": 1000, "kv_memory_mib": 1}, "over the 512 tokens .* it needs kv_memory_mib 2"),
        ({"free": 1000}, "holds no page: one page of 16 tokens takes 0.03 MiB"),
    ],
)
def test_settings_that_cannot_be_met_say_which_could(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**settings)


def test_a_gpu_has_to_have_the_memory_that_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"101 MiB .* more than the 100 MiB"):
        plan(device="cuda", kv_memory_mib=101)
    assert plan(device="cuda", kv_memory_mib=100).bytes == plan(kv_memory_mib=100).bytes == 100 * MIB


def test_the_size_that_an_error_names_is_enough() -> None:
    assert plan(max_context=1000, kv_memory_mib=2).max_context == 1000


def test_this_machine_has_free_memory() -> None:
    assert 0 < free_host_bytes() < 1 << 50
