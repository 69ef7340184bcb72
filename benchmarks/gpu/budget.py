"""Time of the whole suite, and how much of it a section may take. Pure: the clock is passed in."""

from __future__ import annotations

import time
from collections.abc import Callable

CLOSING_S = 5.0
"""Kept back for merging results and printing the table."""


class Budget:
    """So many seconds from now on."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds that sections may still take, never negative."""
        return max(0.0, self._end - CLOSING_S - self._clock())

    def share(self, limit_s: float, least_s: float) -> float:
        """Seconds for a section that may take limit_s and is of no use with less than least_s; 0: it is not begun."""
        allowed = min(limit_s, self.left)
        return allowed if allowed >= least_s else 0.0


class Deadline:
    """When a section has to have ended. It looks at it between cases; whoever supervises it ends it a little later."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - self._clock())

    def within(self, seconds: float) -> float:
        """The lesser of `seconds` and what is left."""
        return min(seconds, self.left)

    def allows(self, seconds: float) -> bool:
        """True while that much is left."""
        return self.left >= seconds
