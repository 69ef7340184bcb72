"""Memory for packed weights: large blocks on huge pages where the system gives them, so that a sweep over the
weights does not spend its time on address translation."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
CHUNK = 32 << 20
ALIGNMENT = 64


class Arena:
    """Hands out aligned byte tensors cut from large mappings, each freed when the last tensor cut from it is gone."""

    def __init__(self) -> None:
        """Start without memory."""
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, size: int) -> Tensor:
        """Return an uninitialised uint8 [size] tensor, aligned to 64 bytes."""
        if self._used + size > self._chunk.shape[0]:
            self._chunk, self._used = _map(max(size, CHUNK)), 0
        piece = self._chunk[self._used : self._used + size]
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return piece


def _map(size: int) -> Tensor:
    mapping = mmap.mmap(-1, -(-size // HUGE_PAGE) * HUGE_PAGE + HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    return whole[-whole.data_ptr() % HUGE_PAGE :]
