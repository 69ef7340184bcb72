"""First tokens: how long they take to come as steps are planned, what is predicted of them, and who is refused in time.

The engine runs on a fake model whose passes move the test's clock by what their tokens cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import ForwardBatch
from engine.config import EngineConfig
from engine.first_token import FirstTokens, Forecast, Line, forecast
from engine.sampling_params import SamplingParams
from engine.scheduler import Limits
from engine.step_time import UNPACED, Pace, StepCost
from engine.wire import Refused, Submit, pack_tokens

if TYPE_CHECKING:
    Make = Callable[..., Any]

CONSTANT_S, TOKEN_S = 0.004, 0.001
LIMITS = Limits(step_tokens=100, max_running=8, page_size=16, fast_share=0.5, fast_tokens=50)
PLAIN = Pace(cost=StepCost(constant=0.01, per_token=0.001))


class World:
    """An engine whose time is the test's: each pass costs a constant and its tokens."""

    def __init__(self, make_bench: Make, **config: Any) -> None:
        self.now = 0.0
        self.steps: list[float] = []
        self.bench = make_bench(pages=400, clock=lambda: self.now, **{"step_tokens": 128, **config})
        self.bench.model.before = self._pass
        self.first: dict[str, float] = {}
        self.submitted: dict[str, float] = {}
        self.refused: dict[str, Refused] = {}
        self._next = 0

    def _pass(self, batch: ForwardBatch) -> None:
        took = CONSTANT_S + TOKEN_S * batch.num_tokens
        self.now += took
        self.steps.append(took)

    def submit(self, name: str, tokens: int, max_tokens: int = 1, **params: Any) -> bool:
        """Submit a prompt that shares nothing with the others. False: refused."""
        self._next += 1
        self.submitted[name] = self.now
        prompt = [(self._next * 7 + i * (self._next % 50 + 1)) % 50 for i in range(tokens)]
        refused = self.bench.submit(name, prompt, max_tokens=max_tokens, ignore_eos=True, **params)
        if refused is not None:
            self.refused[name] = refused
        return refused is None

    def step(self) -> None:
        for said in self.bench.step():
            if said.tokens and said.request_id not in self.first:
                self.first[said.request_id] = self.now

    def drain(self) -> None:
        while self.bench.core.has_work():
            self.step()
        self.bench.core.check()

    def ttft(self, name: str) -> float:
        return self.first[name] - self.submitted[name]

    def learn(self) -> None:
        """Steps of several sizes, from which the engine knows what a token costs."""
        for i, tokens in enumerate((5, 40, 90, 200)):
            self.submit(f"learn-{i}", tokens, 4)
            self.drain()
        self.steps.clear()


def test_the_longest_step_is_kept_once_it_is_known_what_steps_cost(make_bench: Make) -> None:
    world = World(make_bench, max_step_ms=40)
    world.learn()
    world.submit("decodes", 5, 200)
    world.step()
    world.submit("long", 900)
    while "long" not in world.first:
        world.step()
    assert 0.038 < max(world.steps) <= 0.0401
    free = World(make_bench)
    free.learn()
    free.submit("long", 900)
    free.drain()
    assert max(free.steps) == pytest.approx(CONSTANT_S + 128 * TOKEN_S)


def test_a_short_prompt_does_not_wait_for_a_long_one(make_bench: Make) -> None:
    def short_beside_long(**config: Any) -> tuple[float, float]:
        world = World(make_bench, **config)
        world.learn()
        world.submit("long", 1500)
        world.submit("next", 600)
        world.step()
        world.submit("short", 12)
        world.drain()
        return world.ttft("short"), world.ttft("long")

    slow, alone = short_beside_long(fast_share=0.0)
    quick, beside = short_beside_long(fast_share=0.5)
    quickest, _ = short_beside_long(fast_share=0.5, max_step_ms=30)
    assert quick == pytest.approx(CONSTANT_S + 128 * TOKEN_S)  # its step is full, and the first that there is
    assert slow > 10 * quick
    assert quickest < quick / 3
    assert beside < alone * 1.02


