"""What the next step computes. `decide` is a pure function of plain data; `Scheduler` holds the queues and applies a
decision.

One token budget per step. Running requests come first: those that need one token (decode), then those whose prompt is
still being computed, in chunks. What is left of the budget admits waiting requests strictly in order of rank (priority,
then arrival), whole or in chunks. A request is admitted only when pages for all of its tokens can be set aside at once,
above a watermark that is left for the growth of those already running; so an admitted prompt never stalls half-way.

Nobody starves. Waiting requests are never overtaken by a lower rank. When a running request needs a page and none is
left, the running request of the lowest rank is preempted, so the first of all is never preempted and, because one
sequence of the largest size fits into the pool, always finishes; then there is another first. A step that preempts
admits nobody, and a preempted request needs all of its pages back at once, so two requests cannot take turns at
throwing each other out.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from engine.kv_cache import BlockPool, Match
from engine.request import Request, RequestError, RequestState
from engine.wire import FinishReason


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

    def __post_init__(self) -> None:
        if not 1 <= self.max_running <= self.step_tokens:
            raise ValueError(f"max_running {self.max_running} must be between 1 and step_tokens {self.step_tokens}")


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


class Work(NamedTuple):
    """A request and how many of its next tokens are computed."""

    request: Request
    tokens: int


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
    admit: list[Admission] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens the step computes."""
        return sum(w.tokens for w in self.work) + sum(a.tokens for a in self.admit)


def decide(view: View, limits: Limits) -> Decision:
    """Return the next step for `view`. Pure: same arguments, same answer, nothing changed."""
    page_size = limits.page_size
    running = view.running
    available = view.available
    preempt: list[Request] = []
    dropped: dict[int, int] = {}
    work: list[Work] = []
    chunked: list[tuple[int, Request]] = []
    end = len(running)  # running[end:] is preempted
    for i, request in enumerate(running):
        if i >= end:
            break
        if request.full:
            continue
        computed = request.computed
        if len(request.tokens) - computed != 1:
            chunked.append((i, request))
            continue
        if computed == len(request.pages) * page_size:
            while available == 0 and end > i:
                end -= 1
                available += _released(running[end], view.refcounts, dropped)
                preempt.append(running[end])
            if end == i:
                break  # it was the lowest rank itself
            available -= 1
        work.append(Work(request, 1))
    budget = limits.step_tokens - len(work)
    for i, request in chunked:
        if budget == 0 or i >= end:
            break
        count = min(len(request.tokens) - request.computed, budget)
        work.append(Work(request, count))
        budget -= count
    if preempt:
        return Decision(preempt, work)
    return Decision(preempt, work, _admissions(view, limits, budget, available))


def _admissions(view: View, limits: Limits, budget: int, available: int) -> list[Admission]:
    admit: list[Admission] = []
    rows = limits.max_running - len(view.running)
    if budget <= 0 or rows <= 0:
        return admit
    taken: set[int] = set()
    for request, match in view.waiting:
        # Cached pages that nobody owns leave the available ones just as new pages do.
        idle = {page for page in match.pages if view.refcounts[page] == 0} - taken
        length = len(request.tokens)
        need = -(-length // limits.page_size) - len(match.pages) + len(idle)
        reserve = limits.watermark if view.running or admit else 0
        if need + reserve > available:
            break  # nobody overtakes
        count = min(length - len(match.pages) * limits.page_size, budget)
        admit.append(Admission(request, match, count))
        taken |= idle
        available -= need
        budget -= count
        rows -= 1
        if budget == 0 or rows == 0:
            break
    return admit


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
    grown: list[Request]
    """running requests whose table got one more page"""
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
        self._free_rows = list(range(limits.max_running - 1, -1, -1))

    def add(self, request: Request) -> None:
        """Queue a request."""
        insort(self.waiting, request, key=_rank)

    def view(self) -> View:
        """The present state, for `decide`."""
        return View(self.running, self._candidates(), self.pool.available, self.pool.refcounts)

    def _candidates(self) -> Iterator[Candidate]:
        for request in self.waiting:
            yield Candidate(request, self.pool.match(request.keys, request.tokens))

    def apply(self, decision: Decision) -> Applied:
        """Move requests and pages as decided. The order matters: preempted pages come back first; then cached pages are
        taken, before an allocation could evict them; then new pages are handed out."""
        preempted = [(request, self._preempt(request)) for request in decision.preempt]
        for admission in decision.admit:
            self.pool.acquire(admission.match.pages)
        grown = []
        page_size = self.limits.page_size
        for request, count in decision.work:
            if request.computed + count > len(request.pages) * page_size:
                request.pages += self.pool.allocate(1)
                grown.append(request)
            request.schedule(count)
        work = decision.work
        if decision.admit:
            work = work + [self._admit(admission) for admission in decision.admit]
        return Applied(work, grown, [admission.request for admission in decision.admit], preempted)

    def _admit(self, admission: Admission) -> Work:
        request, match, count = admission
        hits = len(match.pages)
        total = -(-len(request.tokens) // self.limits.page_size)
        self.waiting.remove(request)
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
        insort(self.waiting, request, key=_rank)
        return row

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
            self.waiting.remove(request)
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
        self.pool.check(request.pages for request in self.running)


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
