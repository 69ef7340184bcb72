"""What a family owns: the fields it reads, in every spelling that files have, and the names of its tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import engine.models
from engine.models.config import ModelConfig
from engine.models.family import MODULES, config_from_json, find_family
from engine.models.registry import CausalLM
from engine.weights.errors import WeightsError
from tests.engine.tiny_models import tiny_checkpoint

SPARSE_GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}  # fmt: skip
PHI4_MINI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
    "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 200064, "rms_norm_eps": 1e-05,
    "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
    "tie_word_embeddings": True, "sliding_window": 262144, "torch_dtype": "bfloat16", "rope_theta": 10000.0,
    "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
}  # fmt: skip


def read(data: dict[str, Any]) -> ModelConfig:
    return config_from_json(Path("config.json"), data, (1,))


def test_what_a_sparse_configuration_leaves_out_is_the_family_s_own() -> None:
    config = read(SPARSE_GEMMA3)
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (2560, 34, 8, 4)
    assert (config.head_dim, config.vocab_size, config.max_position) == (256, 262_208, 131_072)
    assert (config.rope_theta, config.local_rope_theta) == (1_000_000.0, 10_000.0)
    assert config.rope_scaling is not None and config.rope_scaling["factor"] == 8.0
    assert [layer for layer in range(34) if not config.window(layer)] == [5, 11, 17, 23, 29]
    assert config.window(0) == 1024 and config.tie_embeddings and config.activation == "gelu_tanh"
    assert config.attention_scale == 256**-0.5 and config.embedding_scale == 2560**0.5


def test_an_older_spelling_of_longrope_and_a_part_of_a_head_that_turns() -> None:
    config = read(PHI4_MINI)
    assert (config.head_dim, config.turning, config.torch_dtype) == (128, 96, "bfloat16")
    assert config.rope_scaling is not None
    assert (config.rope_scaling["rope_type"], config.rope_scaling["factor"]) == ("longrope", 32.0)
    assert read(PHI4_MINI | {"rope_scaling": PHI4_MINI["rope_scaling"] | {"type": "su"}}).rope_scaling is not None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (SPARSE_GEMMA3 | {"use_bidirectional_attention": True}, "only causal attention is supported"),
        (SPARSE_GEMMA3 | {"text_config": 5}, "field 'text_config' should be an object"),
        (PHI4_MINI | {"partial_rotary_factor": 0.5}, "needs 32 positive frequency factors 'short_factor', not 48"),
        (PHI4_MINI | {"architectures": ["GraniteForCausalLM"], "residual_multiplier": 0}, "should be positive"),
        (PHI4_MINI | {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "a list of 32 flags"),
        ({"architectures": ["BertModel"]}, "architecture 'BertModel' is not supported"),
    ],
)
def test_what_cannot_run_is_refused_by_field(data: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        read(data)


@pytest.mark.parametrize("stem", ["", "language_model.model.", "model.language_model."])
def test_the_text_part_of_a_larger_model_is_found_by_its_names(
    stem: str, tmp_path: Path, load: Callable[..., CausalLM], paged_loop: Any
) -> None:
    plain = tiny_checkpoint(tmp_path / "plain", "gemma3")
    other = tmp_path / "other"
    other.mkdir()
    tensors = load_file(plain / "model.safetensors")
    save_file({name.replace("model.", stem, 1): value for name, value in tensors.items()}, other / "model.safetensors")
    (other / "config.json").write_text(json.dumps(json.loads((plain / "config.json").read_text())))
    ours, theirs = (paged_loop(load(folder)).step([[3, 4, 5]]) for folder in (other, plain))
    assert torch.equal(ours, theirs)


def test_every_family_is_there_and_a_dense_one_costs_under_a_hundred_lines() -> None:
    (folder,) = engine.models.__path__
    for architecture in MODULES:
        assert find_family(architecture, Path("config.json")).shapes
    for module in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "granite", "smollm3"):
        lines = (Path(folder) / f"{module}.py").read_text().splitlines()
        assert len(lines) < 100, module
