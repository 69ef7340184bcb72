"""The forward batch: what the runner hands to a model for one step, as tensors on the model's device."""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod

import numpy as np
import torch
from torch import Tensor

from engine.sizing import Shape
from kernels.host_step import HostStep
from kernels.long_prefill import LongPrefill


@dataclass(slots=True)
class ForwardBatch:
    """One step's tokens, packed without padding: sequence s owns rows q_starts[s]:q_starts[s+1].

    T tokens, S sequences, P pages in the longest table, R rows whose logits are wanted.
    """

    token_ids: Tensor
    """int32 [T]"""
    positions: Tensor
    """int32 [T]: position of each token in its sequence, from 0"""
    slots: Tensor
    """int32 [T]: page × page_size + offset where the token's key and value are written"""
    q_starts: Tensor
    """int32 [S + 1]: prefix sums of the sequences' query lengths"""
    kv_lens: Tensor
    """int32 [S]: tokens of each sequence in the cache, this step's included"""
    page_table: Tensor
    """int32 [S, P]: pages of each sequence in order; entries past its end are 0 and never read"""
    logit_rows: Tensor
    """int64 [R]: rows of T whose logits are wanted, ascending; in a padded batch −1 past them"""
    adapters: Tensor | None = None
    """int32 [T]: slot of the adapter that each token is computed with, −1 for none; None: no token has one"""
    decode: bool = False
    """Every sequence has one token, and a row of logits for it"""
    long: LongPrefill | None = None
    """A library's attention, for the layers that it can do"""
    plans: dict[int, object] = field(default_factory=dict)
    """What attention has planned for all layers with the same window, by window"""

    @classmethod
    def of_step(cls, step: HostStep, device: str) -> ForwardBatch:
        """The batch that a step's arrays describe, on torch's device; on a CPU it shares their memory."""

        def there(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        return cls(
            token_ids=there(step.token_ids),
            positions=there(step.positions),
            slots=there(step.slots),
            q_starts=there(step.q_starts),
            kv_lens=there(step.kv_lens),
            page_table=there(step.page_table),
            logit_rows=there(step.logit_rows),
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.token_ids.shape[0])

    @property
    def num_seqs(self) -> int:
        """S."""
        return int(self.kv_lens.shape[0])


@dataclass(slots=True)
class KVTensors:
    """The paged KV cache's memory: one pair of tensors per layer, each [num_pages, kv_heads, page_size, head_dim]."""

    keys: list[Tensor]
    values: list[Tensor]
    page_size: int

    @classmethod
    def allocate(
        cls,
        *,
        layers: int,
        num_pages: int,
        kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
        shared: bool = False,
    ) -> KVTensors:
        """Allocate zeroed pages. Memory: 2 × layers × num_pages × kv_heads × page_size × head_dim × itemsize bytes; on
        a CPU it is taken from the machine when a page is first written. shared: one tensor a layer is keys and values,
        in half the memory."""
        shape = (num_pages, kv_heads, page_size, head_dim)
        zeros = _lazy_zeros if device == "cpu" else partial(torch.zeros, device=device)
        keys = [zeros(shape, dtype=dtype) for _ in range(layers)]
        values = list(keys) if shared else [zeros(shape, dtype=dtype) for _ in range(layers)]
        return cls(keys=keys, values=values, page_size=page_size)


def kv_tensors(shape: Shape, *, num_pages: int, page_size: int, dtype: str, device: str) -> KVTensors:
    """Pages for a model. dtype: torch's name."""
    return KVTensors.allocate(
        layers=shape.num_layers,
        num_pages=num_pages,
        kv_heads=shape.num_kv_heads,
        page_size=page_size,
        head_dim=shape.head_dim,
        dtype=getattr(torch, dtype),
        device=device,
        shared=shape.shared_kv,
    )


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in fresh anonymous memory.

    torch.zeros would write them all: 0.8 s per GiB of a cache that may stay empty.
    """
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize)
    with suppress(AttributeError, OSError):  # where the platform or kernel has no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
