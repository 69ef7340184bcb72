from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from benchmarks.quality import TEXT, WINDOW, Runner, compare_text, equal_prefix


class Fixed:
    """Logits by token alone, the same at every position."""

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def step(self, ids: Sequence[int], start: int, last_only: bool = False) -> Tensor:
        return self._table[list(ids)]


def runner(table: Tensor) -> Runner:
    return cast(Runner, cast(Any, Fixed(table)))


def test_a_model_agrees_with_itself() -> None:
    table = torch.randn(10, 10)
    ids = torch.randint(0, 10, (WINDOW + 50,)).tolist()
    result = compare_text(runner(table), runner(table), ids)
    assert (result.tokens, result.same_top) == (WINDOW + 49, 1.0)
    assert result.divergence == pytest.approx(0.0, abs=1e-6)
    assert result.perplexity == result.perplexity_float32


def test_perplexity_of_knowing_nothing_is_the_vocabulary() -> None:
    sure = torch.full((4, 4), -30.0).scatter_(1, torch.tensor([[1], [2], [3], [0]]), 30.0)
    result = compare_text(runner(torch.zeros(4, 4)), runner(sure), [0, 1, 2, 3, 0, 1])
    assert result.perplexity == pytest.approx(4.0)
    assert result.perplexity_float32 == pytest.approx(1.0)
    assert result.divergence == pytest.approx(math.log(4))


@pytest.mark.parametrize(
    ("a", "b", "count"), [([1, 2, 3], [1, 2, 4], 2), ([1], [1, 2], 1), ([], [1], 0), ([1, 2], [1, 2], 2)]
)
def test_equal_prefix(a: list[int], b: list[int], count: int) -> None:
    assert equal_prefix(a, b) == count


def test_the_text_is_long_enough_to_measure_on() -> None:
    assert len(TEXT.read_text("utf-8").split()) > 1500
