"""The step-time model: what it learns from which steps, and how much of a prompt it lets into the time that is left."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.step_time import FREE, WHOLE, WINDOW, StepCost, StepShape, StepTimes, chunk_pairs, fit

TRUE = StepCost(constant=2e-3, per_request=5e-5, per_token=4e-4, per_context=3e-8, per_pair=2e-8)


def mixed(seed: int, count: int) -> list[StepShape]:
    """Decodes and mixed steps as they come."""
    draw = random.Random(seed)
    shapes = []
    for _ in range(count):
        decodes = draw.randint(0, 32)
        shape = StepShape(decodes, decodes, decodes * draw.randint(10, 2000), 0)
        if draw.random() < 0.4 or not decodes:
            chunk, position = draw.randint(2, 240), draw.randint(0, 3000)
            pairs = chunk_pairs(position, chunk)
            shape = StepShape(decodes + 1, decodes + chunk, shape.context, pairs)
        shapes.append(shape)
    return shapes


def error(cost: StepCost, shape: StepShape) -> float:
    return abs(cost.seconds(shape) / TRUE.seconds(shape) - 1)


@settings(max_examples=25)
@given(st.integers(0, 2**32))
def test_it_finds_what_steps_cost(seed: int) -> None:
    times = StepTimes()
    for shape in mixed(seed, 300):
        times.observe(shape, TRUE.seconds(shape))
    assert max(error(times.cost, shape) for shape in mixed(seed + 1, 50)) < 0.01


@settings(max_examples=25)
@given(st.integers(0, 2**32))
def test_steps_that_something_else_disturbed_hardly_count(seed: int) -> None:
    times, noise = StepTimes(), random.Random(seed)
    for shape in mixed(seed, 600):
        disturbed = noise.uniform(2, 20) if noise.random() < 0.05 else noise.gauss(1, 0.02)
        times.observe(shape, TRUE.seconds(shape) * disturbed)
    errors = [error(times.cost, shape) for shape in mixed(seed + 1, 50)]
    assert sum(errors) / len(errors) < 0.08


def test_a_thousand_decodes_do_not_make_it_forget_what_a_chunk_costs() -> None:
    times = StepTimes()
    for shape in mixed(1, 200):
        times.observe(shape, TRUE.seconds(shape))
    for i in range(1000):
        shape = StepShape(1, 1, i, 0)
        times.observe(shape, TRUE.seconds(shape))
    assert error(times.cost, StepShape(1, 200, 0, chunk_pairs(1000, 200))) < 0.02


def test_it_follows_a_machine_that_becomes_slower() -> None:
    times = StepTimes()
    for factor in (1, 3):
        for shape in mixed(factor, 2000):
            times.observe(shape, TRUE.seconds(shape) * factor)
    shape = StepShape(1, 200, 0, chunk_pairs(1000, 200))
    assert times.cost.seconds(shape) / TRUE.seconds(shape) == pytest.approx(3, rel=0.05)


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 300), st.integers(1, 3000), st.integers(0, 10**6), st.integers(0, 10**8),
            st.floats(1e-6, 1e3),
        ),
        max_size=60,
    )
)  # fmt: skip
def test_whatever_was_seen_no_cost_is_negative_or_infinite(steps: list[tuple[int, int, int, int, float]]) -> None:
    shapes = np.array([step[:4] for step in steps], dtype=np.float64).reshape(-1, 4)
    cost = fit(shapes, np.array([step[4] for step in steps]), np.arange(len(steps), dtype=np.float64))
    found = [cost.constant, cost.per_request, cost.per_token, cost.per_context, cost.per_pair]
    assert all(0 <= value < math.inf for value in found)
    assert (cost == FREE) == (not steps)


def test_a_step_without_a_time_teaches_nothing_and_the_memory_is_bounded() -> None:
    times = StepTimes()
    for seconds in (0.0, -1.0, math.inf, math.nan):
        times.observe(StepShape(1, 1, 1, 0), seconds)
    assert (times.cost, times.seen) == (FREE, 0)
    for i in range(3 * WINDOW):
        times.observe(StepShape(1, 1, 1, 0), 1.0 if i < WINDOW else 2.0)
    assert times.cost.seconds(StepShape(1, 1, 1, 0)) == pytest.approx(2.0)


def test_where_steps_overlap_one_begins_when_the_one_before_is_done() -> None:
    times, shape = StepTimes(), StepShape(1, 1, 0, 0)
    times.finished(shape, 10.0, 11.0)
    assert times.cost.seconds(shape) == pytest.approx(1.0)
    for i in range(3):  # launched while the one before ran
        times.finished(shape, 10.5 + i, 12.0 + i)
    assert times.cost.seconds(shape) == pytest.approx(1.0)


costs = st.builds(
    StepCost,
    constant=st.floats(0, 0.1),
    per_request=st.floats(0, 0.01),
    per_token=st.floats(1e-6, 0.01),
    per_context=st.floats(0, 1e-5),
    per_pair=st.floats(0, 1e-5),
)


@settings(max_examples=50)
@given(costs, st.floats(0, 1), st.integers(0, 100_000))
def test_room_is_the_most_that_fits(cost: StepCost, seconds: float, position: int) -> None:
    count = cost.room(seconds, position)
    assert count >= 0
    if count:
        assert cost.chunk(position, count) <= seconds * (1 + 1e-9)
    assert cost.chunk(position, count + 1) > seconds * (1 - 1e-9)


def test_everything_fits_where_nothing_is_known_or_nothing_is_asked() -> None:
    assert FREE.room(0.001, 10) == WHOLE
    assert TRUE.room(math.inf, 10) == WHOLE
    assert TRUE.room(-1.0, 10) == 0
