"""What one key may ask for: requests per minute (GCRA), tokens per minute (a bucket) and requests in flight at once.
Pure: the time is passed in.
"""

from __future__ import annotations

import msgspec

from gateway.admission.token_rate import MINUTE_US, Allowance, TokenRate

__all__ = ["Allowance", "KeyLimits", "Limited", "RequestRate"]


class Limited(msgspec.Struct, frozen=True):
    """A refusal: which limit, its value, and when another try may succeed."""

    kind: str
    """ "requests" or "tokens" (per minute), or "concurrency" """
    limit: int
    retry_after_us: int


class RequestRate:
    """Generic cell rate algorithm (ITU-T I.371, virtual scheduling): a token bucket in one integer.

    Each request moves the theoretical arrival time one interval on; a request is refused when that time would lie more
    than the burst ahead of now. The interval is rounded up to a whole microsecond, so the rate is never exceeded.
    """

    __slots__ = ("_arrival", "_interval", "_tolerance", "burst", "per_minute")

    def __init__(self, per_minute: int, burst: int | None = None) -> None:
        """`burst` requests may come at once (default: a minute's worth). ValueError unless both are positive."""
        burst = per_minute if burst is None else burst
        if per_minute < 1 or burst < 1:
            raise ValueError(f"{per_minute} requests per minute, {burst} at once")
        self.per_minute = per_minute
        self.burst = burst
        self._interval = -(-MINUTE_US // per_minute)
        self._tolerance = self._interval * burst
        self._arrival: int | None = None

    def take(self, now: int) -> int:
        """Count one request at `now` (µs): 0 when it is admitted, else the µs until one would be. A refusal costs
        nothing.
        """
        arrival = (now if self._arrival is None else max(self._arrival, now)) + self._interval
        early = arrival - now - self._tolerance
        if early > 0:
            return early
        self._arrival = arrival
        return 0

    def allowance(self, now: int) -> Allowance:
        """What is left at `now` (µs)."""
        ahead = 0 if self._arrival is None else max(0, self._arrival - now)
        return Allowance(self.burst, max(0, (self._tolerance - ahead) // self._interval), ahead)


class KeyLimits:
    """The limits of one key and their use; None is no limit. Survives reloads of the key's row."""

    __slots__ = ("_rate", "max_concurrency", "running", "tokens")

    def __init__(
        self, requests_per_minute: int | None, max_concurrency: int | None, tokens_per_minute: int | None = None
    ) -> None:
        self.running = 0
        """requests admitted and not yet released"""
        self.max_concurrency: int | None = None
        self.tokens: TokenRate | None = None
        """the bucket of tokens per minute"""
        self._rate: RequestRate | None = None
        self.configure(requests_per_minute, max_concurrency, tokens_per_minute)

    def configure(
        self, requests_per_minute: int | None, max_concurrency: int | None, tokens_per_minute: int | None = None
    ) -> None:
        """Take new limits; requests in flight stay counted, and an unchanged rate keeps its state."""
        self.max_concurrency = max_concurrency
        if requests_per_minute != (None if self._rate is None else self._rate.per_minute):
            self._rate = None if requests_per_minute is None else RequestRate(requests_per_minute)
        if tokens_per_minute != (None if self.tokens is None else self.tokens.per_minute):
            self.tokens = None if tokens_per_minute is None else TokenRate(tokens_per_minute)

    def admit(self, now: int) -> Limited | None:
        """Count a request in at `now` (µs, monotonic), or say why not. Every admission needs one `release`."""
        if self.max_concurrency is not None and self.running >= self.max_concurrency:
            return Limited("concurrency", self.max_concurrency, 1_000_000)
        if self._rate is not None and (wait := self._rate.take(now)):
            return Limited("requests", self._rate.per_minute, wait)
        self.running += 1
        return None

    def release(self) -> None:
        """The request has ended, however."""
        if self.running == 0:
            raise ValueError("released more often than admitted")
        self.running -= 1

    def allowance(self, now: int) -> Allowance | None:
        """State of the request rate, None when the key has none."""
        return None if self._rate is None else self._rate.allowance(now)
