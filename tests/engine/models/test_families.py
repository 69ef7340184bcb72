"""Every family against transformers' own implementation, on small randomly initialised checkpoints in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from engine.models.registry import CausalLM

SMALL: dict[str, Any] = {
    "vocab_size": 157,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}


def longrope(pairs: int, original: int, **more: float) -> dict[str, Any]:
    """Rotary parameters with another divisor for each of `pairs` frequencies, another list of them over `original`."""
    short, long = [1.0 + 0.1 * i for i in range(pairs)], [1.5 + 0.7 * i for i in range(pairs)]
    return {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": short, "long_factor": long,
            "original_max_position_embeddings": original, **more}  # fmt: skip


CASES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL)),
    "llama-tied": (LlamaForCausalLM, LlamaConfig(**{**SMALL, "tie_word_embeddings": True})),
    "llama-biases": (LlamaForCausalLM, LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True)),
    "llama-one-kv-head": (LlamaForCausalLM, LlamaConfig(**{**SMALL, "num_key_value_heads": 1})),
    "llama-odd-sizes": (
        LlamaForCausalLM,
        LlamaConfig(**{**SMALL, "hidden_size": 44, "intermediate_size": 50, "num_attention_heads": 2}),
    ),
    "llama3-rope": (LlamaForCausalLM, LlamaConfig(**SMALL, rope_parameters=LLAMA3)),
    "llama-linear-rope": (LlamaForCausalLM, LlamaConfig(**SMALL, rope_parameters=LINEAR)),
    "llama-dynamic-rope": (LlamaForCausalLM, LlamaConfig(**SMALL, rope_parameters=DYNAMIC)),
    "llama-yarn": (LlamaForCausalLM, LlamaConfig(**SMALL, rope_parameters=YARN)),
    "mistral-window": (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=9)),
    "mistral": (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=None)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**{**SMALL, "tie_word_embeddings": True})),
    "qwen2-window": (
        Qwen2ForCausalLM,
        Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=24)),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config(
            **{**SMALL, "tie_word_embeddings": True},
            head_dim=24,
            sliding_window=9,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=5.0,
        ),
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **{**SMALL, "num_hidden_layers": 4},
            head_dim=24,
            sliding_window=9,
            query_pre_attn_scalar=20,
            layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            rope_parameters=GEMMA3_ROPE,
        ),
    ),
    "phi3": (Phi3ForCausalLM, Phi3Config(**SMALL, sliding_window=9)),
    "phi3-long": (Phi3ForCausalLM, Phi3Config(**SMALL, rope_parameters=longrope(8, 32))),
    "phi3-short": (
        Phi3ForCausalLM,
        Phi3Config(**{**SMALL, "max_position_embeddings": 128}, rope_parameters=longrope(8, 128)),
    ),
    "phi4-partial": (Phi3ForCausalLM, Phi3Config(**SMALL, rope_parameters=longrope(6, 32, partial_rotary_factor=0.75))),
    "granite": (
        GraniteForCausalLM,
        GraniteConfig(
            **{**SMALL, "tie_word_embeddings": True},
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.1,
            logits_scaling=8.0,
            rms_norm_eps=1e-2,
        ),
    ),
    "smollm3": (
        SmolLM3ForCausalLM,
        SmolLM3Config(**{**SMALL, "tie_word_embeddings": True}, no_rope_layer_interval=2, attention_bias=True),
    ),
    "ministral": (
        MinistralForCausalLM,
        MinistralConfig(
            **SMALL,
            head_dim=24,
            sliding_window=9,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "qwen3-biases": (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=16, attention_bias=True)),
}
WIDELY_RUN = ("llama", "mistral", "qwen2", "qwen3", "gemma2")
"""Families that are run on the reference every day, too; the others' switches differ from theirs at loading alone."""
RUNS = [
    pytest.param(name, choice, marks=() if choice == "cpu" or name.startswith(WIDELY_RUN) else pytest.mark.slow)
    for name in CASES
    for choice in ("reference", "cpu")
]
PROMPT = [1, *torch.randint(3, 157, (38,), generator=torch.Generator().manual_seed(4)).tolist()]


def make(name: str, folder: Path) -> Any:
    """A model whose every parameter matters, biases and norms included, saved to folder."""
    kind, config = CASES[name]
    torch.manual_seed(sum(name.encode()))
    model: Any = kind(config)
    model.eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            value.normal_(1.0 if "norm" in key and "gemma" not in name else 0.0, 0.2)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


def expected_logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits


