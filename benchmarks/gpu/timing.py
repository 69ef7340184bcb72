"""How long a call takes on the device: CUDA events around a replayed graph, with a cold L2 cache.

The host needs longer to launch a small kernel than the device to run it. So a call is captured as a graph, its outputs
in the graph's own memory, and events are recorded around the replay; before each, a buffer larger than any L2 cache is
overwritten, which also keeps the device busy while the host queues what follows. What cannot be captured is timed as it
is launched. On a CPU: the fastest of a few calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from benchmarks.rig.results import percentile

FLUSH_BYTES = 512 << 20
WARM_UP = 3
LEAST, MOST = 7, 50
"""Timed runs of a call"""


class Timer(Protocol):
    """Times calls."""

    def seconds(self, call: Callable[[], object], budget_s: float = 0.1) -> float:
        """The usual time of one call, from as many as the budget allows."""
        ...


class HostTimer:
    """For a CPU."""

    def seconds(self, call: Callable[[], object], budget_s: float = 0.1) -> float:
        """The fastest call: what a shared machine adds is never negative."""
        call()
        times: list[float] = []
        end = time.perf_counter() + budget_s
        while not times or (time.perf_counter() < end and len(times) < MOST):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return min(times)


class DeviceTimer:
    """For the current CUDA device."""

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
        self.eager = 0
        """Calls that could not be captured"""

    def seconds(self, call: Callable[[], object], budget_s: float = 0.1) -> float:
        """The median."""
        replay = self._captured(call)
        once = self._times(replay, 2)[-1]
        count = max(LEAST, min(MOST, int(budget_s / max(once, 1e-6))))
        return percentile(self._times(replay, count), 0.5)

    def _times(self, replay: Callable[[], object], count: int) -> list[float]:
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for start, end in pairs:
            self._flush.zero_()
            start.record()
            replay()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def _captured(self, call: Callable[[], object]) -> Callable[[], object]:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                call()
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                call()
        except RuntimeError:  # something in it waits for the device or copies from pageable memory
            torch.cuda.synchronize()
            self.eager += 1
            return call
        return graph.replay


def timer(device: str) -> Timer:
    """The timer of a device."""
    return DeviceTimer() if device == "cuda" else HostTimer()
