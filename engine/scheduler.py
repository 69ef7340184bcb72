"""What the next step computes. `decide` is a pure function of plain data; `Scheduler` holds the queues and applies a
decision.

One budget per step: tokens, and time where a longest step is set. Running requests come first: those that need one
token (decode), then those whose prompt is still being computed, in chunks. What is left of the budget admits waiting
requests strictly in order of rank (priority, then arrival), whole or in chunks. A request is admitted only when pages
for all of its tokens can be set aside at once, above a watermark that is left for the growth of those already running;
so an admitted prompt never stalls half-way.

A share of what the decodes leave is the fast lane: it goes to those who have little left to compute, the shortest rest
first, whether they run or wait; what the lane does not need goes to the others. So a short question, or a long one
whose beginning is cached, does not wait for the long prompts ahead of it. Overtaking is safe for who is overtaken: a
row and the pages of the first in the queue are set aside before anyone overtakes it, and nobody does when they cannot
be.

Nobody starves. The first of those who wait for prompt tokens gets all that the fast lane leaves, in every step; a first
that finds no room is not overtaken. When a running request needs a page and none is
left, the running request of the lowest rank is preempted, so the first of all is never preempted and, because one
sequence of the largest size fits into the pool, always finishes; then there is another first. A step that preempts
admits nobody, and a preempted request needs all of its pages back at once, so two requests cannot take turns at
throwing each other out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from engine.kv_cache import BlockPool, Match
from engine.prefill import Budget, Prefill
from engine.request import Request, RequestError, RequestState, Work
from engine.step_time import UNPACED, Pace, StepShape, chunk_pairs
from engine.watchdog import InFlight
from engine.wire import FinishReason

if TYPE_CHECKING:
    from _typeshed import SupportsRichComparison


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step."""

    step_tokens: int
    """most tokens computed in one step"""
    max_running: int
    """most requests that hold a row; at most step_tokens, so that every decode fits into every step"""
    page_size: int
    watermark: int = 0
    """pages that an admission leaves free while anything runs"""
    fast_share: float = 0.0
    """part of the prefill of each step that the fast lane may take; 0: there is none"""
    fast_tokens: int = 256
    """most tokens left to compute with which a request is in the fast lane"""
    least_prefill: int = 16
    """prompt tokens that a step computes however long they take, so that prompts advance beside any decodes"""

    def __post_init__(self) -> None:
        if not 1 <= self.max_running <= self.step_tokens:
            raise ValueError(f"max_running {self.max_running} must be between 1 and step_tokens {self.step_tokens}")
        if not 0 <= self.fast_share < 1:
            raise ValueError(f"fast_share {self.fast_share} must be at least 0 and below 1")


class Candidate(NamedTuple):
    """A waiting request and the cached prefix it could start from."""

    request: Request
    match: Match


@dataclass(frozen=True, slots=True)
class View:
    """What a decision depends on. Nothing here is changed by deciding."""

    running: Sequence[Request]
    """by rank"""
    waiting: Iterable[Candidate]
    """by rank; read only as far as the step has room, so that it may be lazy"""
    available: int
    """pages that nobody owns"""
    refcounts: Sequence[int]
    """owners of each page"""
    short: Iterable[Candidate] = ()
    """of the waiting, those in the fast lane, the shortest first; lazy, too"""


class Admission(NamedTuple):
    """A waiting request that starts to run, with its first `tokens` tokens after the cached prefix."""

    request: Request
    match: Match
    tokens: int


