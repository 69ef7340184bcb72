"""Self-attention over the paged cache: one packed projection in, rotation and cache write fused, one projection out."""

from __future__ import annotations

from torch import Tensor

from engine.batch import ForwardBatch, KVTensors
from engine.layers.linear import MergedLinear
from engine.models.config import ModelConfig
from kernels.interface import Ops, PlannedAttention


class PagedAttention:
    """Grouped-query attention of one layer."""

    __slots__ = (
        "_cos_sin", "_eps", "_kv_heads", "_layer", "_paged_attention", "_planned", "_rope_and_cache",
        "k_norm", "output", "q_heads", "q_norm", "qkv", "scale", "sinks",
        "softcap", "window",
    )  # fmt: skip

    def __init__(
        self,
        ops: Ops,
        config: ModelConfig,
        layer: int,
        qkv: MergedLinear,
        output: MergedLinear,
        cos_sin: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """qkv: H → (Hq + 2·Hkv)·D; output: Hq·D → H. cos_sin float32 [positions, D]. q_norm, k_norm [D]: norms per
        head, or None. sinks float32 [Hq]: a score of each head's without a value."""
        self._layer = layer
        self.qkv = qkv
        self.output = output
        self._cos_sin = cos_sin
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.q_heads = config.num_heads
        self._kv_heads = config.num_kv_heads
        self._eps = config.rms_eps
        self.scale = config.attention_scale or config.head_dim**-0.5
        self.sinks = sinks
        self.softcap = config.attention_softcap
        self.window = config.window(layer)
        self._rope_and_cache = ops.rope_and_cache
        self._paged_attention = ops.paged_attention
        self._planned = ops if isinstance(ops, PlannedAttention) else None

    def __call__(self, x: Tensor, batch: ForwardBatch, kv: KVTensors, rows: Tensor | None = None) -> Tensor:
        """x [T, H] → [T, H]; keys and values of all T tokens enter the cache. rows int64 [R]: the output of these rows
        only."""
        keys, values = kv.keys[self._layer], kv.values[self._layer]
        q = self._rope_and_cache(
            self.qkv(x), self.q_heads, self._kv_heads, batch.positions, batch.slots, self._cos_sin, keys, values,
            self.q_norm, self.k_norm, self._eps,
        )  # fmt: skip
        mixed = self.attend(q, keys, values, batch)
        return self.output(mixed if rows is None else mixed[rows])

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, batch: ForwardBatch) -> Tensor:
        """q [T, Hq, D], rotated, over the cache of the layer → [T, Hq·D]."""
        ops, scale, window, long = self._planned, self.scale, self.window, batch.long
        if long is not None and long.takes(q, keys, window, self.softcap, self.sinks):
            return long.attend(q, keys, values, scale, self.softcap)
        if ops is None:
            return self._paged_attention(
                q, keys, values, batch.q_starts, batch.kv_lens, batch.page_table, scale, window, self.softcap,
                self.sinks,
            )  # fmt: skip
        if window not in batch.plans:
            batch.plans[window] = ops.attention_plan(
                q, keys, batch.q_starts, batch.kv_lens, window, decode=batch.decode
            )
        return ops.planned_attention(
            q, keys, values, batch.q_starts, batch.kv_lens, batch.page_table, scale, window, batch.plans[window],
            decode=batch.decode, softcap=self.softcap, sinks=self.sinks,
        )  # fmt: skip
