"""Work that is recorded once and repeated: CUDA graphs behind a port, and the same on a CPU by calling it again.

What is recorded reads and writes memory that stays where it is, in shapes that stay what they are. On a GPU all of it
is launched by one call, for a tenth of a millisecond instead of ten; elsewhere the very same functions run eagerly, so
that a test without a GPU exercises buckets, padding and static memory as a GPU would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

from engine.monitor import MONITOR

_cuda: Any = torch.cuda
"""Its graphs and streams are untyped in torch."""


class Graphs(Protocol):
    """A table of recorded work."""

    def capture(self, key: Hashable, work: Callable[[], None]) -> None:
        """Record `work`, which runs at least once for that. The larger before the smaller: memory is shared."""
        ...

    def replay(self, key: Hashable) -> None:
        """Repeat what was recorded under `key`."""
        ...

    @property
    def summary(self) -> str:
        """What recording took, in words."""
        ...


class EagerGraphs:
    """Calls the work again: the same shapes in the same memory, without a graph."""

    def __init__(self) -> None:
        self._work: dict[Hashable, Callable[[], None]] = {}
        self.replays: dict[Hashable, int] = {}
        """how often each was repeated"""

    def capture(self, key: Hashable, work: Callable[[], None]) -> None:
        """Run it once, as a capture does, and keep it."""
        work()
        self._work[key] = work

    def replay(self, key: Hashable) -> None:
        """Run it again."""
        self.replays[key] = self.replays.get(key, 0) + 1
        self._work[key]()

    @property
    def summary(self) -> str:
        """Nothing is recorded."""
        return f"{len(self._work)} shapes, run without graphs"


class CudaGraphs:
    """CUDA graphs that share one pool of memory. Not yet run on a GPU."""

    def __init__(self, stream: Any) -> None:
        """stream: the one that graphs are captured and replayed on."""
        self._stream = stream
        self._pool = _cuda.graph_pool_handle()
        self._graphs: dict[Hashable, Any] = {}
        self._bytes = 0
        self._seconds = 0.0

    def capture(self, key: Hashable, work: Callable[[], None]) -> None:
        """Run it eagerly, so that kernels are compiled and libraries have their workspaces, then record it."""
        began, reserved = time.monotonic(), _cuda.memory_reserved()
        with _cuda.stream(self._stream):
            work()
        self._stream.synchronize()
        graph = _cuda.CUDAGraph()
        with _cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        self._graphs[key] = graph
        MONITOR.captured()
        self._bytes += max(0, _cuda.memory_reserved() - reserved)
        self._seconds += time.monotonic() - began

    def replay(self, key: Hashable) -> None:
        """One launch on the current stream."""
        self._graphs[key].replay()

    @property
    def summary(self) -> str:
        """Graphs, memory and time."""
        return f"{len(self._graphs)} graphs, {self._bytes / (1 << 20):.0f} MiB, {self._seconds:.2f} s"
