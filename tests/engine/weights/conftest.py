"""Small GGUF files written with the gguf package's own writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCAB = 256, 512, 2, 4, 2, 96
NAMES = {
    "attn_norm": (HIDDEN,),
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """A llama model's float32 tensors under GGUF names, q and k as they lie in a file."""
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in NAMES.items()}
    return {
        name: (random.standard_normal(shape) * 0.1 + (1.0 if "norm" in name else 0.0)).astype(np.float32)
        for name, shape in shapes.items()
    }


def encode_q4_k(values: np.ndarray) -> np.ndarray:
    """float32 [N, K] → Q4_K super-blocks, uint8 [N, K/256·144]; the gguf package only decodes this format."""
    blocks = values.reshape(values.shape[0], -1, 8, 32)
    low, high = np.minimum(blocks.min(-1), 0), blocks.max(-1)
    scale, least = np.maximum((high - low) / 15, 1e-8), -low
    d, dmin = scale.max(-1, keepdims=True) / 63, np.maximum(least.max(-1, keepdims=True), 1e-8) / 63
    d, dmin = d.astype(np.float16).astype(np.float32), dmin.astype(np.float16).astype(np.float32)
    sc, mn = np.clip(np.rint(scale / d), 1, 63), np.clip(np.rint(least / dmin), 0, 63)
    q = np.rint((blocks + (dmin * mn)[..., None]) / (d * sc)[..., None])
    q = np.clip(q, 0, 15).astype(np.uint8)
    sc, mn = sc.astype(np.uint8), mn.astype(np.uint8)
    out = np.zeros((*blocks.shape[:2], 144), dtype=np.uint8)
    out[..., 0:2] = d.astype(np.float16).view(np.uint8)
    out[..., 2:4] = dmin.astype(np.float16).view(np.uint8)
    out[..., 4:8] = sc[..., :4] | ((sc[..., 4:] >> 4) << 6)
    out[..., 8:12] = mn[..., :4] | ((mn[..., 4:] >> 4) << 6)
    out[..., 12:16] = (sc[..., 4:] & 15) | ((mn[..., 4:] & 15) << 4)
    pairs = q.reshape(*blocks.shape[:2], 4, 2, 32)
    out[..., 16:] = (pairs[..., 0, :] | (pairs[..., 1, :] << 4)).reshape(*blocks.shape[:2], 128)
    return out.reshape(values.shape[0], -1)


def encode_q6_k(values: np.ndarray) -> np.ndarray:
    """float32 [N, K] → Q6_K super-blocks, uint8 [N, K/256·210]."""
    blocks = values.reshape(values.shape[0], -1, 16, 16)
    scale = np.abs(blocks).max(-1) / 31
    d = (np.maximum(scale.max(-1, keepdims=True), 1e-8) / 127).astype(np.float16).astype(np.float32)
    sc = np.clip(np.rint(scale / d), 1, 127)
    q = (np.clip(np.rint(blocks / (d * sc)[..., None]), -32, 31) + 32).astype(np.uint8)
    q = q.reshape(*blocks.shape[:2], 2, 4, 32)
    out = np.zeros((*blocks.shape[:2], 210), dtype=np.uint8)
    low = np.stack(
        [(q[..., 0, :] & 15) | ((q[..., 2, :] & 15) << 4), (q[..., 1, :] & 15) | ((q[..., 3, :] & 15) << 4)], -2
    )
    out[..., :128] = low.reshape(*blocks.shape[:2], 128)
    high = (q[..., 0, :] >> 4) | (q[..., 1, :] >> 4) << 2 | (q[..., 2, :] >> 4) << 4 | (q[..., 3, :] >> 4) << 6
    out[..., 128:192] = high.reshape(*blocks.shape[:2], 64)
    out[..., 192:208] = sc.astype(np.int8).view(np.uint8)
    out[..., 208:210] = d.astype(np.float16).view(np.uint8)
    return out.reshape(values.shape[0], -1)


def encode(values: np.ndarray, format: str) -> np.ndarray:
    """float32 [N, K] in a storage format, as the writer takes it."""
    if format == "Q4_K":
        return encode_q4_k(values)
    if format == "Q6_K":
        return encode_q6_k(values)
    encoded: np.ndarray = gguf.quants.quantize(values, gguf.GGMLQuantizationType[format])
    return encoded


def write_gguf(
    path: Path,
    format: str = "F32",
    *,
    architecture: str = "llama",
    values: Mapping[str, np.ndarray] | None = None,
    fields: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
) -> dict[str, np.ndarray]:
    """Write a model whose matrices are in `format`; returns what a reader should get back, dequantised, under GGUF
    names.

    fields: metadata to add or replace. without: metadata and tensors to leave out.
    """
    writer = gguf.GGUFWriter(path, architecture)
    metadata: dict[str, Any] = {
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": INNER,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10_000.0,
        "tokenizer.ggml.eos_token_id": 2,
        **(fields or {}),
    }
    for key, value in metadata.items():
        if key in without:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    back: dict[str, np.ndarray] = {}
    for name, value in (values if values is not None else tensors()).items():
        if name in without:
            continue
        kind = gguf.GGMLQuantizationType[format if value.ndim == 2 else "F32"]
        if kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, value)
            back[name] = value
        else:
            raw = encode(value, format)
            writer.add_tensor(name, raw, raw_dtype=kind)
            back[name] = gguf.quants.dequantize(raw, kind).astype(np.float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return back


@pytest.fixture(scope="session")
def gguf_file() -> Callable[..., dict[str, np.ndarray]]:
    """write_gguf(path, format, …): see there."""
    return write_gguf


@pytest.fixture(scope="session")
def gguf_tensors() -> Callable[..., dict[str, np.ndarray]]:
    return tensors