@dataclass(frozen=True, slots=True)
class Decision:
    """One step: who is preempted, what the running compute (decodes first), who is admitted."""

    preempt: list[Request] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    grow: list[Request] = field(default_factory=list)
    """of the decodes, those whose next token needs one more page"""
    admit: list[Admission] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens the step computes."""
        return sum(w.tokens for w in self.work) + sum(a.tokens for a in self.admit)


def decide(view: View, limits: Limits, pace: Pace = UNPACED) -> Decision:
    """Return the next step for `view`. Pure: same arguments, same answer, nothing changed."""
    page_size = limits.page_size
    running = view.running
    available = view.available
    preempt: list[Request] = []
    dropped: dict[int, int] = {}
    work: list[Work] = []
    grow: list[Request] = []
    chunked: list[tuple[int, Request]] = []
    context = 0
    end = len(running)  # running[end:] is preempted
    for i, request in enumerate(running):
        if i >= end:
            break
        computed, known = request.computed, len(request.tokens)
        if known == request.limit:
            continue  # its last token is on the way
        if known - computed != 1:
            chunked.append((i, request))
            continue
        if computed % page_size == 0 and computed == len(request.pages) * page_size:
            while available == 0 and end > i:
                end -= 1
                available += _released(running[end], view.refcounts, dropped)
                preempt.append(running[end])
            if end == i:
                break  # it was the lowest rank itself
            available -= 1
            grow.append(request)
        work.append(request.next)
        context += known
    if not chunked and not view.waiting:
        return Decision(preempt, work, grow)
    decodes = len(work)
    prefill = Prefill(
        view,
        limits,
        Budget(
            tokens=limits.step_tokens - decodes,
            seconds=pace.seconds - pace.cost.seconds(StepShape(decodes, decodes, context, 0)),
            floor=limits.least_prefill,
            cost=pace.cost,
        ),
        available,
    )
    prefill.compute([request for i, request in chunked if i < end], admitting=not preempt)
    work += [Work(request, count) for request, count in prefill.chunks()]
    return Decision(preempt, work, grow, [Admission(*admission) for admission in prefill.admissions()])


def shape_of(work: Iterable[Work]) -> StepShape:
    """Shape of a step that has been scheduled."""
    requests = tokens = context = pairs = 0
    for request, count in work:
        requests += 1
        tokens += count
        if count == 1:
            context += request.scheduled
        else:
            pairs += chunk_pairs(request.scheduled - count, count)
    return StepShape(requests, tokens, context, pairs)


def _released(request: Request, refcounts: Sequence[int], dropped: dict[int, int]) -> int:
    """Pages that become free when `request` is preempted after those counted in `dropped`, which is updated."""
    count = 0
    for page in request.pages:
        dropped[page] = dropped.get(page, 0) + 1
        if dropped[page] == refcounts[page]:
            count += 1
    return count


@dataclass(frozen=True, slots=True)
class Applied:
    """A decision that has taken effect: the step's work, and whose device state changed."""

    work: list[Work]
    admitted: list[Request]
    preempted: list[tuple[Request, int]]
    """with the row that each had"""


