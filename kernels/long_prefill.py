"""Attention of long prompts by a library: a step's keys and values are gathered out of their pages into one piece, and
FlashAttention (Dao 2023, arXiv 2307.08691) goes over sequences of any length.

The paged kernels read each page where it lies, which is what decodes want. A long prompt reads every key for each of
many queries, so that gathering costs little beside the attention, and the library's kernels are the fastest for it.
Two libraries are known: `flash-attn`, and torch's own (`torch.nn.attention.varlen`), which has no soft-cap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

TENSOR_CORE_TYPES = (torch.float16, torch.bfloat16)
"""What FlashAttention takes."""
GATHER_BYTES = 128 << 20
"""Most that a layer's gathered keys and values may take: as much is left beside the KV cache, and no more."""


class Varlen(Protocol):
    """Causal attention over sequences of any length, packed without gaps."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, softcap: float) -> Tensor:
        """q [T, Hq, D]; k, v [N, Hkv, D]; returns [T, Hq, D]. The last query of a sequence sees its last key."""
        ...


@dataclass(frozen=True, slots=True)
class Spans:
    """Where sequences begin and end."""

    q_starts: Tensor
    """int32 [S + 1]: prefix sums of queries"""
    k_starts: Tensor
    """int32 [S + 1]: prefix sums of keys"""
    longest_q: int
    longest_k: int


@dataclass(frozen=True, slots=True)
class Library:
    """An implementation of `Varlen`, and what it can do."""

    name: str
    attend: Varlen
    softcap: bool
    """It can bound scores"""
    types: tuple[torch.dtype, ...] = ()
    """Types of numbers that it takes; empty: any"""


def library(device: str) -> Library | None:
    """The best one that is installed for a device ("cuda"), or None. On a CPU it is the plain definition: for tests."""
    if not device.startswith("cuda"):
        return Library("the definition", definition, softcap=True)
    try:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return _of_torch()

    def attend(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, softcap: float) -> Tensor:
        mixed: Tensor = flash_attn_varlen_func(
            q, k, v, spans.q_starts, spans.k_starts, spans.longest_q, spans.longest_k, softmax_scale=scale,
            causal=True, softcap=softcap,
        )  # fmt: skip
        return mixed

    return Library("flash-attn", attend, softcap=True, types=TENSOR_CORE_TYPES)


def _of_torch() -> Library | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    call: Any = varlen_attn

    def attend(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, softcap: float) -> Tensor:
        mixed: Tensor = call(
            q, k, v, spans.q_starts, spans.k_starts, spans.longest_q, spans.longest_k, scale=scale,
            window_size=(-1, 0), enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        return mixed

    return Library("torch's varlen attention", attend, softcap=False, types=TENSOR_CORE_TYPES)


def definition(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, softcap: float) -> Tensor:
    """What the libraries compute, in plain torch: see `Varlen`."""
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    q_ends, k_ends = spans.q_starts.tolist(), spans.k_starts.tolist()
    for (q0, q1), (k0, k1) in zip(pairwise(q_ends), pairwise(k_ends), strict=True):
        keys = k[k0:k1].float().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1].float(), keys) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        own = torch.arange(k1 - k0 - (q1 - q0), k1 - k0, device=q.device)
        hidden = torch.arange(k1 - k0, device=q.device) > own[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        values = v[k0:k1].float().repeat_interleave(group, 1)
        out[q0:q1] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
    return out


class LongPrefill:
    """A step's attention by a library: planned once for all its layers."""

    def __init__(
        self, by: Library, queries: Sequence[int], keys: Sequence[int], page_table: Tensor, page_size: int
    ) -> None:
        """queries, keys: of every sequence, on the host; queries are its last ones. page_table int32 [≥ S, P]."""
        place, seqs = page_table.device, len(keys)
        self._by = by
        self._tokens = sum(queries)
        self._spans = Spans(
            _starts(queries).to(place, non_blocking=True),
            _starts(keys).to(place, non_blocking=True),
            max(queries),
            max(keys),
        )
        total, starts = sum(keys), self._spans.k_starts
        counts = starts[1:] - starts[:-1]
        of = torch.repeat_interleave(torch.arange(seqs, device=place), counts, output_size=total)
        position = torch.arange(total, device=place) - starts[:-1].long()[of]
        self._pages = page_table[of, position // page_size].long()
        self._offsets = position % page_size

    def takes(self, q: Tensor, key_cache: Tensor, window: int, softcap: float, sinks: Tensor | None) -> bool:
        """Whether the library can do this layer."""
        plain = window == 0 and sinks is None and (not softcap or self._by.softcap)
        return plain and key_cache.dtype == q.dtype

    def attend(self, q: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float, softcap: float) -> Tensor:
        """q [≥ T, Hq, D], rows past T are padding; caches [pages, Hkv, page_size, D]. Returns [≥ T, Hq·D], zeros for
        padding."""
        keys, values = self.gathered(key_cache), self.gathered(value_cache)
        out = torch.zeros_like(q)
        out[: self._tokens] = self._by.attend(q[: self._tokens], keys, values, self._spans, scale, softcap)
        return out.flatten(1)

    def gathered(self, cache: Tensor) -> Tensor:
        """The sequences' rows of a cache in one piece, [N, Hkv, D]."""
        return cache.permute(0, 2, 1, 3)[self._pages, self._offsets]


def gathered_bytes(keys: int, key_cache: Tensor) -> int:
    """What a layer's gathered keys and values take."""
    return 2 * keys * int(key_cache.shape[1]) * int(key_cache.shape[3]) * key_cache.itemsize


def _starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)
