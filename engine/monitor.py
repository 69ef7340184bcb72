"""Nothing compiles after ready: counts kernels that are compiled, and graphs that are captured, once an engine serves.

A compilation stalls every stream of the engine for as long as it takes, a second at times; whatever can be needed has
to be compiled and captured before the first request. Triton tells its listener of every compilation, of those that it
finds in its cache on disk, too (they cost a module load).
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("engine.monitor")


class Monitor:
    """Counts while armed. One per process, as Triton's listener is."""

    def __init__(self) -> None:
        self.late = 0
        """compilations and captures after arm()"""
        self._armed = False

    def arm(self) -> None:
        """The engine is ready: from now on everything counts."""
        self._armed = True

    def disarm(self) -> None:
        """Start again from nothing, as before a start-up."""
        self._armed = False
        self.late = 0

    def compiled(self, name: str) -> None:
        """A kernel was compiled."""
        if self._armed:
            self.late += 1
            log.warning("the kernel %s was compiled after the engine was ready", name)

    def captured(self) -> None:
        """A graph was captured."""
        if self._armed:
            self.late += 1
            log.warning("a graph was captured after the engine was ready")


MONITOR = Monitor()
"""This process's monitor"""


def watch_triton(monitor: Monitor = MONITOR) -> None:
    """Have Triton tell the monitor of every compilation; without Triton there is nothing to watch."""
    try:
        from triton import knobs
    except ModuleNotFoundError:
        return

    def listener(*, src: Any, **_details: Any) -> None:
        monitor.compiled(str(getattr(src, "name", src)))

    knobs.compilation.listener = listener
