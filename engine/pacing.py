"""When the step behind the one that runs is launched: just before that one is done.

A step that is decided as soon as the device is busy keeps everybody waiting who arrives while the device computes:
until the next decision, and then for the whole of a step without them. Decided as late as it may be, the step has them,
and the device still goes from one step to the next. How late follows from what is measured: the step that runs ends
when its shape says (engine.step_time), launching takes the host so long, and what both are mistaken by is a margin, the
quantile of the mistakes, followed step by step: it grows when a step came late, so that the device stood still, and
shrinks a little when it did not.

Source of the quantile: stochastic approximation after Robbins and Monro (1951).
"""

from __future__ import annotations

import math

from engine.step_time import StepShape, StepTimes

LATE = 0.01
"""Part of the steps that may come late."""
GAIN_S = 2e-4
"""How fast the margin follows the mistakes, in seconds a step."""
FIRST_MARGIN_S = 2e-3
"""Margin while nothing is known of the mistakes."""
MOST_MARGIN_S = 20e-3
HOST_SHARE = 0.25
"""Weight of the latest launch in the host's time of one."""


class Pacer:
    """Says when to launch; learns from every launch behind a running step. One thread."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self.margin_s = FIRST_MARGIN_S
        self.host_s = 0.0
        """usual time of the host for a launch"""
        self.late = 0
        """Steps that were launched when the device had nothing to do any more."""

    def due(self, running: StepShape, launched: float) -> float:
        """When the next step should be launched, given the only one that runs and when it was launched, by the engine's
        clock; long ago where nothing is known of steps."""
        seconds = self._times.cost.seconds(running)
        if seconds <= 0:
            return -math.inf
        return self._times.begun(launched) + seconds - self.host_s - self.margin_s

    def launched(self, host_s: float, *, late: bool) -> None:
        """A step was launched behind another one, in host_s seconds; late: the other one was done before."""
        self.late += late
        self.host_s += HOST_SHARE * (host_s - self.host_s) if self.host_s else host_s
        moved = self.margin_s + GAIN_S * (late - LATE)
        self.margin_s = min(max(0.0, moved), MOST_MARGIN_S)
