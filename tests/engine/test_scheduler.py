"""decide() as a pure function, and what any sequence of steps keeps true."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv_cache import BlockPool, Match
from engine.request import Request, RequestError, RequestState
from engine.sampling_params import SamplingParams
from engine.scheduler import Candidate, Decision, Limits, Scheduler, View, decide, shape_of
from engine.step_time import UNPACED, Pace, StepCost, StepShape

PAGE = 4


def make(name: str, prompt: int, arrival: int, *, priority: int = 0, output: int = 8) -> Request:
    return Request(
        name,
        array("i", range(prompt)),
        SamplingParams(max_tokens=output),
        limit=prompt + output,
        arrival=arrival,
        priority=priority,
    )


def running(request: Request, row: int, pages: list[int], computed: int) -> Request:
    request.admit(row, pages, 0, 0, 0)
    request.computed = request.scheduled = computed
    return request


def plan(decision: Decision) -> tuple[list[str], list[tuple[str, int]], list[tuple[str, int]]]:
    return (
        [r.request_id for r in decision.preempt],
        [(w.request.request_id, w.tokens) for w in decision.work],
        [(a.request.request_id, a.tokens) for a in decision.admit],
    )


def waiting(*requests: Request) -> list[Candidate]:
    return [Candidate(request, Match([], 0)) for request in requests]


LIMITS = Limits(step_tokens=16, max_running=4, page_size=PAGE)


def test_decodes_come_first_then_chunks_then_admissions() -> None:
    chunk = running(make("chunk", 20, 0), 0, list(range(5)), 12)
    decode = running(make("decode", 5, 1), 1, [5, 6], 4)
    view = View([chunk, decode], waiting(make("new", 12, 2), make("last", 3, 3)), 20, [1] * 7 + [0] * 20)
    assert plan(decide(view, LIMITS)) == ([], [("decode", 1), ("chunk", 8)], [("new", 7)])


def test_a_decode_at_a_page_boundary_takes_a_page() -> None:
    a = running(make("a", 5, 0), 0, [0], 4)
    view = View([a], waiting(make("b", 4, 1)), 1, [1, 0])
    assert plan(decide(view, LIMITS)) == ([], [("a", 1)], [])
    view = View([a], waiting(make("b", 4, 1)), 2, [1, 0, 0])
    assert plan(decide(view, LIMITS)) == ([], [("a", 1)], [("b", 4)])


def test_the_lowest_rank_is_preempted_and_nobody_is_admitted_in_that_step() -> None:
    a = running(make("a", 5, 0), 0, [0], 4)
    b = running(make("b", 5, 1), 1, [1], 4)
    c = running(make("c", 4, 2), 2, [2], 0)
    view = View([a, b, c], waiting(make("d", 1, 3)), 0, [1, 1, 1])
    # a takes the page of c; b finds none left and is the lowest rank itself
    assert plan(decide(view, LIMITS)) == (["c", "b"], [("a", 1)], [])


def test_preempting_a_request_that_shares_its_pages_frees_only_its_own() -> None:
    a = running(make("a", 9, 0), 0, [0, 1], 8)
    b = running(make("b", 9, 1), 1, [0, 1, 2], 5)
    c = running(make("c", 9, 2), 2, [0, 1], 3)
    view = View([a, b, c], [], 0, [3, 3, 1])
    assert plan(decide(view, LIMITS)) == (["c", "b"], [("a", 1)], [])


def test_priority_decides_before_arrival() -> None:
    scheduler = Scheduler(LIMITS, BlockPool(64, PAGE))
    for name, arrival, priority in (("late", 0, 5), ("first", 1, 0), ("second", 2, 0), ("urgent", 3, -1)):
        scheduler.add(make(name, 8, arrival, priority=priority))
    decision = decide(scheduler.view(), LIMITS)
    assert plan(decision)[2] == [("urgent", 8), ("first", 8)]


def test_the_head_of_the_queue_is_never_overtaken() -> None:
    a = running(make("a", 6, 0), 0, [0, 1], 5)
    view = View([a], waiting(make("big", 40, 1), make("small", 1, 2)), 9, [1, 1] + [0] * 9)
    assert plan(decide(view, LIMITS))[2] == []


def test_a_prompt_is_admitted_only_whole_and_above_the_watermark() -> None:
    limits = Limits(step_tokens=16, max_running=4, page_size=PAGE, watermark=2)
    a = running(make("a", 6, 0), 0, [0, 1], 5)
    view = View([a], waiting(make("b", 40, 1)), 11, [1, 1] + [0] * 11)
    assert plan(decide(view, limits))[2] == []
    view = View([a], waiting(make("b", 40, 1)), 12, [1, 1] + [0] * 12)
    assert plan(decide(view, limits))[2] == [("b", 15)]
    # with nothing else running, the watermark would protect nobody
    view = View([], waiting(make("b", 40, 1)), 10, [0] * 10)
    assert plan(decide(view, limits))[2] == [("b", 16)]


def test_cached_pages_count_against_the_available_ones_only_when_nobody_owns_them() -> None:
    candidates = [
        Candidate(make("a", 9, 0), Match([0, 1], 1)),
        Candidate(make("b", 9, 1), Match([0, 1], 1)),
        Candidate(make("c", 9, 2), Match([0, 1], 1)),
    ]
    # a takes both cached pages and a new one; b shares them and takes one; for c there is none
    assert plan(decide(View([], candidates, 4, [0] * 4), LIMITS))[2] == [("a", 1), ("b", 1)]


def test_rows_bound_admissions() -> None:
    view = View([], waiting(*(make(str(i), 1, i) for i in range(9))), 64, [0] * 64)
    assert len(decide(view, LIMITS).admit) == 4


def test_the_queue_is_read_only_as_far_as_there_is_room() -> None:
    read: list[str] = []

    def lazily() -> object:
        for i in range(9):
            read.append(str(i))
            yield Candidate(make(str(i), 8, i), Match([], 0))

    assert len(decide(View([], lazily(), 64, [0] * 64), LIMITS).admit) == 2  # type: ignore[arg-type]
    assert read == ["0", "1"]


FAST = Limits(step_tokens=16, max_running=4, page_size=PAGE, fast_share=0.5, fast_tokens=8)


def fast_view(chunked: list[Request], line: list[Request], short: list[Request], available: int = 64) -> View:
    return View(chunked, waiting(*line), available, [1] * 16 + [0] * 64, waiting(*short))


def test_short_prompts_get_a_share_of_the_step_the_shortest_first() -> None:
    long = running(make("long", 40, 0), 0, list(range(10)), 4)
    line = [make("next", 40, 1), make("six", 6, 2), make("three", 3, 3)]
    # three and six take the lane of 8, six as far as it goes; the rest is the long one's, by rank
    decision = decide(fast_view([long], line, [line[2], line[1]]), FAST)
    assert plan(decision) == ([], [("long", 8)], [("three", 3), ("six", 5)])


def test_what_the_fast_lane_does_not_need_goes_to_the_others_and_the_other_way_round() -> None:
    long = running(make("long", 40, 0), 0, list(range(10)), 4)
    line = [make("three", 3, 1)]
    assert plan(decide(fast_view([long], line, line), FAST)) == ([], [("long", 13)], [("three", 3)])
    line = [make("six", 6, 1), make("eight", 8, 2)]
    assert plan(decide(fast_view([], line, line), FAST)) == ([], [], [("six", 6), ("eight", 8)])


def test_the_end_of_a_running_prompt_is_in_the_fast_lane_too() -> None:
    long = running(make("long", 40, 0), 0, list(range(10)), 4)
    ends = running(make("ends", 12, 1), 1, [10, 11, 12], 7)
    assert plan(decide(fast_view([long, ends], [], []), FAST)) == ([], [("ends", 5), ("long", 11)], [])


def test_a_prefix_hit_with_a_short_rest_costs_what_is_left() -> None:
    long = running(make("long", 40, 0), 0, list(range(10)), 4)
    hit = Candidate(make("hit", 13, 2), Match([13, 14, 15], 3))
    view = View([long], [*waiting(make("next", 40, 1)), hit], 64, [1] * 16 + [0] * 64, [hit])
    assert plan(decide(view, FAST)) == ([], [("long", 15)], [("hit", 1)])


def test_one_whose_cached_prefix_has_gone_is_no_longer_short() -> None:
    long = running(make("long", 40, 0), 0, list(range(10)), 4)
    was_hit = make("gone", 13, 2)
    assert plan(decide(fast_view([long], [make("next", 40, 1), was_hit], [was_hit]), FAST))[2] == []


def test_nobody_overtakes_a_first_that_finds_no_place_or_whose_place_they_would_take() -> None:
    long = running(make("long", 40, 0), 0, list(range(10)), 4)
    line = [make("next", 40, 1), make("three", 3, 2)]
    # next needs ten pages, three needs one
    assert plan(decide(fast_view([long], line, line[1:], 9), FAST))[2] == []
    assert plan(decide(fast_view([long], line, line[1:], 10), FAST))[2] == []
    assert plan(decide(fast_view([long], line, line[1:], 11), FAST))[2] == [("three", 3)]
    rows = [running(make(f"{i}", 40, i), i, list(range(10)), 4) for i in range(3)]
    assert plan(decide(fast_view(rows, [make("next", 40, 3), line[1]], line[1:]), FAST))[2] == []


def test_the_time_of_a_step_bounds_its_prompts_but_never_stops_them() -> None:
    cost = StepCost(constant=2.0, per_request=1.0, per_token=1.0, per_context=0.5, per_pair=0.0)
    long = running(make("long", 40, 0), 0, list(range(10)), 4)
    decode = running(make("decode", 5, 1), 1, [10, 11], 4)
    limits = Limits(step_tokens=16, max_running=4, page_size=PAGE, least_prefill=2)
    view = View([long, decode], [], 64, [1] * 16 + [0] * 64)
    # 2 + (1 + 1 + 5 · 0.5) for the decode, 1 for the chunk: 7.5 before its first token
    for seconds, count in ((13.5, 6), (10.4, 2), (9.5, 2), (0.1, 2), (100.0, 15)):
        assert plan(decide(view, limits, Pace(seconds, cost)))[1] == [("decode", 1), ("long", count)], seconds


def test_the_fast_lane_takes_its_share_of_the_time_too() -> None:
    cost = StepCost(per_token=1.0)
    limits = Limits(step_tokens=64, max_running=4, page_size=PAGE, fast_share=0.5, fast_tokens=8, least_prefill=1)
    long = running(make("long", 40, 0), 0, list(range(10)), 4)
    line = [make("seven", 7, 1), make("eight", 8, 2)]
    decision = decide(fast_view([long], line, line), limits, Pace(20.0, cost))
    assert plan(decision) == ([], [("long", 10)], [("seven", 7), ("eight", 3)])


def test_the_shape_of_a_step() -> None:
    scheduler = Scheduler(LIMITS, BlockPool(64, PAGE))
    scheduler.running = [
        running(make("chunk", 20, 0), 0, list(range(5)), 12),
        running(make("decode", 5, 1), 1, [5, 6], 4),
    ]
    work = scheduler.apply(decide(scheduler.view(), LIMITS)).work
    assert shape_of(work) == StepShape(2, 9, 5, sum(range(13, 21)))


@pytest.mark.parametrize(("rows", "tokens"), [(0, 4), (5, 4)])
def test_every_decode_must_fit_into_a_step(rows: int, tokens: int) -> None:
    with pytest.raises(ValueError, match="between 1 and step_tokens"):
        Limits(step_tokens=tokens, max_running=rows, page_size=PAGE)


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_the_fast_lane_leaves_something_to_the_others(share: float) -> None:
    with pytest.raises(ValueError, match="fast_share"):
        Limits(step_tokens=4, max_running=4, page_size=PAGE, fast_share=share)


def test_check_sees_lost_rows_and_misplaced_requests() -> None:
    scheduler = Scheduler(LIMITS, BlockPool(8, PAGE))
    scheduler.add(make("a", 4, 0))
    scheduler.apply(decide(scheduler.view(), LIMITS))
    scheduler.check()
    scheduler.waiting.append(scheduler.running[0])
    with pytest.raises(RequestError, match="wrong queue"):
        scheduler.check()
    scheduler.waiting.clear()
    scheduler.running[0].row = 3
    with pytest.raises(RequestError, match="lost or given twice"):
        scheduler.check()
    scheduler.running[0].row = 0
    scheduler.add(make("c", 4, 2))
    scheduler.waiting.append(make("b", 4, 1))
    with pytest.raises(RequestError, match="out of order"):
        scheduler.check()


@dataclass
class Arrival:
    at: int
    """step"""
    prompt: list[int]
    output: int
    priority: int
    abort_at: int | None
    """step"""


def next_token(tokens: Sequence[int]) -> int:
    return (sum(tokens[-3:]) * 7 + len(tokens)) % 5


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Limits, Pace, int, list[Arrival]]:
    pages = draw(st.integers(3, 24))
    step_tokens = draw(st.integers(1, 24))
    max_running = draw(st.integers(1, min(6, step_tokens)))
    limits = Limits(
        step_tokens=step_tokens,
        max_running=max_running,
        page_size=PAGE,
        watermark=draw(st.integers(0, 2)),
        fast_share=draw(st.sampled_from([0.0, 0.25, 0.5, 0.9])),
        fast_tokens=draw(st.integers(1, 12)),
        least_prefill=draw(st.integers(1, 4)),
    )
    pace = draw(st.sampled_from([UNPACED, Pace(12.0, StepCost(1.0, 0.5, 1.0, 0.05, 0.1))]))
    prefixes = draw(st.lists(st.lists(st.integers(0, 4), max_size=20), min_size=1, max_size=3))
    arrivals = []
    for _ in range(draw(st.integers(1, 24))):
        output = draw(st.integers(1, 10))
        longest = pages * PAGE - output
        if longest < 1:
            continue
        prompt = (draw(st.sampled_from(prefixes)) + draw(st.lists(st.integers(0, 4), min_size=1, max_size=6)))[
            -longest:
        ]
        at = draw(st.integers(0, 30))
        abort_at = draw(st.one_of(st.none(), st.integers(at, at + 30)))
        arrivals.append(Arrival(at, prompt, output, draw(st.integers(0, 2)), abort_at))
    return limits, pace, pages, arrivals


def image(scheduler: Scheduler) -> object:
    """Everything a decision could change."""
    requests = [
        (r.request_id, r.state, r.cached, r.computed, r.scheduled, list(r.pages), list(r.tokens), r.row, r.epoch)
        for r in (*scheduler.running, *scheduler.waiting)
    ]
    return requests, list(scheduler.pool.refcounts), scheduler.pool.available, scheduler.pool.cached


def prove_fair_and_in_time(scheduler: Scheduler, decision: Decision, limits: Limits, pace: Pace) -> None:
    """The first prompt by rank advances in every step, and only the least prefill may make a step too long."""
    preempted = [r.request_id for r in decision.preempt]
    pending = [r for r in scheduler.running if len(r.tokens) - r.computed > 1 and r.request_id not in preempted]
    advancing = {work.request.request_id: work.tokens for work in decision.work}
    if pending and sum(tokens == 1 for tokens in advancing.values()) < limits.step_tokens:
        assert advancing.get(pending[0].request_id, 0) > 0, "the first prompt does not advance"
    spent = pace.cost.constant
    for request, tokens in decision.work:
        alone = pace.cost.per_request + pace.cost.per_token + pace.cost.per_context * (request.computed + 1)
        decode = len(request.tokens) - request.computed == 1
        spent += alone if decode else pace.cost.chunk(request.computed, tokens)
    for _, match, tokens in decision.admit:
        spent += pace.cost.chunk(len(match.pages) * PAGE, tokens)
    decodes = sum(len(work.request.tokens) - work.request.computed == 1 for work in decision.work)
    prefill = decision.tokens - decodes
    longest = max([len(r.tokens) for r in (*scheduler.running, *scheduler.waiting)], default=0)
    beyond = limits.least_prefill * (pace.cost.per_request + pace.cost.chunk(longest, 1))
    assert prefill <= limits.least_prefill or spent <= pace.seconds + beyond + 1e-9, "a step that takes too long"


def run_world(
    limits: Limits, pages: int, arrivals: list[Arrival], pace: Pace = UNPACED
) -> tuple[dict[str, Request], int, int]:
    """Drive scheduler and pool to the end with a fake model; returns the requests, the steps and the preemptions."""
    scheduler = Scheduler(limits, BlockPool(pages, PAGE))
    requests: dict[str, Request] = {}
    steps = preemptions = 0
    # Each request needs at most this many steps once it is the first in rank; another one's arrival above it can make
    # it start again.
    share = limits.step_tokens - limits.max_running + 1
    if pace is not UNPACED:
        share = min(share, limits.least_prefill)
    share -= int(share * limits.fast_share)
    bound = 62 + 3 * sum(-(-(len(a.prompt) + a.output) // share) + a.output + 1 for a in arrivals)
    while steps < bound:
        for i, a in enumerate(arrivals):
            if a.at == steps:
                request = Request(
                    str(i),
                    array("i", a.prompt),
                    SamplingParams(max_tokens=a.output),
                    limit=len(a.prompt) + a.output,
                    arrival=i,
                    priority=a.priority,
                )
                requests[str(i)] = request
                scheduler.add(request)
            if a.abort_at == steps and requests[str(i)].state is not RequestState.FINISHED:
                scheduler.finish(requests[str(i)], "abort")
        if steps > 60 and not scheduler.running and not scheduler.waiting:
            break
        before = image(scheduler)
        decision = decide(scheduler.view(), limits, pace)
        assert image(scheduler) == before, "deciding changed something"
        assert plan(decision) == plan(decide(scheduler.view(), limits, pace))
        prove_fair_and_in_time(scheduler, decision, limits, pace)
        assert decision.tokens <= limits.step_tokens
        assert decision.tokens > 0 or not (scheduler.running or scheduler.waiting), "a step that does nothing"
        top = scheduler.running[0] if scheduler.running else None
        assert top not in decision.preempt
        applied = scheduler.apply(decision)
        scheduler.check()
        preemptions += len(applied.preempted)
        assert len({id(w.request) for w in applied.work}) == len(applied.work)
        for request, _ in applied.work:
            request.dispatch()
            scheduler.computed(request, request.computed)
            if request.computed == len(request.tokens):
                request.tokens.append(next_token(request.tokens))
                if len(request.tokens) == request.limit:
                    scheduler.finish(request, "length")
        scheduler.check()
        steps += 1
    assert not scheduler.running and not scheduler.waiting, "starved"
    assert scheduler.pool.owned == 0
    return requests, steps, preemptions


@settings(max_examples=60)
@given(worlds())
def test_any_arrivals_aborts_priorities_and_sizes(world: tuple[Limits, Pace, int, list[Arrival]]) -> None:
    limits, pace, pages, arrivals = world
    requests, _, _ = run_world(limits, pages, arrivals, pace)
    for i, arrival in enumerate(arrivals):
        request = requests[str(i)]
        alone = list(arrival.prompt)
        while len(alone) < len(arrival.prompt) + arrival.output:
            alone.append(next_token(alone))
        generated = len(request.tokens)
        assert list(request.tokens) == alone[:generated]
        assert generated == len(alone) or (request.finish_reason == "abort" and arrival.abort_at is not None)


def test_a_small_pool_preempts_and_still_finishes_all() -> None:
    limits = Limits(step_tokens=16, max_running=6, page_size=PAGE, watermark=1)
    arrivals = [Arrival(0, [i % 5] * 6, 30, 0, None) for i in range(12)]
    requests, _, preemptions = run_world(limits, 12, arrivals)
    assert preemptions > 0
    assert all(r.finish_reason == "length" and r.generated == 30 for r in requests.values())


def test_two_requests_do_not_take_turns_at_preempting() -> None:
    limits = Limits(step_tokens=16, max_running=2, page_size=PAGE, watermark=1)
    arrivals = [Arrival(0, [1] * 8, 28, 0, None), Arrival(0, [2] * 8, 28, 0, None)]
    _, _, preemptions = run_world(limits, 10, arrivals)
    assert preemptions == 1
