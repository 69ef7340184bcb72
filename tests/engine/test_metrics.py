"""Histograms."""

from __future__ import annotations

import pytest

from engine.metrics import EngineMetrics, Histogram


def test_values_fall_into_the_bucket_whose_bound_they_do_not_exceed() -> None:
    histogram = Histogram((1.0, 10.0))
    for value in (0.0, 1.0, 1.5, 10.0, 11.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert (histogram.count, histogram.total) == (5, 23.5)


@pytest.mark.parametrize(("q", "bound"), [(0.0, 1.0), (0.4, 1.0), (0.41, 10.0), (0.8, 10.0), (1.0, float("inf"))])
def test_quantiles_are_bucket_bounds(q: float, bound: float) -> None:
    histogram = Histogram((1.0, 10.0))
    for value in (0.0, 1.0, 1.5, 10.0, 11.0):
        histogram.observe(value)
    assert histogram.quantile(q) == bound


def test_an_empty_histogram_has_no_quantiles() -> None:
    assert Histogram((1.0,)).quantile(0.5) == 0.0


def test_engines_do_not_share_metrics() -> None:
    one, other = EngineMetrics(), EngineMetrics()
    one.step_ms.observe(1.0)
    one.finished["stop"] = 1
    assert other.step_ms.count == 0 and other.finished == {}
