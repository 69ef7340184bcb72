"""How the rest of a step, after its decodes, is given to prompts: a share to the fast lane, the rest by rank. See
engine.scheduler, whose `decide` it is a part of; like it, it changes nothing but itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from engine.kv_cache import Match
from engine.request import Request
from engine.step_time import StepCost

if TYPE_CHECKING:
    from engine.scheduler import Candidate, Limits, View


@dataclass(slots=True)
class Budget:
    """What is left of a step for prompts: tokens, and time, which the first `floor` tokens need not fit into."""

    tokens: int
    seconds: float
    floor: int
    cost: StepCost

    def take(self, position: int, wanted: int) -> int:
        """Take as many of the wanted tokens, which follow `position` computed ones, as there is room for."""
        count = min(wanted, self.tokens, max(self.floor, self.cost.room(self.seconds, position)))
        if count > 0:
            self.tokens -= count
            self.floor = max(0, self.floor - count)
            self.seconds -= self.cost.chunk(position, count)
        return max(0, count)

    def split(self, share: float) -> Budget:
        """Part with a share, rounded down."""
        part = Budget(int(self.tokens * share), max(0.0, self.seconds) * share, int(self.floor * share), self.cost)
        self.tokens -= part.tokens
        self.floor -= part.floor
        if self.seconds < math.inf:
            self.seconds -= part.seconds
        return part

    def join(self, part: Budget) -> None:
        """Take back what a part has left."""
        self.tokens += part.tokens
        self.floor += part.floor
        if self.seconds < math.inf:
            self.seconds += part.seconds


class Prefill:
    """Gives the rest of a step, after its decodes, to prompts."""

    def __init__(self, view: View, limits: Limits, budget: Budget, available: int) -> None:
        self._view = view
        self._limits = limits
        self._budget = budget
        self._available = available
        self._rows = limits.max_running - len(view.running)
        self._counts: dict[Request, int] = {}
        self._admitted: dict[Request, Match] = {}
        self._taken: set[int] = set()

    def compute(self, chunked: list[Request], *, admitting: bool) -> None:
        """Fill the step: the fast lane, then everybody by rank. `chunked` run and have prompt left."""
        waiting = iter(self._view.waiting if admitting and self._rows > 0 else ())
        head: list[Candidate] = []
        if self._limits.fast_share and self._budget.tokens > 0:
            head = self._fast(chunked, waiting, admitting=admitting)
        self._by_rank(chunked, chain(head, waiting))

    def chunks(self) -> list[tuple[Request, int]]:
        """Chunks of the running."""
        return [(request, count) for request, count in self._counts.items() if request not in self._admitted]

    def admissions(self) -> list[tuple[Request, Match, int]]:
        """Who starts to run, from which cached prefix, with how many tokens."""
        return [(request, match, self._counts[request]) for request, match in self._admitted.items()]

    def _fast(self, chunked: list[Request], waiting: Iterator[Candidate], *, admitting: bool) -> list[Candidate]:
        """Serve the fast lane. Returns what it read of those who wait: the first, whose place it keeps."""
        limits = self._limits
        lane = self._budget.split(limits.fast_share)
        ends = [_Rest(rest, request, None) for request in chunked if (rest := _rest(request)) <= limits.fast_tokens]
        ends.sort(key=_shortest)
        head: list[Candidate] = []
        for rest, request, match in merge(ends, self._short(admitting), key=_shortest):
            if match is None:
                self._chunk(request, lane)
            else:
                head = head or list(islice(waiting, 1))
                kept = sum(self._need(*other) for other in head if other.request not in (request, *self._admitted))
                if rest <= limits.fast_tokens and not self._admit(request, match, lane, kept):
                    break
            if lane.tokens <= 0:
                break
        self._budget.join(lane)
        return head

    def _short(self, admitting: bool) -> Iterator[_Rest]:
        for request, match in self._view.short if admitting and self._rows > 0 else ():
            yield _Rest(len(request.tokens) - len(match.pages) * self._limits.page_size, request, match)

    def _by_rank(self, chunked: list[Request], waiting: Iterator[Candidate]) -> None:
        for request in chunked:
            if self._budget.tokens <= 0:
                return
            self._chunk(request, self._budget)
        while self._budget.tokens > 0 and self._rows > 0 and (candidate := next(waiting, None)) is not None:
            if candidate.request in self._admitted:
                self._more(*candidate)
            elif not self._admit(*candidate, self._budget):
                break  # nobody overtakes
        for request, match in self._admitted.items():
            if self._budget.tokens > 0:
                self._more(request, match)

    def _chunk(self, request: Request, budget: Budget) -> None:
        """Compute as much of a running prompt as there is room for."""
        before = self._counts.get(request, 0)
        count = budget.take(request.computed + before, _rest(request) - before)
        if count:
            self._counts[request] = before + count

    def _more(self, request: Request, match: Match) -> None:
        """Compute more of a prompt that the fast lane has admitted."""
        position = len(match.pages) * self._limits.page_size + self._counts[request]
        self._counts[request] += self._budget.take(position, len(request.tokens) - position)

    def _need(self, request: Request, match: Match) -> int:
        """Pages that an admission takes. Cached ones that nobody owns leave the available just as new ones do."""
        total = -(-len(request.tokens) // self._limits.page_size)
        return total - len(match.pages) + len(self._idle(match))

    def _idle(self, match: Match) -> set[int]:
        return {page for page in match.pages if self._view.refcounts[page] == 0} - self._taken

    def _admit(self, request: Request, match: Match, budget: Budget, kept: int = 0) -> bool:
        """Admit with as many tokens as there is room for. False where there is none; `kept` pages, and a row with them,
        are another's."""
        need = self._need(request, match)
        reserve = self._limits.watermark if self._view.running or self._admitted else 0
        if need + reserve + kept > self._available or self._rows <= (kept > 0):
            return False
        cached = len(match.pages) * self._limits.page_size
        count = budget.take(cached, len(request.tokens) - cached)
        if count == 0:
            return False
        self._taken |= self._idle(match)
        self._available -= need
        self._rows -= 1
        self._counts[request] = count
        self._admitted[request] = match
        return True


class _Rest(NamedTuple):
    """How much of a request is left to compute; match: it waits."""

    tokens: int
    request: Request
    match: Match | None


def _rest(request: Request) -> int:
    return len(request.tokens) - request.computed


def _shortest(rest: _Rest) -> tuple[int, tuple[int, int]]:
    return rest.tokens, rest.request.rank