def expected_tokens(model: Any) -> list[int]:
    prompt = torch.tensor([PROMPT])
    with torch.inference_mode():
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=64, do_sample=False, pad_token_id=0
        )
    tokens: list[int] = out[0, len(PROMPT) :].tolist()
    return tokens


@pytest.mark.parametrize(("name", "choice"), RUNS)
def test_family_is_transformers_own(
    name: str,
    choice: str,
    tmp_path: Path,
    load: Callable[..., CausalLM],
    paged_loop: Any,
    greedy_tokens: Callable[..., list[int]],
) -> None:
    theirs = make(name, tmp_path)
    ours = load(tmp_path, choice)
    logits = paged_loop(ours).step([PROMPT])
    torch.testing.assert_close(logits, expected_logits(theirs), atol=1e-4, rtol=1e-4)
    assert greedy_tokens(ours, PROMPT, 64) == expected_tokens(theirs)


def test_mixed_batch_gives_every_sequence_its_own_logits(
    tmp_path: Path, load: Callable[..., CausalLM], paged_loop: Any
) -> None:
    """Decode, a chunk of a prompt and a fresh prompt in one step, only the last row of each wanted."""
    theirs = make("mistral-window", tmp_path)
    loop = paged_loop(load(tmp_path), sequences=3)
    first, second, third = PROMPT[:30], PROMPT[5:25], PROMPT[10:15]
    loop.step([first[:-1], second[:8], []])
    logits = loop.step([first[-1:], second[8:], third], rows=[0, 12, 17])
    with torch.inference_mode():
        expected = torch.stack([theirs(torch.tensor([part])).logits[0, -1] for part in (first, second, third)])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_sharded_bfloat16_checkpoint_runs_in_float32(
    tmp_path: Path, load: Callable[..., CausalLM], paged_loop: Any
) -> None:
    model = make("qwen3", tmp_path / "whole").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    logits = paged_loop(load(tmp_path / "shards")).step([PROMPT])
    reloaded: Any = Qwen3ForCausalLM.from_pretrained(tmp_path / "shards", dtype=torch.float32)
    torch.testing.assert_close(logits, expected_logits(reloaded), atol=1e-4, rtol=1e-4)


def test_loaded_model_says_what_it_holds(tmp_path: Path, load: Callable[..., CausalLM]) -> None:
    theirs = make("llama-tied", tmp_path)
    ours = load(tmp_path, max_context=100)
    assert ours.weight_bytes == 4 * sum(value.numel() for value in theirs.parameters())
    assert not ours.packed
    assert ours.config.max_position == 100
    assert ours.config.eos_token_ids == (2,)


@pytest.mark.parametrize("choice", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dense_weights_in_half_the_bytes(
    dtype: str, choice: str, tmp_path: Path, load: Callable[..., CausalLM], paged_loop: Any
) -> None:
    theirs = make("qwen2", tmp_path)
    logits = paged_loop(load(tmp_path, choice, dtype=dtype)).step([PROMPT])
    assert logits.dtype == torch.float32
    with torch.no_grad():
        for key, value in theirs.named_parameters():
            if value.dim() == 2:
                value.copy_(value.to(getattr(torch, dtype)))
            assert value.dtype == torch.float32, key
    torch.testing.assert_close(logits, expected_logits(theirs), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("choice", ["reference", "cpu"])
def test_a_chunk_whose_logits_nobody_wants(
    choice: str, tmp_path: Path, load: Callable[..., CausalLM], paged_loop: Any
) -> None:
    theirs = make("llama", tmp_path)
    loop = paged_loop(load(tmp_path, choice))
    assert loop.step([PROMPT[:20]], rows=[]).shape == (0, 157)
    torch.testing.assert_close(loop.step([PROMPT[20:]]), expected_logits(theirs)[20:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_a_step_as_one_operation_gives_the_same_bits(
    name: str, tmp_path: Path, load: Callable[..., CausalLM], paged_loop: Any
) -> None:
    make(name, tmp_path)
    fused = paged_loop(load(tmp_path, "cpu"), sequences=2)
    single = paged_loop(load(tmp_path, "cpu", fused_steps=False), sequences=2)
    for pieces, rows in (
        ([PROMPT[:20], PROMPT[3:10]], None),
        ([PROMPT[20:21], PROMPT[10:30]], [0, 20]),
        ([PROMPT[21:22], PROMPT[30:31]], None),
        ([PROMPT[22:], []], []),
        ([PROMPT[:1], PROMPT[:1]], [1]),
    ):
        assert torch.equal(fused.step(pieces, rows), single.step(pieces, rows))
