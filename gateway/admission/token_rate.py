"""Tokens per minute of one key: a token bucket in integers. Pure: the time is passed in.

A request takes its prompt and the most that it may generate when it is admitted, and gives back what it did not use
when it is settled; prompt tokens count whether they were cached or not. So the mean rate is never exceeded, and a
client that asks for much more than it needs waits for it only while it runs.
"""

from __future__ import annotations

import msgspec

MINUTE_US = 60_000_000


class Allowance(msgspec.Struct, frozen=True):
    """State of a rate after an admission, for the x-ratelimit headers."""

    limit: int
    remaining: int
    reset_us: int
    """until the full allowance is back"""


class TokenRate:
    """A bucket that holds a minute's worth of tokens and is refilled evenly.

    The level is kept in tokens times MINUTE_US: `per_minute` of these flow in every microsecond, without rounding.
    """

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: int) -> None:
        """Begins full. ValueError unless the rate is positive."""
        if per_minute < 1:
            raise ValueError(f"{per_minute} tokens per minute")
        self.per_minute = per_minute
        self._level = per_minute * MINUTE_US
        self._at: int | None = None

    def take(self, now: int, tokens: int) -> int:
        """Take `tokens` at `now` (µs, monotonic): 0 when they were there, else the µs until they would be, and nothing
        is taken.

        A request that is larger than the whole bucket needs it full and leaves a debt: it could never come in.
        """
        self._fill(now)
        needed = min(tokens, self.per_minute) * MINUTE_US
        if needed > self._level:
            return -(-(needed - self._level) // self.per_minute)
        self._level -= tokens * MINUTE_US
        return 0

    def correct(self, now: int, tokens: int) -> None:
        """Give `tokens` back that were taken and not used; negative ones were used beyond what was taken."""
        self._fill(now)
        self._level = min(self.per_minute * MINUTE_US, self._level + tokens * MINUTE_US)

    def allowance(self, now: int) -> Allowance:
        """What is left at `now` (µs)."""
        self._fill(now)
        missing = self.per_minute * MINUTE_US - self._level
        return Allowance(self.per_minute, max(0, self._level // MINUTE_US), -(-missing // self.per_minute))

    def _fill(self, now: int) -> None:
        if self._at is not None and now > self._at:
            self._level = min(self.per_minute * MINUTE_US, self._level + (now - self._at) * self.per_minute)
        self._at = now if self._at is None else max(self._at, now)
