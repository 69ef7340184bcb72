"""What every kernel implementation offers: the operations that the engine's models are made of.

Layouts: T tokens of a step, H hidden size, Hq query heads, Hkv key/value heads, D head size, S sequences, P pages per
table row. Activations are float32 on CPUs. One object implements the whole protocol for one device; `kernels.table()`
picks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.step_layout import StepInputs, StepLayout

BlockFormat = Literal["q4_0", "q4_1", "q8_0"]
CodeFormat = Literal["int8", "int4", "fp8", "mxfp4"]
Activation = Literal["silu", "gelu_tanh", "gelu", "clamped_silu"]
"""Of a gate. clamped_silu (gpt-oss): g·sigmoid(1.702·g) · (u + 1), where g = min(gate, 7) and u = up within ±7."""


@dataclass(frozen=True, slots=True)
class BlockQuantized:
    """Rows of a weight matrix in GGUF's block formats, as they lie in the file: blocks of 32 along the input dimension.

    q4_0: fp16 d, 16 bytes of nibbles, value = d·(q − 8). q4_1: fp16 d, fp16 m, 16 bytes, value = d·q + m.
    q8_0: fp16 d, 32 int8, value = d·q. In the 4-bit formats byte j holds element j (low) and element j + 16 (high).
    """

    data: Tensor
    """uint8 [N, bytes per row]"""
    format: BlockFormat
    in_features: int
    """K, a multiple of 32"""

    @property
    def out_features(self) -> int:
        """N."""
        return int(self.data.shape[0])

    def to(self, device: str) -> BlockQuantized:
        """The same on a device."""
        return replace(self, data=self.data.to(device))


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """Rows of a weight matrix as codes under scales: value = (code − zero) · scale. What every checkpoint that is not
    GGUF is brought to.

    int8: codes int8 [N, K]. int4: codes 0 to 15, uint8 [N, K/2], byte j holds element 2j (low) and 2j + 1 (high). fp8:
    codes float8_e4m3fn [N, K]. mxfp4: codes of e2m1, packed as int4's, scales the bytes of powers of two, groups of 32
    (see `kernels.mxfp4`).
    """

    codes: Tensor
    scales: Tensor
    """[N, groups] of a float type, for mxfp4 uint8"""
    format: CodeFormat
    in_features: int
    """K"""
    group: int
    """Elements along K under one scale; the last group of a row may be shorter. K: a scale for each row"""
    zeros: Tensor | None = None
    """int8 [N, groups], with int8 and int4 only; without it a zero is 0 for int8 and 8 for int4"""
    order: Tensor | None = None
    """int64 [K]: column j of the codes meets input order[j]; None where they are in order"""
    dtype: torch.dtype = torch.float32
    """Type that rows of it come in as embeddings, on GPUs"""

    @property
    def out_features(self) -> int:
        """N."""
        return int(self.codes.shape[0])

    def to(self, device: str, dtype: torch.dtype | None = None) -> ScaledWeight:
        """The same on a device; dtype: for embeddings of that type."""
        held = [None if tensor is None else tensor.to(device) for tensor in (self.zeros, self.order)]
        codes, scales = self.codes.to(device), self.scales.to(device)
        return replace(self, codes=codes, scales=scales, zeros=held[0], order=held[1], dtype=dtype or self.dtype)


WeightPart = Tensor | BlockQuantized | ScaledWeight
"""[N, K] float tensor (float32, bfloat16 or float16), N rows of quantised blocks, or N rows of codes with scales."""


class LinearWeight(Protocol):
    """An opaque weight matrix in the layout its implementation likes best."""

    @property
    def in_features(self) -> int:
        """K."""
        ...

    @property
    def out_features(self) -> int:
        """N."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that one sweep of the weight reads."""
        ...


class Ops(Protocol):
    """The operations of one implementation.

    Results never alias inputs unless said; a row's result never depends on the other rows of the
    call (batch invariance) in the `cpu` implementation and in `reference`.
    """

    name: str

    def pack(self, parts: Sequence[WeightPart], bias: Tensor | None = None) -> LinearWeight:
        """Lay one or more row-blocks (same K; formats may differ) out as a single weight: outputs are concatenated in
        order.
        """
        ...

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """x [T, K] · weightᵀ (+ bias) → [T, N]."""
        ...

    def embed(self, token_ids: Tensor, weight: LinearWeight) -> Tensor:
        """Rows of the (possibly packed) embedding: int32 [T] → [T, H]. The same handle serves as tied LM head in
        `linear`. On GPUs and in `reference` an id of −1 is padding: zeros.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        """x / rms(x) · weight over the last dimension. With residual: residual += x in place first, and that is
        normalised.
        """
        ...

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
        """Rotate q and k (half-split "NeoX" pairing: i with i + D/2) and write k, v into their pages.

        qkv [T, (Hq + 2·Hkv)·D] is the packed projection. positions, slots int32 [T]. cos_sin float32 [max_positions,
        D]: the first D/2 columns are cosines, the rest sines. Caches [pages, Hkv, page_size, D]. q_norm/k_norm [D]:
        RMSNorm per head before the rotation. Where value_cache is key_cache there are no values beside the keys: qkv is
        [T, (Hq + Hkv)·D]. Returns the rotated q, [T, Hq, D]. On GPUs and in `reference` a slot below
        0 is padding: nothing is written for it.
        """
        ...

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
        """Causal attention of packed queries over paged keys: decode, chunked prefill and mixed batches in one call.

        q [T, Hq, D]; q_starts int32 [S + 1]; kv_lens int32 [S]; page_table int32 [S, P]. Query j of sequence s stands
        at position kv_lens[s] − (q_starts[s+1] − q_starts[s]) + j and sees keys at positions ≤ its own (and > own −
        window when window > 0). softcap > 0: a score x counts as softcap · tanh(x / softcap). sinks float32 [Hq]: one
        more score of each head, that takes its part of the softmax and has no value. Returns [T, Hq·D]. On GPUs and in
        `reference` rows past q_starts[S] are padding, their results 0.
        """
        ...

    def gated(self, gate_up: Tensor, activation: Activation = "silu") -> Tensor:
        """[T, 2·I] → activation(first half) · second half, [T, I]."""
        ...


@runtime_checkable
class PlannedAttention(Protocol):
    """Operations whose attention is planned once for all layers of a step that have the same window."""

    def attention_plan(
        self, q: Tensor, key_cache: Tensor, q_starts: Tensor, kv_lens: Tensor, window: int, *, decode: bool
    ) -> object:
        """What `planned_attention` of every such layer needs, from one layer's q and cache. Only shapes and types of
        these two are looked at. decode: one query a sequence is expected."""
        ...

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
        """`Ops.paged_attention` with the plan of its step and window."""
        ...


@runtime_checkable
class HeadOps(Protocol):
    """Operations that multiply with a matrix for each head in one call."""

    def head_products(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, Hq, K], weight [Hq, N, K] → [T, Hq, N]."""
        ...


class StepInputsOp(Protocol):
    """Unpacks a step on the device (`kernels.triton.step_inputs`, `kernels.reference.step_inputs`)."""

    def __call__(
        self,
        buffer: Tensor,
        layout: StepLayout,
        token_table: Tensor,
        page_table: Tensor,
        page_size: int,
        into: StepInputs,
    ) -> None:
        """Apply what the buffer int32 [layout.size] carries to the tables, then fill `into`."""
        ...


def rows_of(weight: WeightPart) -> int:
    """Number of output rows of a part."""
    return int(weight.shape[0]) if isinstance(weight, Tensor) else weight.out_features


FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
