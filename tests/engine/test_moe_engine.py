"""The whole engine over experts, sinks and latent caches: what is scheduled together or cached changes no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import kernels
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.models.registry import CausalLM, load_model
from engine.padded import PaddedSteps
from engine.sampling_params import SamplingParams
from engine.weights.sources import ModelSource
from engine.wire import Submit, pack_tokens, unpack_tokens

VOCAB = 61
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2},
    ),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {"head_dim": 16, "sliding_window": 20, "num_local_experts": 4, "num_experts_per_tok": 2,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    ),
    "deepseek": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 8,
         "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
         "first_k_dense_replace": 1},
    ),
}  # fmt: skip
BASE = EngineConfig(
    device="cpu", threads=1, kv_memory_mib=4, max_running=4, step_tokens=32, max_context=96, prefix_cache=False,
    graphs="off", overlap=False,
)  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    kind, config, more = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(11)
    tiny: Any = kind(config(**SHAPE, **more))
    with torch.no_grad():
        for name, value in tiny.named_parameters():
            value.normal_(1.0 if "norm" in name else 0.0, 0.3)
    tiny.save_pretrained(folder)
    return folder


def serve(checkpoint: Path, choice: str, free_bytes: int = 0, **settings: Any) -> tuple[list[list[int]], EngineCore]:
    """Greedy tokens of some prompts, two of which begin alike, twice."""
    config = msgspec.structs.replace(BASE, kernels=choice, **settings)
    ops = kernels.table("cpu", choice, 1)
    model: CausalLM = load_model(ModelSource(checkpoint, "safetensors", "tiny"), config, ops)
    core = EngineCore(config, model, ops, **({"free_bytes": free_bytes} if free_bytes else {}))
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCAB, (length,), generator=draw).tolist() for length in (3, 40, 21)]
    prompts.append(prompts[1][:33])
    said: list[list[int]] = []
    for _ in range(2):
        base = len(said)
        said += [[] for _ in prompts]
        for i, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
            assert core.submit(Submit(request_id=str(base + i), prompt=pack_tokens(prompt), params=params)) is None
        while core.has_work():
            for progress in core.step():
                assert progress.error is None
                said[int(progress.request_id)] += unpack_tokens(progress.tokens)
        core.check()
        assert core.snapshot().kv_pages_used == 0
    return said, core


def test_tokens_are_the_same_in_any_company(checkpoint: Path) -> None:
    alone, _ = serve(checkpoint, "cpu", max_running=1)
    assert len({tuple(tokens) for tokens in alone}) > 1 and alone[:4] == alone[4:]
    for settings in ({}, {"prefix_cache": True, "step_tokens": 16}):
        together, _ = serve(checkpoint, "cpu", **settings)
        assert together == alone


@pytest.mark.slow
def test_padding_and_buckets_change_no_token(checkpoint: Path) -> None:
    alone, _ = serve(checkpoint, "cpu", max_running=1)
    padded, core = serve(checkpoint, "reference", graphs="on", step_tokens=8, max_running=2)
    assert padded == alone
    assert isinstance(core.steps, PaddedSteps)
    kv = core.steps.kv
    shared = [keys is values for keys, values in zip(kv.keys, kv.values, strict=True)]
    assert set(shared) == {core.model.config.shared_kv} and kv.keys[0].shape[1] == core.model.config.num_kv_heads


def test_a_latent_cache_takes_one_small_head_a_token(tmp_path: Path) -> None:
    kind, config, more = FAMILIES["deepseek"]
    kind(config(**SHAPE, **more)).save_pretrained(tmp_path)
    page = 2 * (32 + 16) * 4 * 16  # layers, latent and turning key, float32, tokens of a page
    tight, core = serve(tmp_path, "cpu", free_bytes=4 * 8 * page, kv_memory_mib=0, max_context=0)
    assert core.snapshot().kv_pages_total == 8
    assert tight == serve(tmp_path, "cpu")[0]
