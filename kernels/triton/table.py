"""The Triton implementation: this folder's kernels behind the `Ops` protocol, on a GPU or interpreted on a CPU.

Weights are dense matrices of one float type each, or codes with scales; GGUF's blocks are dequantised when they are
packed. Matrix products of more than 16 rows with dense ones are the vendor library's, by torch. Rows of padding are
harmless everywhere: token ids outside the vocabulary embed as zeros, slots below 0 are not written, queries past the
last sequence give zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.blocks import check_part, dequantize
from kernels.dense import DenseWeight
from kernels.interface import Activation, BlockQuantized, LinearWeight, ScaledWeight, WeightPart
from kernels.moe import ExpertParts, ExpertWeights
from kernels.reference import check_parts
from kernels.triton.activation import gated
from kernels.triton.attention import paged_attention
from kernels.triton.attention_shape import AttentionShape
from kernels.triton.attention_split import SplitPlan, plan_splits
from kernels.triton.embedding import embed
from kernels.triton.gemm import MAX_ROWS, skinny_gemm
from kernels.triton.moe import pack_experts, run_experts
from kernels.triton.moe_route import route
from kernels.triton.norm import rms_norm
from kernels.triton.rope_cache import rope_and_cache
from kernels.triton.scaled_linear import PieceWeight, embed_pieces, multiply, pack_pieces


class TritonOps:
    """Triton kernels on bfloat16, float16 or float32 activations."""

    name = "triton"

    def __init__(
        self,
        *,
        skinny_rows: int = MAX_ROWS,
        dense: torch.dtype | None = None,
        split: bool = True,
        deterministic: bool = False,
        activation_bits: int = 8,
    ) -> None:
        """skinny_rows: products of up to this many rows go to the skinny GEMM; 0 leaves all to the vendor library.
        dense: type that block-quantised weights are dequantised to; None is bfloat16 on a GPU, float32 on a CPU. split:
        cut long sequences along their keys. deterministic: a row's bits depend on that row alone. activation_bits: 8 or
        16, of what meets fp8 weights where the device multiplies 8-bit floats. Raises ValueError for skinny_rows
        outside 0 to 16."""
        if not 0 <= skinny_rows <= MAX_ROWS:
            raise ValueError(f"skinny_rows must be 0 to {MAX_ROWS}, not {skinny_rows}")
        self._skinny_rows = skinny_rows
        self._dense = dense
        self._split = split
        self._deterministic = deterministic
        self._activation_bits = activation_bits
        self._ones: dict[tuple[int, torch.device], Tensor] = {}

    def pack(self, parts: Sequence[WeightPart], bias: Tensor | None = None) -> LinearWeight:
        """Stack row-blocks into one matrix of their common type; codes with scales stay codes. Raises ValueError for
        parts that do not fit."""
        check_parts(parts, bias)
        if any(isinstance(part, ScaledWeight) for part in parts):
            return pack_pieces(parts, bias, self._matrix)
        matrices = [self._matrix(part) for part in parts]
        kind = matrices[0].dtype
        for matrix in matrices[1:]:
            kind = torch.promote_types(kind, matrix.dtype)
        joined = torch.cat([matrix.to(kind) for matrix in matrices]) if len(matrices) > 1 else matrices[0].contiguous()
        return DenseWeight(joined, None if bias is None else bias.to(kind).contiguous())

    def _matrix(self, part: WeightPart) -> Tensor:
        check_part(part)
        if isinstance(part, Tensor):
            return part
        on_cpu = (part.data if isinstance(part, BlockQuantized) else part.codes).device.type == "cpu"
        return dequantize(part).to(self._dense or (torch.float32 if on_cpu else torch.bfloat16))

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """x [T, K] · weightᵀ + bias → [T, N]."""
        if x.dim() != 2 or x.shape[1] != weight.in_features:
            raise ValueError(f"linear needs x of [T, {weight.in_features}], not {list(x.shape)}")
        if isinstance(weight, PieceWeight):
            outputs = [
                self._dense_product(x, piece)
                if isinstance(piece, DenseWeight)
                else multiply(x, piece, activation_bits=self._activation_bits, deterministic=self._deterministic)
                for piece in weight.pieces
            ]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return self._dense_product(x, _matrix_weight(weight))

    def _dense_product(self, x: Tensor, held: DenseWeight) -> Tensor:
        if self._deterministic:
            return _linear_in_blocks(x, held)
        if x.shape[0] <= self._skinny_rows:
            return skinny_gemm(x, held.matrix, held.bias)
        return functional.linear(x, held.matrix, held.bias)

    def embed(self, token_ids: Tensor, weight: LinearWeight) -> Tensor:
        """Rows of the matrix, zeros for ids outside it: padding needs no valid id."""
        if isinstance(weight, PieceWeight):
            return embed_pieces(token_ids, weight, embed)
        return embed(token_ids, _matrix_weight(weight).matrix)

    rms_norm = staticmethod(rms_norm)

    def rope_and_cache(
        self,
        qkv: Tensor,
        num_q_heads: int,
        num_kv_heads: int,
        positions: Tensor,
        slots: Tensor,
        cos_sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        """Rotate q and k, write k and v, return q [T, Hq, D]."""
        ones = self._cache_scales(key_cache)
        return rope_and_cache(
            qkv, num_q_heads, num_kv_heads, positions, slots, cos_sin, key_cache, value_cache, q_norm, k_norm, eps,
            k_scale=ones, v_scale=ones,
        )  # fmt: skip

    def _cache_scales(self, cache: Tensor) -> Tensor | None:
        """Scales of a cache's heads: 1 in 8 bits, whose range, 2⁻⁹ to 448, holds keys and values as they are."""
        if cache.dtype != torch.float8_e4m3fn:
            return None
        key = cache.shape[1], cache.device
        if key not in self._ones:
            self._ones[key] = torch.ones(cache.shape[1], device=cache.device)
        return self._ones[key]

    def paged_attention(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        q_starts: Tensor,
        kv_lens: Tensor,
        page_table: Tensor,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention over pages → [T, Hq·D]."""
        ones = self._cache_scales(key_cache)
        return paged_attention(
            q, key_cache, value_cache, q_starts, kv_lens, page_table, scale, window, softcap=softcap, sinks=sinks,
            split=self._split, deterministic=self._deterministic, k_scale=ones, v_scale=ones,
        )  # fmt: skip

    def attention_plan(
        self, q: Tensor, key_cache: Tensor, q_starts: Tensor, kv_lens: Tensor, window: int, *, decode: bool
    ) -> object:
        """Where sequences are cut along their keys; None where they are not."""
        if self._deterministic or not self._split:
            return None
        shape = AttentionShape.of(q, key_cache)
        return plan_splits(q_starts, kv_lens, q.shape[0], shape, window=window, decode=decode)

    def planned_attention(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        q_starts: Tensor,
        kv_lens: Tensor,
        page_table: Tensor,
        scale: float,
        window: int,
        plan: object,
        *,
        decode: bool,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention over pages → [T, Hq·D]."""
        assert plan is None or isinstance(plan, SplitPlan)
        ones = self._cache_scales(key_cache)
        return paged_attention(
            q, key_cache, value_cache, q_starts, kv_lens, page_table, scale, window, softcap=softcap, sinks=sinks,
            plan=plan, split=False, decode=decode, deterministic=self._deterministic, k_scale=ones, v_scale=ones,
        )  # fmt: skip

    def head_products(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, Hq, K] · weight [Hq, N, K] of each head → [T, Hq, N]: the vendor library's, by torch."""
        rows = x.transpose(0, 1)
        if not self._deterministic:
            return torch.bmm(rows, weight.transpose(1, 2)).transpose(0, 1)
        out = torch.empty(x.shape[0], x.shape[1], weight.shape[1], dtype=x.dtype, device=x.device)
        for first in range(0, x.shape[0], BLOCK_ROWS):
            block = rows[:, first : first + BLOCK_ROWS]
            filled = functional.pad(block, (0, 0, 0, BLOCK_ROWS - block.shape[1]))
            product = torch.bmm(filled, weight.transpose(1, 2)).transpose(0, 1)
            out[first : first + BLOCK_ROWS] = product[: block.shape[1]]
        return out

    def gated(self, gate_up: Tensor, activation: Activation = "silu") -> Tensor:
        """activation(first half) · second half."""
        return gated(gate_up, activation)

    def pack_experts(self, parts: Iterable[ExpertParts], experts: int) -> ExpertWeights:
        """Experts stacked in one matrix each way, of the first one's type. Raises ValueError."""
        return pack_experts(parts, experts, self._matrix)

    route = staticmethod(route)

    def run_experts(
        self, x: Tensor, weights: ExpertWeights, ids: Tensor, scales: Tensor, activation: Activation = "silu"
    ) -> Tensor:
        """The chosen experts' weighted sum [T, H]."""
        return run_experts(x, weights, ids, scales, activation, deterministic=self._deterministic)


BLOCK_ROWS = 128
"""Rows of every matrix product in deterministic mode: at 128, one sweep over a weight in bfloat16 still takes a GPU as
long as reading it, and a long prompt sweeps over it no more often than it must by far."""


def _linear_in_blocks(x: Tensor, weight: DenseWeight) -> Tensor:
    """x · weightᵀ + bias in products of always BLOCK_ROWS rows, the last one filled up: the vendor library chooses its
    algorithm by shape, so every row meets the same one, whatever else is in the call."""
    out = torch.empty(x.shape[0], weight.out_features, dtype=x.dtype, device=x.device)
    for first in range(0, x.shape[0], BLOCK_ROWS):
        rows = x[first : first + BLOCK_ROWS]
        count = rows.shape[0]
        if count < BLOCK_ROWS:
            rows = functional.pad(rows, (0, 0, 0, BLOCK_ROWS - count))
        out[first : first + count] = functional.linear(rows, weight.matrix, weight.bias)[:count]
    return out


def _matrix_weight(weight: LinearWeight) -> DenseWeight:
    if not isinstance(weight, DenseWeight):
        raise TypeError(f"this weight was packed by another implementation: {type(weight).__name__}")
    return weight
