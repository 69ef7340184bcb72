"""When a new prompt would get its first token: what a target for it is compared with, before the prompt is queued.

A prompt waits for the tokens of the prompts before it, computed at the rate that the measured steps give, and where all
rows or pages are taken also for as many requests to end as there are places missing. A target speaks of that wait: a
long prompt, which would miss the target all alone, may still wait half of it.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from engine.config import EngineConfig
from engine.request import Request
from engine.scheduler import Limits, Scheduler
from engine.step_time import Pace, StepShape, StepTimes

DEPARTURES = 64
"""Ends of requests over which their rate is measured."""
LAST = (0, 1 << 62)
"""Rank of who came after everybody."""


class Line(NamedTuple):
    """What is before a new prompt."""

    decodes: int = 0
    """requests that take a token of each step"""
    context: int = 0
    """tokens that these read"""
    tokens: int = 0
    """prompt tokens of higher rank that are still to be computed"""
    shorter: int | None = None
    """for a prompt in the fast lane: the prompt tokens in it that come first; None: it is not in it"""
    places: int = 0
    """requests that have to end before it can start"""


class Forecast(NamedTuple):
    """Seconds to the first token of a new prompt."""

    wait_s: float
    """because of others"""
    own_s: float
    """what it takes alone"""

    def excess(self, target_s: float) -> float:
        """Seconds by which the wait is longer than a target for the first token allows; negative: it is not."""
        return self.wait_s - max(target_s - self.own_s, target_s / 2)


def forecast(line: Line, rest: int, limits: Limits, pace: Pace, departure_s: float) -> Forecast:
    """Predict the first token of a prompt with `rest` tokens to compute; departure_s: time between two ends. Pure."""
    cost, position = pace.cost, rest // 2
    decode_s = cost.seconds(StepShape(line.decodes, line.decodes, line.context, 0))
    room = max(cost.room(pace.seconds - decode_s, position), limits.least_prefill)
    budget = max(1, min(limits.step_tokens - line.decodes, room))

    def seconds(tokens: int) -> float:
        """Time of the steps that compute so many prompt tokens."""
        full, left = divmod(tokens, budget)
        last_s = decode_s + cost.chunk(position, left) if left else 0.0
        return full * (decode_s + cost.chunk(position, budget)) + last_s

    own_s = seconds(rest)
    total_s = seconds(line.tokens + rest)
    if line.shorter is not None:
        total_s = min(total_s, seconds(round((line.shorter + rest) / limits.fast_share)))
    return Forecast(max(0.0, total_s - own_s) + line.places * departure_s, own_s)


def line_before(rank: tuple[int, int], rest: int, scheduler: Scheduler, *, fast: bool) -> Line:
    """What is before a prompt of this rank with `rest` tokens to compute; fast: it may take the fast lane."""
    limits, pool = scheduler.limits, scheduler.pool
    decodes = context = tokens = shorter = places = 0
    rows, pages = limits.max_running - len(scheduler.running), pool.available
    for request in scheduler.running:
        left = len(request.tokens) - request.computed
        if left <= 1:
            decodes += 1
            context += len(request.tokens)
            continue
        tokens += left if request.rank < rank else 0
        shorter += left if left <= rest else 0
    for request in scheduler.waiting:
        shorter += request.rest if request.rest <= rest else 0
        if request.rank < rank:
            tokens += request.rest
            rows -= 1
            pages -= -(-request.rest // limits.page_size)
            places += rows < 0 or pages < 0
    places += rows < 1 or pages < -(-rest // limits.page_size)
    lane = fast and 0 < rest <= limits.fast_tokens and limits.fast_share > 0
    return Line(decodes, context, tokens, shorter if lane else None, places)


class FirstTokens:
    """Measures an engine's steps and ends, and judges new prompts by them. One thread."""

    def __init__(self, config: EngineConfig, scheduler: Scheduler) -> None:
        """Raises ValueError for a limit of time that is negative."""
        for name, value in (("max_step_ms", config.max_step_ms), ("target_ttft_ms", config.target_ttft_ms)):
            if not value >= 0:
                raise ValueError(f"{name} {value} must not be negative")
        self.target_s = config.target_ttft_ms / 1e3
        self.times = StepTimes()
        self._max_step_s = config.max_step_ms / 1e3 or float("inf")
        self._scheduler = scheduler
        self._gaps: deque[float] = deque(maxlen=DEPARTURES)
        self._left: float | None = None

    @property
    def pace(self) -> Pace:
        """How long the next step may take, and what that means."""
        return Pace(self._max_step_s, self.times.cost)

    def departs(self, now: float) -> None:
        """A request that is still in its place ends now. Only ends that others wait for teach how long they wait."""
        scheduler = self._scheduler
        if not scheduler.waiting:
            self._left = None
            return
        if self._left is not None:
            self._gaps.append(now - self._left)
        self._left = now

    @property
    def departure_s(self) -> float:
        """Mean time between two ends while others wait for places; 0 while it is not known."""
        return sum(self._gaps) / len(self._gaps) if self._gaps else 0.0

    def forecast(self, request: Request) -> Forecast:
        """Predict the first token of a request that is not queued yet."""
        scheduler = self._scheduler
        rest = scheduler.uncached(request)
        line = line_before(request.rank, rest, scheduler, fast=True)
        return forecast(line, rest, scheduler.limits, self.pace, self.departure_s)

    def excess(self, request: Request) -> float:
        """Seconds by which a request that is not queued yet would miss the target because of others; 0: it is met, or
        there is none, or nothing is known yet."""
        if not self.target_s or not self.times.seen:
            return 0.0
        return max(0.0, self.forecast(request).excess(self.target_s))

    def wait_s(self) -> float:
        """Predicted wait of a long prompt that came now, in seconds."""
        if not self.times.seen:
            return 0.0
        line = line_before(LAST, 1, self._scheduler, fast=False)
        return forecast(line, 1, self._scheduler.limits, self.pace, self.departure_s).wait_s
