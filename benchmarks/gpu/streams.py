"""One answer as it arrives, whichever way it was asked for: the same figures in process and over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol


class StreamError(Exception):
    """An answer failed."""


class Stream:
    """Arrival times of the tokens of one answer; times are seconds of time.perf_counter()."""

    def __init__(self, sent: float | None = None) -> None:
        self.sent = time.perf_counter() if sent is None else sent
        self.arrivals: list[tuple[float, int]] = []
        """(time, tokens that came together)"""
        self.tokens = 0
        self.prompt_tokens: int | None = None
        """As the server counted them, once the answer has ended"""
        self.cached_tokens = 0
        self._failure: str | None = None
        self._ended = False
        self._news = asyncio.Event()

    def arrived(self, now: float, count: int) -> None:
        """Tokens have come."""
        if count:
            self.arrivals.append((now, count))
            self.tokens += count
            self._news.set()

    def ended(self, prompt_tokens: int, cached_tokens: int) -> None:
        """The answer is whole."""
        self.prompt_tokens, self.cached_tokens = prompt_tokens, cached_tokens
        self._ended = True
        self._news.set()

    def failed(self, why: str) -> None:
        """It will not be."""
        if not self._ended:
            self._failure = why
            self._news.set()

    async def until(self, tokens: int) -> None:
        """Wait for at least so many tokens, or for the end. Raises StreamError."""
        while self.tokens < tokens and not self._ended:
            self._raise()
            self._news.clear()
            await self._news.wait()
        self._raise()

    async def done(self) -> Stream:
        """Wait for the end. Raises StreamError."""
        while not self._ended:
            self._raise()
            self._news.clear()
            await self._news.wait()
        self._raise()
        return self

    def _raise(self) -> None:
        if self._failure is not None:
            raise StreamError(self._failure)

    @property
    def first(self) -> float:
        """When the first token came. Raises StreamError where none did."""
        if not self.arrivals:
            raise StreamError("no token was seen")
        return self.arrivals[0][0]

    @property
    def last(self) -> float:
        """When the last one came."""
        return self.arrivals[-1][0]

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first - self.sent

    @property
    def tpot(self) -> float:
        """Seconds of each token after those that came first; NaN for a single arrival."""
        later = self.tokens - self.arrivals[0][1]
        return (self.last - self.first) / later if later else float("nan")

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between arrivals, of those that ended in (begin, end]."""
        times = [when for when, _ in self.arrivals]
        return [later - earlier for earlier, later in pairwise(times) if begin < later <= end]

    def tokens_in(self, begin: float, end: float) -> int:
        """Tokens that came in (begin, end]."""
        return sum(count for when, count in self.arrivals if begin < when <= end)


class Port(Protocol):
    """Something that answers prompts of words."""

    place: str
    """As in the names of figures: "in process", "http" """

    def start(self, prompt: Sequence[int], tokens: int) -> Stream:
        """Ask for exactly so many tokens, the most probable ones, and return at once."""
        ...

    def stop(self, stream: Stream) -> None:
        """Give up an answer, if it has not ended."""
        ...
