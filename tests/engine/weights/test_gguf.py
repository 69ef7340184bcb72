from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.weights.errors import WeightsError
from engine.weights.gguf import GGUFCheckpoint, dequantize_rows, gguf_name
from kernels.interface import BlockQuantized

Write = Callable[..., dict[str, np.ndarray]]
FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
PLAIN = ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight")


def dense(value: Tensor | BlockQuantized) -> np.ndarray:
    if isinstance(value, BlockQuantized):
        value = dequantize_rows(value.data, value.format.upper())
    return value.float().numpy()


def in_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving, written the way its converter writes the opposite."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_comes_back(format: str, packed: bool, tmp_path: Path, gguf_file: Write) -> None:
    file = tmp_path / "m.gguf"
    expected = gguf_file(file, format)
    checkpoint = GGUFCheckpoint(file, packed=packed)
    assert checkpoint.quantized == ("" if format in ("F32", "F16", "BF16") else format)
    # Repacked super-blocks round scales (Q4_K) or codes (Q6_K); everything else is exact
    tolerance = {"Q4_K": 2e-3, "Q6_K": 4e-3}.get(format, 0.0) if packed else 0.0
    for name in PLAIN:
        want = expected[gguf_name(name)]
        np.testing.assert_allclose(dense(checkpoint.get(name)), want, rtol=0, atol=tolerance * np.abs(want).max())
    for name, heads in (("q_proj", 4), ("k_proj", 2)):
        want = in_order(expected[gguf_name(f"model.layers.1.self_attn.{name}.weight")], heads)
        got = dense(checkpoint.get(f"model.layers.1.self_attn.{name}.weight"))
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize(
    ("format", "kept"), [("Q4_0", "q4_0"), ("Q4_1", "q4_1"), ("Q8_0", "q8_0"), ("Q4_K", "q4_1"), ("Q6_K", "q8_0")]
)
def test_packed_matrices_stay_in_blocks(format: str, kept: str, tmp_path: Path, gguf_file: Write) -> None:
    gguf_file(tmp_path / "m.gguf", format)
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf", packed=True)
    value = checkpoint.get("model.layers.0.self_attn.q_proj.weight")
    assert isinstance(value, BlockQuantized)
    assert (value.format, value.in_features, value.out_features) == (kept, 256, 256)
    assert value.data.dtype == torch.uint8 and value.data.is_contiguous()
    assert checkpoint.config.torch_dtype == "float16"
    norm = checkpoint.get("model.norm.weight")
    assert isinstance(norm, Tensor) and norm.dtype == torch.float32


def test_only_llama_files_are_permuted(tmp_path: Path, gguf_file: Write, gguf_tensors: Write) -> None:
    values = gguf_tensors()
    values |= {f"blk.{i}.attn_{n}.bias": np.ones(256 // (1 + (n != "q")), np.float32) for i in (0, 1) for n in "qkv"}
    file = tmp_path / "m.gguf"
    expected = gguf_file(file, "F16", architecture="qwen2", values=values)
    checkpoint = GGUFCheckpoint(file, packed=True)
    got = dense(checkpoint.get("model.layers.0.self_attn.q_proj.weight"))
    np.testing.assert_array_equal(got, expected["blk.0.attn_q.weight"])
    assert checkpoint.config.qkv_bias
    assert dense(checkpoint.get("model.layers.0.self_attn.k_proj.bias")).shape == (128,)


def test_config_comes_from_metadata(tmp_path: Path, gguf_file: Write) -> None:
    tokens = ["<unk>", "<s>", "</s>", "<|eot_id|>", "<|im_end|>", "x"]
    gguf_file(
        tmp_path / "m.gguf",
        fields={
            "tokenizer.ggml.tokens": tokens,
            # The fifth is an ordinary token that only looks like a marker
            "tokenizer.ggml.token_type": [2, 3, 3, 3, 1, 1],
            "tokenizer.ggml.bos_token_id": 1,
            "llama.attention.sliding_window": 64,
        },
    )
    config = GGUFCheckpoint(tmp_path / "m.gguf", packed=False).config
    assert (config.architecture, config.num_layers, config.head_dim, config.vocab_size) == (
        "LlamaForCausalLM",
        2,
        64,
        96,
    )
    assert config.tie_embeddings and not config.qkv_bias and not config.qk_norm
    assert config.eos_token_ids == (2, 3)
    assert config.bos_token_id == 1
    assert [config.window(layer) for layer in (0, 1)] == [64, 64]
    assert config.rope_scaling is None


def test_rope_factors_are_read_from_their_tensor(tmp_path: Path, gguf_file: Write, gguf_tensors: Write) -> None:
    factors = np.linspace(1, 8, 32).astype(np.float32)
    gguf_file(tmp_path / "m.gguf", values={**gguf_tensors(), "rope_freqs.weight": factors})
    scaling = GGUFCheckpoint(tmp_path / "m.gguf", packed=False).config.rope_scaling
    assert scaling is not None and scaling["rope_type"] == "factors"
    np.testing.assert_array_equal(np.float32(scaling["factors"]), factors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba' is not supported"),
        ({"without": ("llama.block_count",)}, "'llama.block_count' is missing"),
        ({"fields": {"llama.block_count": "two"}}, "'llama.block_count' should be of type int"),
        ({"fields": {"llama.block_count": 4_000_000_000}}, "num_layers is 4000000000"),
        ({"fields": {"llama.attention.head_count_kv": 3}}, "4 heads are not a multiple of 3"),
        ({"fields": {"llama.attention.head_count": 0}}, "num_heads is 0"),
        ({"fields": {"llama.expert_count": 8}}, "mixture-of-experts"),
        ({"fields": {"llama.rope.dimension_count": 32}}, "partial rotary"),
        ({"fields": {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}}, "rope type 'longrope'"),
        ({"fields": {"llama.rope.scaling.type": "linear"}}, "'llama.rope.scaling.factor' is missing"),
        ({"fields": {"llama.feed_forward_length": 500}}, "has shape [512, 256], should be [500, 256]"),
        ({"without": ("blk.1.ffn_up.weight",)}, "tensor 'model.layers.1.mlp.up_proj.weight' is missing"),
        ({"without": ("token_embd.weight",)}, "tensor 'token_embd.weight' is missing"),
        ({"format": "Q5_1"}, "tensor 'token_embd.weight': format Q5_1 is not supported"),
    ],
)
def test_what_cannot_run_is_refused_by_name(
    change: dict[str, object], message: str, tmp_path: Path, gguf_file: Write
) -> None:
    file = tmp_path / "m.gguf"
    gguf_file(file, **change)
    with pytest.raises(WeightsError) as caught:
        GGUFCheckpoint(file, packed=True)
    assert message in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path, gguf_file: Write) -> None:
    file = tmp_path / "m.gguf"
    gguf_file(file, "Q8_0")
    checkpoint = GGUFCheckpoint(file, packed=True)
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size // 2)
    with pytest.raises(WeightsError, match="was cut short"):
        checkpoint.get("model.layers.1.mlp.down_proj.weight")


def test_unknown_names_are_refused(tmp_path: Path, gguf_file: Write) -> None:
    gguf_file(tmp_path / "m.gguf")
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf", packed=True)
    with pytest.raises(WeightsError, match=r"tensor 'output.weight' is missing"):
        checkpoint.get("lm_head.weight")