def test_a_cached_prefix_makes_a_long_prompt_short(make_bench: Make) -> None:
    world = World(make_bench)
    shared = [i % 50 for i in range(800)]
    world.bench.submit("cold", shared, max_tokens=1)
    world.drain()
    world.submit("long", 1500)
    world.step()
    world.submitted["warm"] = world.now
    world.bench.submit("warm", [*shared, 1, 2, 3], max_tokens=1)
    world.step()
    assert world.ttft("warm") == pytest.approx(CONSTANT_S + 128 * TOKEN_S)
    assert world.bench.said["warm"].counters.cached == 800


@settings(max_examples=25, deadline=None)
@given(
    queue=st.lists(st.integers(1, 400), min_size=1, max_size=8),
    share=st.sampled_from([0.0, 0.5]),
    longest=st.sampled_from([0.0, 50.0]),
)
def test_first_tokens_come_as_predicted(make_bench: Make, queue: list[int], share: float, longest: float) -> None:
    """Each when it is the last to come: whoever comes later and overtakes it cannot be known."""
    world = World(make_bench, fast_share=share, fast_tokens=40, max_step_ms=longest, max_running=16)
    world.learn()
    for i, tokens in enumerate(queue):
        world.submit(f"{i}", tokens)
    world.submit("last", 100)
    core = world.bench.core
    request = core._live.pop("last")
    core._scheduler.finish(request, "abort")
    predicted = core._first_tokens.forecast(request)
    world.submit("last", 100)
    world.drain()
    step = CONSTANT_S + 128 * TOKEN_S
    assert abs(predicted.wait_s + predicted.own_s - world.ttft("last")) < 0.15 * world.ttft("last") + step / 2


def test_who_would_come_too_late_is_refused_with_a_time_to_come_back(make_bench: Make) -> None:
    world = World(make_bench, target_ttft_ms=1000, fast_share=0.0)
    world.learn()
    accepted = [world.submit(f"{i}", 300) for i in range(6)]
    assert accepted == [True, True, True, False, False, False]
    refused = world.refused["5"]
    assert refused.code == "overloaded"
    assert "too late for the target of 1000 ms" in refused.message
    # 900 tokens are before it, 300 its own: 1.24 s; what is too much has to be computed first
    assert refused.retry_after_s == pytest.approx(0.24, abs=0.05)
    began = world.now
    while world.now < began + refused.retry_after_s:
        world.step()
    assert world.submit("again", 300)
    world.drain()
    assert max(world.ttft(name) for name in world.first if not name.startswith("learn")) < 1.06
    assert world.bench.core.metrics.refused == {"overloaded": 3}


def test_short_prompts_are_judged_by_their_lane(make_bench: Make) -> None:
    world = World(make_bench, target_ttft_ms=500, fast_tokens=50)
    world.learn()
    world.submit("first", 400)
    assert world.submit("short", 20)
    assert not world.submit("long", 300)
    world.drain()
    assert world.ttft("short") < 0.2


def test_nobody_is_refused_by_an_idle_engine_or_before_it_knows_anything(make_bench: Make) -> None:
    world = World(make_bench, target_ttft_ms=1)
    assert world.submit("a", 500) and world.submit("b", 500)
    world.drain()
    assert world.submit("alone", 1000)
    assert not world.submit("too late", 10)
    world.drain()


def test_more_answers_to_the_same_request_are_taken_with_the_first(make_bench: Make) -> None:
    world = World(make_bench, target_ttft_ms=100)
    world.learn()
    prompt, params = pack_tokens(range(50)), SamplingParams(max_tokens=1)
    core = world.bench.core
    assert core.submit(Submit(request_id="r", prompt=prompt, params=params)) is None
    assert core.submit(Submit(request_id="r#1", prompt=prompt, params=params, follows=True)) is None
    refused = core.submit(Submit(request_id="other", prompt=pack_tokens(range(1, 51)), params=params))
    assert refused is not None and refused.code == "overloaded"
    world.drain()


