"""Counters and histograms of one engine process, as plain data: whoever serves them chooses the format."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

STEP_MS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 5000.0)
SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
TOKENS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0)


class Histogram:
    """Counts per bucket; bucket i holds values ≤ bounds[i] that are over bounds[i − 1], the last one those over all
    bounds."""

    __slots__ = ("bounds", "count", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.count = 0
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.count += 1
        self.total += value

    def quantile(self, q: float) -> float:
        """Upper bound of the bucket that holds the q-quantile; infinity past the last bound, 0 when empty."""
        wanted = q * self.count
        seen = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            if count and seen >= wanted:
                return bound
        return 0.0


@dataclass(slots=True)
class EngineMetrics:
    """What one engine process has done since it started."""

    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    """prompt tokens of requests that started, cached ones included"""
    cached_tokens: int = 0
    """of these, taken from the prefix cache"""
    computed_tokens: int = 0
    """tokens that went through the model, recomputation included"""
    completion_tokens: int = 0
    accepted_tokens: int = 0
    """of these, guessed before and accepted"""
    rejected_tokens: int = 0
    """guesses that were computed and dropped"""
    finished: dict[str, int] = field(default_factory=dict)
    """finish reason → requests"""
    refused: dict[str, int] = field(default_factory=dict)
    """refusal code → submissions"""
    last_step_ms: float = 0.0
    step_ms: Histogram = field(default_factory=lambda: Histogram(STEP_MS))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    queue_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    """submission → first admission"""
    first_token_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    """submission → first generated token"""
