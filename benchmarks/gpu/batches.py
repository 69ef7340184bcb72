"""Batches of paged attention: small ones in caches full of NaN, where a misread slot shows; large ones to be timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.cases import FP8


@dataclass(frozen=True, slots=True)
class Batch:
    """Arguments of paged attention, in its order, and the scales of an 8-bit cache."""

    q: Tensor
    keys: Tensor
    values: Tensor
    q_starts: Tensor
    kv_lens: Tensor
    page_table: Tensor
    scales: dict[str, Tensor]

    @property
    def scale(self) -> float:
        """Of the scores."""
        return float(self.q.shape[2] ** -0.5)

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """Everything that comes before the scale."""
        return self.q, self.keys, self.values, self.q_starts, self.kv_lens, self.page_table

    def to(self, device: str) -> Batch:
        """The same on a device."""
        scales = {name: tensor.to(device) for name, tensor in self.scales.items()}
        return Batch(*(_moved(tensor, device) for tensor in self.arguments), scales)


def _moved(tensor: Tensor, device: str) -> Tensor:
    """Bytes of 8-bit floats travel as bytes."""
    if tensor.dtype == FP8:
        return tensor.view(torch.uint8).to(device).view(FP8)
    return tensor.to(device)


def spoiled_batch(
    seqs: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int],
    head_dim: int,
    page: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    padding_rows: int = 0,
    padding_seqs: int = 0,
) -> Batch:
    """On the CPU: sequences of (cached, new) tokens in shuffled pages. Slots that belong to nobody, and rows of q past
    the last sequence, are NaN; tables go on past a sequence's end with a page of NaN."""
    generator = torch.Generator().manual_seed(len(seqs))
    kv_dtype = kv_dtype or dtype
    counts = [-(-(cached + new) // page) for cached, new in seqs]
    order = torch.randperm(sum(counts), generator=generator).int() + 1
    table = torch.zeros(len(seqs) + padding_seqs, max([*counts, 1]) + 2, dtype=torch.int32)
    shape = (sum(counts) + 2, heads[1], page, head_dim)
    caches = []
    for _ in range(2):
        cache = torch.full(shape, float("nan")).to(kv_dtype)
        raw = cache.view(torch.uint8) if kv_dtype == FP8 else cache
        taken = 0
        for s, (cached, new) in enumerate(seqs):
            table[s, : counts[s]] = order[taken : taken + counts[s]]
            taken += counts[s]
            where = torch.arange(cached + new)
            live = torch.randn(cached + new, heads[1], head_dim, generator=generator).to(kv_dtype)
            raw[table[s, where // page].long(), :, where % page] = live.view(raw.dtype)
        caches.append(cache)
    new_tokens = [new for _, new in seqs] + [0] * padding_seqs
    starts = torch.tensor([0, *new_tokens]).cumsum(0).int()
    lens = torch.tensor([cached + new for cached, new in seqs] + [0] * padding_seqs, dtype=torch.int32)
    tokens = int(starts[-1])
    q = torch.full((tokens + padding_rows, heads[0], head_dim), float("nan"), dtype=dtype)
    q[:tokens] = torch.randn(tokens, heads[0], head_dim, generator=generator).to(dtype)
    names = ("k_scale", "v_scale") if kv_dtype == FP8 else ()
    scales = {name: torch.rand(heads[1], generator=generator) + 0.5 for name in names}
    return Batch(q, *caches, starts, lens, table, scales)


def large_batch(
    seqs: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int],
    head_dim: int,
    device: str,
    page: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> Batch:
    """On the device, drawn there: what a step with these sequences of (cached, new) tokens attends to."""
    counts = [-(-(cached + new) // page) for cached, new in seqs]
    table = torch.zeros(len(seqs), max(counts), dtype=torch.int32)
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int()
    taken = 0
    for s, count in enumerate(counts):
        table[s, :count] = order[taken : taken + count]
        taken += count
    shape = (sum(counts), heads[1], page, head_dim)
    keys, values = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    starts = torch.tensor([0, *(new for _, new in seqs)]).cumsum(0).int()
    lens = torch.tensor([cached + new for cached, new in seqs], dtype=torch.int32)
    q = torch.randn(int(starts[-1]), heads[0], head_dim, dtype=dtype, device=device)
    return Batch(q, keys, values, starts.to(device), lens.to(device), table.to(device), {})