class Scheduler:
    """The queues, in order of rank, and the pages they own. Single-threaded."""

    def __init__(self, limits: Limits, pool: BlockPool) -> None:
        self.limits = limits
        self.pool = pool
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.short: list[Request] = []
        """of the waiting, those in the fast lane, the shortest first"""
        self._planned: deque[list[Work]] = deque(maxlen=2)
        self._free_rows = list(range(limits.max_running - 1, -1, -1))

    def add(self, request: Request) -> None:
        """Queue a request."""
        if self.limits.fast_share:
            request.rest = self.uncached(request)
            if request.rest <= self.limits.fast_tokens:
                insort(self.short, request, key=_rest_waiting)
        insort(self.waiting, request, key=_rank)

    def uncached(self, request: Request) -> int:
        """Tokens of a request that does not run that no cached page holds."""
        return len(request.tokens) - len(self.pool.match(request.keys, request.tokens).pages) * self.limits.page_size

    def view(self) -> View:
        """The present state, for `decide`."""
        pool = self.pool
        if not self.waiting:
            return View(self.running, (), pool.available, pool.refcounts)
        return View(
            self.running, self._candidates(self.waiting), pool.available, pool.refcounts, self._candidates(self.short)
        )

    def _candidates(self, queue: list[Request]) -> Iterator[Candidate]:
        for request in queue:
            yield Candidate(request, self.pool.match(request.keys, request.tokens))

    def _leave_queue(self, request: Request) -> None:
        """Take a request from those who wait."""
        del self.waiting[_find(self.waiting, request, _rank)]
        if self.short and (at := _find(self.short, request, _rest_waiting)) >= 0:
            del self.short[at]

    def apply(self, decision: Decision) -> Applied:
        """Move requests and pages as decided. The order matters: preempted pages come back first; then cached pages are
        taken, before an allocation could evict them; then new pages are handed out."""
        preempted = [(request, self._preempt(request)) for request in decision.preempt]
        for admission in decision.admit:
            self.pool.acquire(admission.match.pages)
        for request in decision.grow:
            request.pages += self.pool.allocate(1)
        work = decision.work
        for request, count in work:
            request.scheduled += count  # as schedule(), for hundreds in a step
        if decision.admit:
            work = work + [self._admit(admission) for admission in decision.admit]
        self._planned.append(work)
        return Applied(work, [admission.request for admission in decision.admit], preempted)

    def extend(self, request: Request, tokens: int) -> int:
        """Give a running request pages for more tokens than it has, as far as there are some above the watermark;
        returns for how many."""
        page_size = self.limits.page_size
        known, held = len(request.tokens), len(request.pages)
        wanted = -(-(known + tokens) // page_size) - held
        taken = max(0, min(wanted, self.pool.available - self.limits.watermark))
        if taken:
            request.pages += self.pool.allocate(taken)
        return min(tokens, (held + taken) * page_size - known)

    def _admit(self, admission: Admission) -> Work:
        request, match, count = admission
        hits = len(match.pages)
        total = -(-len(request.tokens) // self.limits.page_size)
        self._leave_queue(request)
        pages = match.pages + self.pool.allocate(total - hits)
        request.admit(self._free_rows.pop(), pages, hits, hits * self.limits.page_size, match.uid)
        request.schedule(count)
        insort(self.running, request, key=_rank)
        return Work(request, count)

    def _preempt(self, request: Request) -> int:
        row = request.row
        self.running.remove(request)
        self._free_rows.append(row)
        self.pool.release(request.preempt())
        request.rest = len(request.tokens)
        insort(self.waiting, request, key=_rank)
        return row

    def in_flight(self) -> list[InFlight]:
        """What the two steps planned last compute: where steps overlap, the one that runs is among them."""
        return [
            InFlight(request.request_id, request.prompt_len, request.computed, count)
            for work in self._planned
            for request, count in work
            if request.state is RequestState.RUNNING
        ]

    def computed(self, request: Request, end: int) -> None:
        """A step has run that computed request's tokens up to `end`: publish the pages they filled."""
        request.started = True
        if not self.pool.prefix_cache:
            return
        full = end // self.limits.page_size
        while request.published < full:
            index = request.published
            request.parent_uid = self.pool.publish(
                request.pages[index], index, request.keys, request.tokens, request.parent_uid
            )
            request.published += 1

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request, whatever its state: it leaves its queue, its row and its pages.

        After an error nobody may start from what it computed, so its pages cannot be hit any more.
        """
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            self._free_rows.append(request.row)
        else:
            self._leave_queue(request)
        pages = request.finish(reason)
        if reason == "error":
            self.pool.retract(pages)
        self.pool.release(pages)

    def check(self) -> None:
        """Prove queues, rows and pages consistent. Raises RequestError or KVCacheError."""
        for request in (*self.running, *self.waiting):
            request.verify()
        rows = [request.row for request in self.running]
        if sorted(rows + self._free_rows) != list(range(self.limits.max_running)):
            raise RequestError(f"a row is lost or given twice: used {rows}, free {self._free_rows}")
        for queue, runs in ((self.running, True), (self.waiting, False)):
            for request in queue:
                if (request.state is RequestState.RUNNING) != runs or request.state is RequestState.FINISHED:
                    raise RequestError(f"{request.request_id} is {request.state.value} in the wrong queue")
            if any(a.rank >= b.rank for a, b in pairwise(queue)):
                raise RequestError("a queue is out of order")
        if not set(self.short) <= set(self.waiting) or len(set(self.short)) != len(self.short):
            raise RequestError("the fast lane holds somebody who does not wait")
        self.pool.check(request.pages for request in self.running)


def _rank(request: Request) -> tuple[int, int]:
    return request.rank


def _rest_waiting(request: Request) -> tuple[int, tuple[int, int]]:
    return request.rest, request.rank


def _find(queue: list[Request], request: Request, key: Callable[[Request], SupportsRichComparison]) -> int:
    """Index of a request in a queue ordered by `key`; −1 where it is not."""
    at = bisect_left(queue, key(request), key=key)
    return at if at < len(queue) and queue[at] is request else -1
