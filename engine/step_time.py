"""How long a step takes, learned from steps that ran, and how much of a prompt fits into the time that is left of one.

    seconds = constant + requests · a + tokens · b + context · c + pairs · d

Decodes read their whole context for one token, which costs memory traffic (`context`); the tokens of a chunk share what
they read, which costs arithmetic (`pairs`). The five coefficients are the least squares of relative errors over the
latest steps, a window for each size of step: a thousand decodes do not make it forget what a chunk costs. Steps that
something else disturbed count less (Huber's weights), as do old ones. No coefficient is negative: the worst one is left
out until none is, after Lawson and Hanson's active sets.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

WINDOW = 32
"""Steps remembered of each size (powers of two of tokens)."""
REFIT_EVERY = 32
"""Steps between two fits; the first ones follow each other sooner."""
HUBER = 0.1
"""Relative error from which on a step counts less."""
HALF_LIFE = 256.0
"""Steps after which a step counts half, ..."""
OLDEST = 0.01
"""... and what it counts at least, while no other of its size has come."""
RIDGE = 1e-6
"""Keeps coefficients apart that the steps so far cannot tell apart: they share the cost evenly."""
WHOLE = 1 << 30
"""More tokens than any step has."""

Floats = npt.NDArray[np.float64]


Row = tuple[int, int, int, int, float, int]
"""A step's shape, its seconds and its number"""


class StepShape(NamedTuple):
    """What a step computes, as far as its time depends on it."""

    requests: int
    tokens: int
    context: int
    """tokens of context that decodes read"""
    pairs: int
    """of tokens in chunks, with the tokens that each looks at"""


def chunk_pairs(position: int, count: int) -> int:
    """Pairs of a chunk of `count` tokens after `position` computed ones: each looks at all before it and at itself."""
    return count * position + count * (count + 1) // 2


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step by its shape. All zero: nothing is known, everything fits."""

    constant: float = 0.0
    per_request: float = 0.0
    per_token: float = 0.0
    per_context: float = 0.0
    per_pair: float = 0.0

    def seconds(self, shape: StepShape) -> float:
        """Time of a step."""
        return (
            self.constant
            + self.per_request * shape.requests
            + self.per_token * shape.tokens
            + self.per_context * shape.context
            + self.per_pair * shape.pairs
        )

    def chunk(self, position: int, count: int) -> float:
        """Time that a chunk of `count` tokens after `position` computed ones adds to a step."""
        return self.per_request + self.per_token * count + self.per_pair * chunk_pairs(position, count)

    def room(self, seconds: float, position: int) -> int:
        """Most tokens of a chunk after `position` computed ones that take at most `seconds`."""
        left = seconds - self.per_request
        if left <= 0:
            return 0
        if left == math.inf:
            return WHOLE
        # half the pairs' cost · n² + slope · n ≤ left
        slope = self.per_token + self.per_pair * (position + 0.5)
        root = slope + math.sqrt(slope * slope + 2 * self.per_pair * left)
        return WHOLE if root * WHOLE <= 2 * left else int(2 * left / root)


FREE = StepCost()


class Pace(NamedTuple):
    """How long a step may take, and what that means."""

    seconds: float = math.inf
    """longest step"""
    cost: StepCost = FREE


UNPACED = Pace()


def fit(shapes: Floats, seconds: Floats, ages: Floats) -> StepCost:
    """Return the cost that explains steps best: shapes [n, 4] as StepShape has them, seconds [n], all positive, ages
    [n] in steps. Pure; FREE where there are none."""
    if not len(seconds):
        return FREE
    rows = np.ones((len(seconds), 5))
    rows[:, 1:] = shapes
    rows /= seconds[:, None]  # relative errors: each row should come to 1
    scale = np.sqrt((rows * rows).sum(axis=0))
    scale[scale == 0] = 1.0
    rows /= scale
    trust = np.maximum(OLDEST, 0.5 ** (ages / HALF_LIFE))
    weights = trust
    solution = np.zeros(5)
    for _ in range(3):
        weighted = rows * weights[:, None]
        solution = _nonnegative(weighted.T @ rows, weighted.sum(axis=0))
        errors = np.abs(rows @ solution - 1.0)
        weights = trust * np.minimum(1.0, HUBER / np.maximum(errors, 1e-12))
    return StepCost(*(solution / scale).tolist())


def _nonnegative(matrix: Floats, right: Floats) -> Floats:
    """Solve the normal equations; while a coefficient is negative, leave the worst one out."""
    kept = np.flatnonzero(np.diag(matrix) > 0)
    solution = np.zeros(len(right))
    while kept.size:
        part = matrix[np.ix_(kept, kept)]
        ridge = RIDGE * np.trace(part) / kept.size * np.eye(kept.size)
        found = np.linalg.solve(part + ridge, right[kept])
        if found.min() >= 0:
            solution[kept] = found
            break
        kept = np.delete(kept, found.argmin())
    return solution


class StepTimes:
    """The latest steps of each size, and the cost fitted to them. Bounded; one thread."""

    def __init__(self) -> None:
        self.cost = FREE
        """What steps cost, as of the last fit."""
        self.seen = 0
        """Steps observed."""
        self._windows: dict[int, deque[Row]] = {}
        self._done = -math.inf
        self._due = 0

    def finished(self, shape: StepShape, launched: float, done: float) -> None:
        """A step has run: launched and done by one clock, in seconds. Where steps overlap, one begins when the one
        before it is done."""
        began, self._done = self.begun(launched), done
        self.observe(shape, done - began)

    def begun(self, launched: float) -> float:
        """When a step that was launched then began, or will: not before the one before it is done."""
        return max(launched, self._done)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took `seconds`."""
        if not 0 < seconds < math.inf:
            return
        size = shape.tokens.bit_length()
        window = self._windows.get(size)
        if window is None:
            window = self._windows[size] = deque(maxlen=WINDOW)
            self._due = 0  # a size never seen before is news
        self.seen += 1
        window.append((*shape, seconds, self.seen))
        self._due -= 1
        if self._due <= 0:
            rows = np.array([row for rows in self._windows.values() for row in rows])
            self.cost = fit(rows[:, :4], rows[:, 4], self.seen - rows[:, 5])
            self._due = min(self.seen, REFIT_EVERY)
