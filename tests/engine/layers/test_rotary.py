from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.layers.rotary import rotary_frequencies, rotary_table
from engine.models.config import ModelConfig

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 16, "truncate": False},
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "attention_factor": 1.3},
]


def config(scaling: dict[str, Any] | None, theta: float = 500_000.0, head_dim: int = 64) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=10,
        hidden_size=4 * head_dim,
        intermediate_size=8,
        num_layers=1,
        num_heads=4,
        num_kv_heads=4,
        head_dim=head_dim,
        rms_eps=1e-5,
        rope_theta=theta,
        rope_scaling=scaling,
        max_position=16_384,
        tie_embeddings=True,
        qkv_bias=False,
    )


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: f"{scaling['rope_type']}-{len(scaling)}")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_are_transformers_own(scaling: dict[str, Any], head_dim: int) -> None:
    theirs = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=16_384,
        rope_parameters={"rope_theta": 500_000.0, **scaling},
    )
    expected, magnitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs)
    frequencies, factor = rotary_frequencies(config(scaling, head_dim=head_dim))
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(magnitude)


def test_table_is_transformers_own() -> None:
    theirs: Any = LlamaRotaryEmbedding(LlamaConfig(hidden_size=256, num_attention_heads=4))
    positions = torch.arange(2048)
    cos, sin = theirs(torch.zeros(1), positions[None])
    table = rotary_table(config(None, theta=10_000.0), 2048)
    assert table.shape == (2048, 64) and table.dtype == torch.float32
    torch.testing.assert_close(table[:, :32], cos[0, :, :32], rtol=0, atol=1e-6)
    torch.testing.assert_close(table[:, 32:], sin[0, :, :32], rtol=0, atol=1e-6)


def test_factors_divide_the_frequencies() -> None:
    plain, _ = rotary_frequencies(config(None))
    factors = torch.linspace(1, 8, 32)
    scaled, _ = rotary_frequencies(config({"rope_type": "factors", "factors": factors.tolist()}))
    torch.testing.assert_close(scaled, plain / factors)


def test_dynamic_scaling_changes_nothing_within_the_trained_length() -> None:
    plain, _ = rotary_frequencies(config(None))
    dynamic, factor = rotary_frequencies(config({"rope_type": "dynamic", "factor": 2.0}))
    assert torch.equal(plain, dynamic) and factor == 1.0


def test_yarn_magnifies_attention() -> None:
    table = rotary_table(config({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}), 3)
    assert float(table[0, 0]) == pytest.approx(0.1 * 1.3862943611 + 1.0)
