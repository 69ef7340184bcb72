"""The CUDA device: one stream computes, another brings results to the host. Not yet run on a GPU.

Results are copied into pinned memory as soon as they are written, on the second stream; an event there tells the host.
The next step writes the tensors that are copied, so its stream waits for the copy, which is long over by then.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from engine.device import Pending, Result, Work

_cuda: Any = torch.cuda
"""Its streams and events are untyped in torch."""

FAULTS = ("CUDA error", "Triton Error [CUDA]")
"""How libraries tell of a fault on the device"""
RESULT_ROWS = 1024
"""Rows of pinned memory for results, at least: the first steps take all that later ones need."""


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


def device_seconds(work: Callable[[], object], times: int = 5) -> float:
    """How long the device takes for `work`, on the current stream, once it is warm."""
    work()
    began, ended = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
    began.record()
    for _ in range(times):
        work()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1000 / times


def launch_seconds(work: Callable[[], object]) -> float:
    """How long the host takes to launch `work`, once it is warm."""
    work()
    _cuda.synchronize()
    began = time.perf_counter()
    work()
    took = time.perf_counter() - began
    _cuda.synchronize()
    return took


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
        """Inside, work goes to the stream of the steps; before and after, everything there is to do has been done. The
        garbage collector stands still: what it frees of an earlier engine could break into the capture of a graph."""
        gc.collect()
        _cuda.synchronize()
        collects = gc.isenabled()
        gc.disable()
        try:
            with _cuda.stream(self.stream):
                yield
        finally:
            if collects:
                gc.enable()
        _cuda.synchronize()

    def lost(self, error: Exception) -> bool:
        """After a fault on the device every call fails, whatever it is asked, until the process ends."""
        if isinstance(error, torch.OutOfMemoryError):
            return False
        text = str(error)
        return isinstance(error, torch.AcceleratorError) or any(word in text for word in FAULTS)

    def staging(self, size: int) -> Tensor:
        """Pinned memory."""
        return _pinned((size,), torch.int32)

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


def _pinned(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that the device reads and writes by itself."""
    return torch.zeros(size, dtype=dtype, pin_memory=True)


class _PinnedRing:
    """Pinned memory for results; a piece is taken again after three further steps with such results."""

    def __init__(self) -> None:
        self._rings: dict[tuple[torch.Size, torch.dtype], deque[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        """Memory of this shape and type: the front of a larger piece."""
        rows, rest = like.shape[0], like.shape[1:]
        ring = self._rings.get((rest, like.dtype))
        if ring is None or ring[0].shape[0] < rows:
            size = (max(rows, RESULT_ROWS), *rest)
            ring = deque(_pinned(size, like.dtype) for _ in range(4))
            self._rings[rest, like.dtype] = ring
        ring.rotate(-1)
        return ring[-1][:rows]


class _Copied:
    """Results on their way to the host."""

    __slots__ = ("_event", "_result")

    def __init__(self, event: Any, result: Result) -> None:
        self._event = event
        self._result = result

    def ready(self) -> bool:
        """True when the copies have arrived, or never will: then wait() says why."""
        try:
            return bool(self._event.query())
        except RuntimeError:
            return True

    def wait(self) -> Result:
        """Wait for the copies. Raises what CUDA says went wrong since."""
        self._event.synchronize()
        return self._result
