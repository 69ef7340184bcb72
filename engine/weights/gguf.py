"""GGUF checkpoints: configuration from metadata, tensors under Hugging Face names, quantised blocks left packed where
wanted.

llama.cpp's converter interleaves the two halves of every q and k head for the `llama` architecture (its rotary kernel
pairs neighbours); rows are put back in order here, which works on packed rows as well, because a row's blocks stay
together.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.family import tensor_shapes
from engine.weights.checkpoint import check_shapes
from engine.weights.errors import WeightsError
from engine.weights.gguf_header import GGUFHeader, TensorInfo
from engine.weights.repack import repack_k_quant
from engine.weights.stop_tokens import gguf_stop_tokens
from kernels.interface import BlockFormat, BlockQuantized, WeightPart

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_PERMUTED = ("llama", "mistral")
_PACKED: dict[str, BlockFormat] = {"Q4_0": "q4_0", "Q4_1": "q4_1", "Q8_0": "q8_0"}
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DENSE_TYPE = {"F32": "float32", "BF16": "bfloat16"}
"""Type of a file's weights when they run dense; quantised blocks have float16 scales."""

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Hugging Face tensor name → name in a GGUF file: model.layers.3.mlp.up_proj.weight → blk.3.ffn_up.weight."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER[part]}.{suffix}"


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    """Build a ModelConfig from metadata. Raises WeightsError naming the file and the field."""
    kind = header.require("general.architecture", str)
    if kind not in _ARCHITECTURES:
        raise WeightsError(
            f"{header.path}: architecture {kind!r} is not supported (supported: {', '.join(_ARCHITECTURES)})"
        )
    heads, hidden = header.require(f"{kind}.attention.head_count", int), header.require(f"{kind}.embedding_length", int)
    head_dim = header.get(f"{kind}.attention.key_length", int) or hidden // max(heads, 1)
    rotary = header.get(f"{kind}.rope.dimension_count", int)
    if rotary is not None and rotary != head_dim:
        raise WeightsError(
            f"{header.path}: partial rotary embedding ({rotary} of {head_dim} dimensions) is not supported"
        )
    if header.get(f"{kind}.expert_count", int):
        raise WeightsError(f"{header.path}: mixture-of-experts models are not supported")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise WeightsError(f"{header.path}: tensor 'token_embd.weight' is missing")
    layers = header.require(f"{kind}.block_count", int)
    window = header.get(f"{kind}.attention.sliding_window", int) or None
    return ModelConfig(
        architecture=_ARCHITECTURES[kind],
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=header.require(f"{kind}.feed_forward_length", int),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=header.get(f"{kind}.attention.head_count_kv", int) or heads,
        head_dim=head_dim,
        rms_eps=header.require(f"{kind}.attention.layer_norm_rms_epsilon", float),
        rope_theta=header.get(f"{kind}.rope.freq_base", float) or 10_000.0,
        rope_scaling=_rope_scaling(header, kind),
        max_position=header.require(f"{kind}.context_length", int),
        tie_embeddings="output.weight" not in header.tensors,
        qkv_bias="blk.0.attn_q.bias" in header.tensors,
        output_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_up.bias" in header.tensors,
        qk_norm=kind == "qwen3",
        sliding_window=window,
        windowed_layers=tuple(range(layers)) if window else (),
        eos_token_ids=gguf_stop_tokens(header),
        bos_token_id=header.get("tokenizer.ggml.bos_token_id", int),
        torch_dtype=_DENSE_TYPE.get(embedding.format, "float16"),
    ).check(header.path)


def _rope_scaling(header: GGUFHeader, kind: str) -> dict[str, object] | None:
    factors = header.tensors.get("rope_freqs.weight")
    if factors is not None:
        # Llama 3's scaling, computed by the converter: one divisor per frequency
        values = np.frombuffer(_read(header.path, factors), dtype=np.float32 if factors.format == "F32" else np.float16)
        return {"rope_type": "factors", "factors": [float(value) for value in values]}
    scaling = header.get(f"{kind}.rope.scaling.type", str)
    if scaling in (None, "none"):
        return None
    return {
        "rope_type": scaling,
        "factor": header.require(f"{kind}.rope.scaling.factor", float),
        "original_max_position_embeddings": header.get(f"{kind}.rope.scaling.original_context_length", int)
        or header.require(f"{kind}.context_length", int),
    }


def _read(path: Path, info: TensorInfo) -> bytearray:
    """Copy one tensor's bytes out of the file. Raises WeightsError when the file has shrunk since its header was
    checked."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            raw = bytearray(data[info.offset : info.offset + info.nbytes])
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: tensor {info.name!r}: cannot be read: {error}") from error
    if len(raw) != info.nbytes:
        raise WeightsError(f"{path}: tensor {info.name!r}: the file was cut short while it was read")
    return raw


class GGUFCheckpoint:
    """A GGUF file whose header has been checked against the model that it describes."""

    def __init__(self, path: Path, *, packed: bool) -> None:
        """packed: quantised matrices come as BlockQuantized where kernels can run them, else as float32. Raises
        WeightsError."""
        self.path = path
        self._header = GGUFHeader.read(path)
        self._packed = packed
        self.config = config_from_gguf(self._header)
        self._permuted = self._header.fields["general.architecture"] in _PERMUTED
        needed = tensor_shapes(self.config, path)
        names = {gguf_name(name): name for name in needed}
        found = {names[name]: info.shape for name, info in self._header.tensors.items() if name in names}
        check_shapes(path, needed, found)
        formats = {info.format for name, info in self._header.tensors.items() if name in names}
        self.quantized = ", ".join(sorted(formats - set(_FLOATS)))

    def get(self, name: str) -> WeightPart:
        """Return a tensor under its Hugging Face name. Raises WeightsError naming file and tensor."""
        info = self._header.tensors.get(gguf_name(name))
        if info is None:
            raise WeightsError(f"{self.path}: tensor {gguf_name(name)!r} is missing")
        order = self._row_order(name, info.shape[0])
        raw = torch.frombuffer(_read(self.path, info), dtype=torch.uint8)
        if info.format in _FLOATS:
            values = raw.view(_FLOATS[info.format]).reshape(info.shape)
            return values if order is None else values[order]
        if len(info.shape) != 2:
            raise WeightsError(
                f"{self.path}: tensor {info.name!r}: {info.format} is for matrices, not {list(info.shape)}"
            )
        rows = raw.reshape(info.shape[0], -1)
        if order is not None:
            rows = rows[order]
        if self._packed and info.format in _PACKED:
            return BlockQuantized(rows, _PACKED[info.format], info.shape[1])
        if self._packed:
            return repack_k_quant(rows, info.format, info.shape[1])
        return dequantize_rows(rows, info.format)

    def _row_order(self, name: str, rows: int) -> Tensor | None:
        """Index that restores the order of q and k rows, or None where rows are in order.

        Each head's rows lie as (0, D/2, 1, D/2 + 1, …); row r of the result is row order[r] of the file.
        """
        stem = name.rpartition(".")[0]
        if not self._permuted or not stem.endswith(("q_proj", "k_proj")):
            return None
        heads = rows // self.config.head_dim
        return torch.arange(rows).reshape(heads, self.config.head_dim // 2, 2).transpose(1, 2).reshape(-1)


def dequantize_rows(rows: Tensor, format: str) -> Tensor:
    """Rows of blocks, uint8 [N, bytes], → float32 [N, K], by the gguf package's own formulas."""
    kind = gguf.GGMLQuantizationType[format]
    return torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(rows.numpy(), kind), dtype=np.float32))
