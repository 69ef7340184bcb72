"""A whole decoder as one operation: what an implementation may offer beside the single operations.

Between two operations of a decode step the interpreter costs about as much as a small operation itself. An
implementation that has `decoder` runs a step of a pre-norm decoder (Llama and its relatives) in one call, with the
arithmetic of the single operations, in the same order: the results are the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from kernels.interface import Activation, LinearWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: norm → qkv → rope → attention → output, added; norm → gate_up → gated → down, added."""

    attention_norm: Tensor
    """float32 [H]"""
    qkv: LinearWeight
    """H → (Hq + 2·Hkv)·D"""
    q_norm: Tensor | None = None
    """float32 [D] or None"""
    k_norm: Tensor | None = None
    output: LinearWeight
    """Hq·D → H"""
    mlp_norm: Tensor
    gate_up: LinearWeight
    """H → 2·I"""
    down: LinearWeight
    """I → H"""
    window: int = 0
    """Sliding window, 0 for full attention"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A decoder's weights, all packed by the implementation that will run it."""

    embedding: LinearWeight
    layers: Sequence[LayerSpec]
    norm: Tensor
    """float32 [H]"""
    head: LinearWeight
    """H → vocabulary; the embedding's own handle when tied"""
    cos_sin: Tensor
    """float32 [positions, D]"""
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float
    activation: Activation = "silu"


class DecoderProgram(Protocol):
    """A decoder ready to run."""

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        q_starts: Tensor,
        kv_lens: Tensor,
        page_table: Tensor,
        logit_rows: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> Tensor:
        """One step. token_ids, positions, slots int32 [T]; q_starts int32 [S + 1]; kv_lens int32 [S]; page_table int32
        [S, P]; logit_rows int64 [R], ascending and distinct; keys, values: a cache per layer. Returns float32
        [R, vocabulary]. Raises IndexError or ValueError for bad input before any cache is written."""
        ...


@runtime_checkable
class DecoderOps(Protocol):
    """An implementation that can run whole decoders."""

    def decoder(self, spec: DecoderSpec) -> DecoderProgram:
        """Prepare a decoder. Raises TypeError or ValueError for weights that do not fit together."""
        ...
