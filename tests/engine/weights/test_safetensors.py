from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.weights.errors import WeightsError
from engine.weights.safetensors import SafetensorsCheckpoint

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def write(
    folder: Path, shards: int = 1, change: dict[str, Any] | None = None, drop: str = ""
) -> dict[str, torch.Tensor]:
    """A complete checkpoint, with the config changed and a tensor left out as asked."""
    folder.mkdir(exist_ok=True)
    config = {key: value for key, value in {**CONFIG, **(change or {})}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "model.embed_tokens.weight": (20, 8),
        "model.layers.0.input_layernorm.weight": (8,),
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.layers.0.self_attn.k_proj.weight": (4, 8),
        "model.layers.0.self_attn.v_proj.weight": (4, 8),
        "model.layers.0.self_attn.o_proj.weight": (8, 8),
        "model.layers.0.post_attention_layernorm.weight": (8,),
        "model.layers.0.mlp.gate_proj.weight": (12, 8),
        "model.layers.0.mlp.up_proj.weight": (12, 8),
        "model.layers.0.mlp.down_proj.weight": (8, 12),
        "model.norm.weight": (8,),
    }
    tensors = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items() if name != drop}
    names = list(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return tensors
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_come_back_as_stored(shards: int, tmp_path: Path) -> None:
    tensors = write(tmp_path, shards)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    for name, value in tensors.items():
        assert torch.equal(checkpoint.get(name), value)
    assert checkpoint.config.torch_dtype == "bfloat16"
    assert checkpoint.config.head_dim == 4


def test_stop_tokens_are_the_union_of_what_the_files_say(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    added = [
        {"id": 9, "content": "<|eot_id|>", "special": True},
        {"id": 10, "content": "<|im_end|>", "special": False},
        {"id": 11, "content": "<stop>", "special": True},
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}}')
    assert SafetensorsCheckpoint(tmp_path).config.eos_token_ids == (2, 7, 9, 11)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_both_spellings_of_rope_scaling(name: str, tmp_path: Path) -> None:
    scaling = {"type": "linear", "factor": 4.0, "rope_theta": 5000.0}
    write(tmp_path, change={name: scaling})
    config = SafetensorsCheckpoint(tmp_path).config
    assert config.rope_theta == 5000.0
    assert config.rope_scaling is not None
    assert (config.rope_scaling["rope_type"], config.rope_scaling["original_max_position_embeddings"]) == ("linear", 64)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "config.json: architecture 'GPT2LMHeadModel' is not supported"),
        ({"architectures": None}, "config.json: architecture None is not supported"),
        ({"hidden_size": None}, "config.json: field 'hidden_size' is missing"),
        ({"hidden_size": "8"}, "config.json: field 'hidden_size' should be a number, not '8'"),
        ({"vocab_size": 20.5}, "config.json: field 'vocab_size' should be a whole number"),
        ({"tie_word_embeddings": "yes"}, "field 'tie_word_embeddings' should be true or false"),
        ({"tie_word_embeddings": False}, "tensor 'lm_head.weight' is missing"),
        ({"vocab_size": 21}, "tensor 'model.embed_tokens.weight' has shape [20, 8], should be [21, 8]"),
        ({"num_hidden_layers": 2}, "tensor 'model.layers.1.input_layernorm.weight' is missing"),
        ({"num_attention_heads": 0}, "num_heads is 0, should be positive"),
        ({"head_dim": 3}, "head_dim 3 is odd"),
        ({"hidden_act": "relu"}, "activation 'relu' is not supported"),
        ({"quantization_config": {"quant_method": "exl2"}}, "'quantization_config.quant_method' is 'exl2'"),
        ({"rope_scaling": {"rope_type": "su"}}, "rope type 'su' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "needs a list of positive numbers 'short_factor'"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 2.0, 3.0]}},
            "rope needs 2 positive frequency factors 'short_factor', not 3",
        ),
        ({"partial_rotary_factor": 1.5}, "the rotation turns 6 of 4 elements"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs a positive 'factor', not None"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": "1"}}, "needs a positive 'low_freq_factor', not '1'"),
        ({"rope_scaling": "linear"}, "should be an object"),
    ],
)
def test_what_cannot_run_is_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, change=change)
    with pytest.raises(WeightsError) as caught:
        SafetensorsCheckpoint(tmp_path)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_every_truncation_is_a_clear_error(tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / "model.safetensors"
    raw = file.read_bytes()
    for length in (0, 3, 8, 100, len(raw) // 2, len(raw) - 1):
        file.write_bytes(raw[:length])
        with pytest.raises(WeightsError, match=r"model\.safetensors: not a readable safetensors file"):
            SafetensorsCheckpoint(tmp_path)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"config\.json: no such file"):
        SafetensorsCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WeightsError, match=r"config\.json: not valid JSON"):
        SafetensorsCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor"):
        SafetensorsCheckpoint(tmp_path)
    write(tmp_path, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match="model-00002-of-00002"):
        SafetensorsCheckpoint(tmp_path)


def test_an_index_may_not_leave_its_folder(tmp_path: Path) -> None:
    write(tmp_path, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"model.norm.weight": "../other.safetensors"}}')
    with pytest.raises(WeightsError, match="is not a plain file name"):
        SafetensorsCheckpoint(tmp_path)
    index.write_text('{"weight_map": [1]}')
    with pytest.raises(WeightsError, match="'weight_map' should map"):
        SafetensorsCheckpoint(tmp_path)


def test_a_missing_tensor_and_an_unsupported_type(tmp_path: Path) -> None:
    write(tmp_path, drop="model.norm.weight")
    with pytest.raises(WeightsError, match=r"tensor 'model\.norm\.weight' is missing"):
        SafetensorsCheckpoint(tmp_path)
    tensors = write(tmp_path)
    tensors["model.norm.weight"] = torch.ones(8, dtype=torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"tensor 'model\.norm\.weight': type I8 is not supported"):
        SafetensorsCheckpoint(tmp_path)
