"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): what is cached of a token is one small vector that keys
and values of all heads are made of, beside one rotated key for all.

The matrices that would make keys and values out of it are multiplied to the queries and to the results instead
("absorbed"), so that attention is that of many query heads over a single key head whose keys are its values too. A
cached head and a query are laid out as two halves, each of rotated elements and then latent ones, because the rotation
pairs element i with i + D/2: [rope₁ | latent₁ | rope₂ | latent₂].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import ForwardBatch, KVTensors
from engine.layers.attention import PagedAttention
from engine.layers.linear import MergedLinear
from engine.layers.norm import RMSNorm
from engine.models.config import ModelConfig
from kernels.interface import HeadOps, Ops


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Sizes of a layer's parts."""

    heads: int
    rank: int
    """Elements of the latent, even"""
    rope: int
    """Elements that turn, even"""
    nope: int
    """Elements of a head's key that do not"""
    value: int
    """Elements of a head's value"""


class HeadLinear:
    """A matrix for each head: x [T, Hq, K] → [T, Hq, N]."""

    __slots__ = ("_batched", "_ops", "_separate", "nbytes")

    def __init__(self, ops: Ops, matrices: Tensor) -> None:
        """matrices [Hq, N, K]."""
        self._ops = ops
        self._batched = matrices.contiguous() if isinstance(ops, HeadOps) else None
        self._separate = [] if self._batched is not None else [ops.pack([matrix]) for matrix in matrices]
        self.nbytes = matrices.nbytes if self._batched is not None else sum(w.nbytes for w in self._separate)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, Hq, K] → [T, Hq, N]."""
        if self._batched is not None:
            assert isinstance(self._ops, HeadOps)
            return self._ops.head_products(x, self._batched)
        rows = [self._ops.linear(x[:, head].contiguous(), weight) for head, weight in enumerate(self._separate)]
        return torch.stack(rows, dim=1)


class LatentAttention:
    """Latent attention of one layer."""

    __slots__ = (
        "_cos_sin", "_heads", "_into_latent", "_kv_norm", "_layer", "_out_of_latent", "_q_norm", "_q_up",
        "_rope_and_cache", "_sizes", "down", "output",
    )  # fmt: skip

    def __init__(
        self,
        ops: Ops,
        config: ModelConfig,
        layer: int,
        sizes: LatentSizes,
        *,
        down: MergedLinear,
        q_up: MergedLinear | None,
        q_norm: RMSNorm | None,
        kv_norm: RMSNorm,
        into_latent: HeadLinear,
        out_of_latent: HeadLinear,
        output: MergedLinear,
        cos_sin: Tensor,
    ) -> None:
        """down: H → queries' latent (or the queries themselves where q_up is None), keys' latent, the key that turns.
        q_up: latent → Hq·(nope + rope), elements that turn in two halves. into_latent: nope → rank; out_of_latent:
        rank → value."""
        self._layer = layer
        self._sizes = sizes
        self.down = down
        self.output = output
        self._q_up = q_up
        self._q_norm = q_norm
        self._kv_norm = kv_norm
        self._into_latent = into_latent
        self._out_of_latent = out_of_latent
        self._cos_sin = cos_sin
        self._heads = PagedAttention(ops, config, layer, down, output, cos_sin)
        self._rope_and_cache = ops.rope_and_cache

    def __call__(self, x: Tensor, batch: ForwardBatch, kv: KVTensors, rows: Tensor | None = None) -> Tensor:
        """x [T, H] → [T, H]; latents of all T tokens enter the cache. rows int64 [R]: the output of these rows only."""
        s, tokens, cache = self._sizes, x.shape[0], kv.keys[self._layer]
        down = self.down(x)
        q, latent, turning = torch.split(down, [down.shape[1] - s.rank - s.rope, s.rank, s.rope], dim=-1)
        if self._q_up is not None:
            assert self._q_norm is not None
            q = self._q_up(self._q_norm(q.contiguous()))
        latent = self._kv_norm(latent.contiguous())
        heads = q.reshape(tokens, s.heads, s.nope + s.rope)
        q_nope, q_turning = torch.split(heads, [s.nope, s.rope], dim=-1)
        queries = _interleaved(q_turning, self._into_latent(q_nope))
        width = s.heads * (s.rank + s.rope)
        packed = torch.cat([queries.reshape(tokens, width), _interleaved(turning, latent)], dim=-1)
        turned = self._rope_and_cache(packed, s.heads, 1, batch.positions, batch.slots, self._cos_sin, cache, cache)
        mixed = self._heads.attend(turned, cache, cache, batch).view(tokens, s.heads, s.rank + s.rope)
        if rows is not None:
            mixed = mixed[rows]
        half = s.rope // 2
        parts: Sequence[Tensor] = torch.split(mixed, [half, s.rank // 2, half, s.rank // 2], dim=-1)
        values = self._out_of_latent(torch.cat([parts[1], parts[3]], dim=-1))
        return self.output(values.reshape(mixed.shape[0], s.heads * s.value))


def _interleaved(turning: Tensor, latent: Tensor) -> Tensor:
    """[rope₁ | latent₁ | rope₂ | latent₂] of [..., rope] and [..., rank]."""
    (first, second), (low, high) = turning.chunk(2, dim=-1), latent.chunk(2, dim=-1)
    return torch.cat([first, low, second, high], dim=-1)
