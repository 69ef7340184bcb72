"""The CUDA device: one stream computes, another brings results to the host. Not yet run on a GPU.

Results are copied into pinned memory as soon as they are written, on the second stream; an event there tells the host.
The next step writes the tensors that are copied, so its stream waits for the copy, which is long over by then.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from engine.device import Pending, Result, Work

_cuda: Any = torch.cuda
"""Its streams and events are untyped in torch."""


def peak_memory(work: Callable[[], None]) -> int:
    """Most bytes that `work` held at once beyond what was held before; what it leaves is given back."""
    gc.collect()
    _cuda.reset_peak_memory_stats()
    before = int(_cuda.memory_allocated())
    work()
    _cuda.synchronize()
    peak = int(_cuda.max_memory_allocated())
    gc.collect()
    _cuda.empty_cache()
    return peak - before


def free_memory() -> int:
    """Bytes that the device has left."""
    free, _total = _cuda.mem_get_info()
    return int(free)


class CudaDevice:
    """The current CUDA device of this process."""

    name = "cuda"
    asynchronous = True

    def __init__(self) -> None:
        self.stream = _cuda.Stream()
        self._copies = _cuda.Stream()
        self._pinned = _PinnedRing()

    @contextmanager
    def building(self) -> Iterator[None]:
        """Inside, work goes to the stream of the steps; before and after, everything there is to do has been done."""
        _cuda.synchronize()
        with _cuda.stream(self.stream):
            yield
        _cuda.synchronize()

    def staging(self, size: int) -> Tensor:
        """Pinned memory."""
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def run(self, work: Work) -> Pending:
        """Queue it on the stream; the host goes on."""
        with _cuda.stream(self.stream):
            result = work()
            if not result:
                done = _cuda.Event()
                done.record(self.stream)
                return _Copied(done, ())
            written = _cuda.Event()
            written.record(self.stream)
        with _cuda.stream(self._copies):
            self._copies.wait_event(written)
            copies = tuple(self._pinned.take(tensor) for tensor in result)
            for copy, tensor in zip(copies, result, strict=True):
                copy.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._copies)
            done = _cuda.Event()
            done.record(self._copies)
        self.stream.wait_event(done)
        return _Copied(done, copies)


class _PinnedRing:
    """Pinned memory for results; a piece is taken again after three further steps of the same shape."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype], deque[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        """Memory of this shape and type."""
        ring = self._free.setdefault((like.shape, like.dtype), deque())
        if len(ring) < 4:
            ring.append(torch.empty(like.shape, dtype=like.dtype, pin_memory=True))
            return ring[-1]
        ring.rotate(-1)
        return ring[-1]


class _Copied:
    """Results on their way to the host."""

    __slots__ = ("_event", "_result")

    def __init__(self, event: Any, result: Result) -> None:
        self._event = event
        self._result = result

    def ready(self) -> bool:
        """True when the copies have arrived."""
        return bool(self._event.query())

    def wait(self) -> Result:
        """Wait for the copies. Raises what CUDA says went wrong since."""
        self._event.synchronize()
        return self._result
