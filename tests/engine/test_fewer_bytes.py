"""The whole engine in fewer bytes: codes as weights, 8-bit floats as cache, the same tokens on every implementation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import kernels
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.models.registry import load_model
from engine.sampling_params import SamplingParams
from engine.weights.sources import ModelSource
from engine.wire import Submit, pack_tokens, unpack_tokens
from tests.engine.tiny_models import VOCAB, tiny_checkpoint
from tests.engine.weights.quantized_checkpoints import make

BASE = EngineConfig(device="cpu", threads=1, kv_memory_mib=2, max_running=4, step_tokens=24, max_context=64)
GENERATOR = torch.Generator().manual_seed(3)
PROMPTS = [torch.randint(3, VOCAB, (length,), generator=GENERATOR).tolist() for length in (3, 19)]


def answers(
    folder: Path, choice: str, tokens: int, prompts: Sequence[Sequence[int]] = PROMPTS, **settings: Any
) -> tuple[list[list[int]], EngineCore]:
    """Greedy tokens of every prompt, all submitted at once, and the engine that made them."""
    config = msgspec.structs.replace(BASE, kernels=choice, **settings)
    ops = kernels.table("cpu", choice, 1, activation_bits=16)
    core = EngineCore(config, load_model(ModelSource(folder, "safetensors", "tiny"), config, ops), ops)
    made: list[list[int]] = [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        assert core.submit(Submit(request_id=str(i), prompt=pack_tokens(prompt), params=params)) is None
    while core.has_work():
        for progress in core.step():
            assert progress.error is None
            made[int(progress.request_id)] += unpack_tokens(progress.tokens)
    core.check()
    return made, core


@pytest.mark.parametrize("fused", [True, False])
def test_a_cache_of_8_bit_floats_takes_half_and_gives_the_reference_s_tokens(fused: bool, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "qwen3")
    wanted, core = answers(folder, "reference", 8, kv_dtype="fp8")
    assert core.plan.dtype == "float8_e4m3fn"
    mine, narrow = answers(folder, "cpu", 8, kv_dtype="fp8", fused_steps=fused)
    assert mine == wanted
    full, half = answers(folder, "cpu", 8, kv_dtype="float16")
    assert 2 * narrow.plan.token_bytes == half.plan.token_bytes
    assert narrow.kv_tokens == 2 * half.kv_tokens
    # Something is rounded, little enough that the answers begin alike
    assert [tokens[0] for tokens in full] == [tokens[0] for tokens in mine]


@pytest.mark.slow
def test_codes_and_an_8_bit_cache_on_the_gpu_s_kernels_give_the_reference_s_tokens(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    make("awq", tmp_path)
    wanted, _ = answers(tmp_path, "reference", 2, PROMPTS[:1], kv_dtype="fp8")
    mine, core = answers(tmp_path, "triton", 2, PROMPTS[:1], kv_dtype="fp8")
    assert mine == wanted
    assert core.plan.dtype == "float8_e4m3fn"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gptq-v2-order", "gptq-8-zeros", "compressed-fp8-blocks", "compressed-int8", "compressed-int4"]
)
def test_every_layout_on_the_gpu_s_kernels_gives_the_reference_s_tokens(name: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    make(name, tmp_path)
    assert answers(tmp_path, "triton", 3, PROMPTS[:1])[0] == answers(tmp_path, "reference", 3, PROMPTS[:1])[0]
