"""A thread that sees whether steps end: a device that hangs, hangs the thread that steps with it.

Time is counted in the watchdog's own ticks, so that a process that was stopped for a while and goes on is not taken for
stuck. A step that holds the interpreter's lock holds the watchdog, too; for that case a timer of the fault handler,
which needs no lock, is wound up again with every tick: it writes all stacks to the log and ends the process.
"""

from __future__ import annotations

import faulthandler
import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

log = logging.getLogger(__name__)

TICKS = 10
"""Looks in the time that a step may take."""
LAST_RESORT = 1.5
"""The fault handler's timer, as a multiple of the time that a step may take."""


class InFlight(NamedTuple):
    """A request's part in a step."""

    request_id: str
    prompt: int
    """tokens of its prompt"""
    computed: int
    """tokens that are computed, as far as is known"""
    tokens: int
    """tokens that the step computes"""


class Watchdog:
    """Watches what runs inside `with watchdog:`, one thing at a time."""

    def __init__(self, timeout_s: float, on_stuck: Callable[[float], None], *, last_resort: bool = False) -> None:
        """on_stuck is called in the watchdog's thread with timeout_s, while what it watches cannot end: it waits at its
        end until on_stuck returns, if that does. timeout_s 0 watches nothing; last_resort: end a process whose
        interpreter hangs."""
        self._timeout_s = timeout_s
        self._on_stuck = on_stuck
        self._last_resort = last_resort
        self._entered = 0
        """odd while something runs"""
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        """Something begins."""
        self._entered += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """It has ended."""
        with self._lock:
            self._entered += 1

    def start(self) -> None:
        """Begin to watch."""
        if self._timeout_s > 0:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        seen, ticks = 0, 0
        self._wind_up()
        try:
            while not self._stopped.wait(self._timeout_s / TICKS):
                entered = self._entered
                if entered % 2 == 0 or entered != seen:
                    seen, ticks = entered, 0
                else:
                    ticks += 1
                self._wind_up()
                if ticks >= TICKS:
                    with self._lock:
                        if self._entered == seen:
                            self._on_stuck(self._timeout_s)
                    ticks = 0
        finally:
            if self._last_resort:
                faulthandler.cancel_dump_traceback_later()

    def _wind_up(self) -> None:
        """Set the last resort back to its full time."""
        if self._last_resort:
            faulthandler.dump_traceback_later(self._timeout_s * LAST_RESORT, exit=True)
