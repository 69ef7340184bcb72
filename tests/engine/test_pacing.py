"""The next step is launched just before the one that runs is done: who arrives meanwhile is in it, and the device goes
on without a pause."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.core import NAP_S
from engine.device import Result, Work
from engine.pacing import FIRST_MARGIN_S, LATE, MOST_MARGIN_S, Pacer
from engine.step_time import StepShape, StepTimes

Make = Callable[..., Any]
Alone = Callable[[Sequence[int], int], list[int]]
STEP_S = 10e-3
DECODE = StepShape(1, 1, 10, 0)


class Clock:
    """Time passes where somebody says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class TimedDevice:
    """A device whose work takes the seconds that it is told, one piece after the other; giving it work takes host_s."""

    name = "cpu"
    asynchronous = True

    def __init__(self, clock: Clock, seconds: Callable[[], float], host_s: float = 0.0) -> None:
        self.clock = clock
        self.seconds = seconds
        self.host_s = host_s
        self.spans: list[tuple[float, float]] = []

    def staging(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def run(self, work: Work) -> Timed:
        self.clock.now += self.host_s
        begin = max([self.clock.now, *(end for _, end in self.spans[-1:])])
        self.spans.append((begin, begin + self.seconds()))
        return Timed(self.clock, self.spans[-1][1], tuple(tensor.clone() for tensor in work()))

    def lost(self, error: Exception) -> bool:
        return False

    def pauses(self, skip: int = 0) -> list[float]:
        """Between one step and the next, from step `skip` on."""
        return [later[0] - earlier[1] for earlier, later in pairwise(self.spans[skip:])]


class Timed:
    def __init__(self, clock: Clock, end: float, result: Result) -> None:
        self._clock, self._end, self._result = clock, end, result

    def ready(self) -> bool:
        return self._clock.now >= self._end

    def wait(self) -> Result:
        self._clock.now = max(self._clock.now, self._end)
        return self._result


def bench_on(make_bench: Make, device: TimedDevice, **settings: Any) -> Any:
    return make_bench(clock=device.clock, sleep=device.clock.sleep, device=device, pages=128, **settings)


def steady(bench: Any, steps: int) -> None:
    """A stream that runs, and a host that has seen some of its steps."""
    bench.submit("a", range(5), max_tokens=1000)
    while bench.core.metrics.steps < steps:
        bench.step()


@pytest.mark.parametrize(("just_in_time", "steps"), [(True, 1.5), (False, 2.5)])
def test_who_arrives_in_the_middle_of_a_step_is_in_the_next_one(
    make_bench: Make, alone: Alone, just_in_time: bool, steps: float
) -> None:
    device = TimedDevice(Clock(), lambda: STEP_S)
    bench = bench_on(make_bench, device, just_in_time=just_in_time)
    steady(bench, 30)
    arrival = device.spans[-1][1] + STEP_S / 2  # of the step that is about to run
    while device.clock.now < arrival:
        bench.step()
    bench.submit("b", range(7), max_tokens=3)
    while "b" not in bench.said:
        bench.step()
    assert (device.clock.now - arrival) / STEP_S == pytest.approx(steps, abs=0.02)
    bench.core.abort("a")
    assert bench.drain()["b"].tokens == alone(range(7), 3)


def test_a_device_whose_steps_take_what_they_did_never_pauses(make_bench: Make) -> None:
    device = TimedDevice(Clock(), lambda: STEP_S, host_s=4e-4)
    steady(bench_on(make_bench, device), 200)
    assert max(device.pauses(skip=3)) < 1e-9


def test_steps_that_differ_pause_a_device_seldom_and_shortly(make_bench: Make) -> None:
    draw = random.Random(3)
    device = TimedDevice(Clock(), lambda: STEP_S * draw.uniform(0.8, 1.2), host_s=4e-4)
    steady(bench_on(make_bench, device), 900)
    pauses = [pause for pause in device.pauses(skip=300) if pause > 1e-9]
    assert len(pauses) < 0.05 * 600
    assert sum(pauses) < 0.005 * 600 * STEP_S


def test_a_step_that_is_done_before_its_time_is_followed_at_once(make_bench: Make) -> None:
    seconds = [STEP_S]
    device = TimedDevice(Clock(), lambda: seconds[0])
    bench = bench_on(make_bench, device)
    steady(bench, 60)
    seconds[0] = STEP_S / 5
    steps = len(device.spans)
    while len(device.spans) < steps + 6:
        bench.step()
    assert max(device.pauses(skip=steps - 1)) <= NAP_S + 1e-9


def test_without_a_measured_step_the_next_one_is_due_at_once() -> None:
    pacer = Pacer(StepTimes())
    assert pacer.due(DECODE, 5.0) < 0


def test_a_step_is_due_the_margin_and_the_host_s_time_before_its_end() -> None:
    times = StepTimes()
    for i in range(10):
        times.finished(DECODE, float(i), i + STEP_S)
    pacer = Pacer(times)
    assert pacer.due(DECODE, 20.0) == pytest.approx(20.0 + STEP_S - FIRST_MARGIN_S, rel=1e-4)
    # it waits for the one before it
    assert pacer.due(DECODE, 9.0) == pytest.approx(9.0 + 2 * STEP_S - FIRST_MARGIN_S, rel=1e-4)
    pacer.launched(1e-3, late=False)
    assert pacer.due(DECODE, 20.0) == pytest.approx(20.0 + STEP_S - 1e-3 - pacer.margin_s, rel=1e-4)


def test_the_margin_is_the_quantile_of_the_mistakes() -> None:
    draw = random.Random(1)
    pacer = Pacer(StepTimes())
    late = 0
    for i in range(30_000):
        is_late = draw.expovariate(1 / 5e-4) > pacer.margin_s
        late += is_late and i >= 10_000
        pacer.launched(0.0, late=is_late)
    assert LATE / 2 < late / 20_000 < 2 * LATE
    for _ in range(200):
        pacer.launched(0.0, late=True)
    assert pacer.margin_s == MOST_MARGIN_S