def test_a_queue_for_rows_is_as_long_as_answers_take(make_bench: Make) -> None:
    world = World(make_bench, target_ttft_ms=2000, max_running=2, fast_share=0.0)
    world.learn()
    for i in range(8):
        assert world.submit(f"{i}", 10, 400), "how long answers take is not known yet"
    for _ in range(1000):
        world.step()
    assert world.bench.core.metrics.finished["length"] == 8  # four to learn from, and two pairs
    assert not world.submit("late", 10, 400)
    # two of the fourth pair wait before it: three ends at the measured rate, less what the target allows
    ends = world.bench.core._first_tokens.departure_s
    assert 0.7 < ends < 1.3  # a pair of answers takes 2.4 s
    assert world.refused["late"].retry_after_s == pytest.approx(3 * ends - 2.0, abs=0.1)
    world.bench.core.abort("6")
    world.bench.core.abort("7")
    while world.bench.core._scheduler.waiting:
        world.step()
    world.drain()
    assert world.submit("now", 10, 400)


def test_the_wait_of_the_last_is_told_in_the_snapshot(make_bench: Make) -> None:
    world = World(make_bench, fast_share=0.0)
    core = world.bench.core
    assert core.snapshot().wait_ms == 0.0
    world.learn()
    assert core.snapshot().wait_ms == 0.0
    world.submit("a", 640)
    assert core.snapshot().wait_ms == pytest.approx(1e3 * 5 * (CONSTANT_S + 128 * TOKEN_S), rel=0.05)
    world.step()
    assert core.snapshot().wait_ms == pytest.approx(1e3 * 4 * (CONSTANT_S + 128 * TOKEN_S), rel=0.05)
    world.drain()


@pytest.mark.parametrize("limit", ["max_step_ms", "target_ttft_ms"])
def test_a_negative_limit_is_refused(limit: str) -> None:
    with pytest.raises(ValueError, match=f"{limit} -1 must not be negative"):
        FirstTokens(EngineConfig(**{limit: -1}), None)  # type: ignore[arg-type]


# -- the forecast by itself -------------------------------------------------------------------------


def test_alone_it_takes_its_own_steps() -> None:
    assert forecast(Line(), 250, LIMITS, PLAIN, 9.0) == Forecast(0.0, pytest.approx(0.28))


def test_decodes_slow_every_step_and_take_their_part_of_it() -> None:
    found = forecast(Line(decodes=20), 160, LIMITS, PLAIN, 0.0)
    assert found == Forecast(0.0, pytest.approx(2 * (0.01 + 0.1)))


def test_the_longest_step_cuts_prompts_into_more_steps() -> None:
    paced = forecast(Line(), 100, LIMITS, Pace(0.0305, PLAIN.cost), 0.0)
    assert paced.own_s == pytest.approx(5 * 0.03)


def test_tokens_before_it_and_missing_places_make_it_wait() -> None:
    found = forecast(Line(tokens=100, places=3), 60, LIMITS, PLAIN, 2.0)
    assert found == Forecast(pytest.approx(0.11 + 6.0), pytest.approx(0.07))


def test_in_the_fast_lane_only_shorter_ones_are_before_it() -> None:
    found = forecast(Line(tokens=10_000, shorter=25), 25, LIMITS, PLAIN, 0.0)
    assert found.wait_s + found.own_s == pytest.approx(0.11)


def test_a_prompt_that_is_too_long_by_itself_may_wait_half_of_the_target() -> None:
    assert Forecast(0.6, 0.5).excess(1.0) == pytest.approx(0.1)
    assert Forecast(0.6, 5.0).excess(1.0) == pytest.approx(0.1)
    assert Forecast(0.4, 5.0).excess(1.0) < 0


@settings(max_examples=50)
@given(st.integers(0, 5000), st.integers(1, 3000), st.integers(1, 500))
def test_more_before_it_never_makes_it_sooner(before: int, more: int, rest: int) -> None:
    few = forecast(Line(tokens=before), rest, LIMITS, PLAIN, 0.0)
    many = forecast(Line(tokens=before + more), rest, LIMITS, PLAIN, 0.0)
    assert 0 <= few.wait_s <= many.wait_s and few.own_s == many.own_s > 0
    assert forecast(Line(tokens=before), rest, LIMITS, UNPACED, 0.0) == Forecast(0.0, 0.0)
