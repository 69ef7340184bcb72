"""Batches of attention over a cache whose every other slot would spoil the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]

FP8 = torch.float8_e4m3fn


@dataclass
class Batch:
    """Sequences of (cached, new) tokens, then padding rows; live slots are random, every other one is NaN."""

    q: Tensor
    keys: Tensor
    values: Tensor
    q_starts: Tensor
    kv_lens: Tensor
    page_table: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def arguments(self) -> tuple[Tensor, ...]:
        return self.q, self.keys, self.values, self.q_starts, self.kv_lens, self.page_table


def spoiled(*shape: int, dtype: torch.dtype) -> Tensor:
    """NaN everywhere; 0x7F is the NaN of 8-bit floats."""
    if dtype == FP8:
        return torch.full(shape, 0x7F, dtype=torch.uint8).view(FP8)
    return torch.full(shape, float("nan"), dtype=dtype)


def make_batch(
    seqs: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    padding_rows: int = 0,
    padding_seqs: int = 0,
    seed: int = 0,
) -> Batch:
    """A batch in shuffled pages. Table entries past a sequence's end name a page of NaN."""
    g = torch.Generator().manual_seed(seed)
    kv_dtype = kv_dtype or dtype
    Hq, Hkv = heads
    counts = [-(-(cached + new) // page) for cached, new in seqs]
    total = sum(counts)
    order = torch.randperm(total, generator=g).int() + 1
    table = torch.zeros(len(seqs) + padding_seqs, max([*counts, 1]) + 2, dtype=torch.int32)
    keys = spoiled(total + 2, Hkv, page, head_dim, dtype=kv_dtype)
    values = spoiled(total + 2, Hkv, page, head_dim, dtype=kv_dtype)
    for cache in (keys, values):
        raw = cache.view(torch.uint8) if kv_dtype == FP8 else cache
        taken = 0
        for s, (cached, new) in enumerate(seqs):
            table[s, : counts[s]] = order[taken : taken + counts[s]]
            taken += counts[s]
            where = torch.arange(cached + new)
            live = torch.randn(cached + new, Hkv, head_dim, generator=g).to(kv_dtype)
            raw[table[s, where // page].long(), :, where % page] = live.view(raw.dtype)
    new_tokens = [new for _, new in seqs] + [0] * padding_seqs
    starts = torch.tensor([0, *new_tokens]).cumsum(0).int()
    lens = torch.tensor([cached + new for cached, new in seqs] + [0] * padding_seqs, dtype=torch.int32)
    q = torch.full((int(starts[-1]) + padding_rows, Hq, head_dim), float("nan"), dtype=dtype)
    q[: int(starts[-1])] = torch.randn(int(starts[-1]), Hq, head_dim, generator=g).to(dtype)
    scales = [torch.rand(Hkv, generator=g) + 0.5 for _ in range(2)] if kv_dtype == FP8 else [None, None]
    return Batch(q, keys, values, starts, lens, table, *scales)


@pytest.fixture(scope="session")
def batch() -> Callable[..., Batch]:
    """`make_batch`."""
    return make_batch


@pytest.fixture
def exact_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in which a row's bits do not depend on its place in the tile, as on a tensor core: the interpreter's own
    are the CPU's BLAS, which adds up rows at a tile's edge in another order."""
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    def outer_products(a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object) -> TensorHandle:
        total = np.zeros(d.data.shape, np.float32)
        for k in range(a.data.shape[1]):
            total += a.data[:, k, None] * b.data[k]
        return TensorHandle(total + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter_builder, "create_dot", outer_products)
