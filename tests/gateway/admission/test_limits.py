from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.limits import Allowance, KeyLimits, Limited, RequestRate
from gateway.admission.token_rate import MINUTE_US


def test_a_minutes_worth_at_once_then_one_per_interval() -> None:
    rate = RequestRate(60)
    assert [rate.take(0) for _ in range(60)] == [0] * 60
    assert rate.take(0) == 1_000_000
    assert rate.take(999_999) == 1
    assert rate.take(1_000_000) == 0
    assert rate.take(1_000_000) == 1_000_000


def test_idleness_gives_back_the_burst_and_no_more() -> None:
    rate = RequestRate(60, burst=3)
    assert [rate.take(0) for _ in range(4)] == [0, 0, 0, 1_000_000]
    later = 3_600_000_000
    assert [rate.take(later) for _ in range(4)] == [0, 0, 0, 1_000_000]


def test_an_interval_that_is_no_whole_number_is_rounded_against_the_caller() -> None:
    rate = RequestRate(7, burst=1)  # one per 8,571,428.57 µs
    assert rate.take(0) == 0
    assert rate.take(8_571_428) == 1
    assert rate.take(8_571_429) == 0


def test_allowance_says_what_is_left() -> None:
    rate = RequestRate(60, burst=10)
    assert rate.allowance(5) == Allowance(10, 10, 0)
    rate.take(0)
    rate.take(0)
    assert rate.allowance(0) == Allowance(10, 8, 2_000_000)
    assert rate.allowance(1_500_000) == Allowance(10, 9, 500_000)


@pytest.mark.parametrize(("per_minute", "burst"), [(0, None), (-1, None), (5, 0)])
def test_rates_must_be_positive(per_minute: int, burst: int | None) -> None:
    with pytest.raises(ValueError, match="requests per minute"):
        RequestRate(per_minute, burst)


@given(
    per_minute=st.integers(1, 5000),
    burst=st.integers(1, 50),
    gaps=st.lists(st.integers(0, 3_000_000), min_size=1, max_size=120),
)
def test_no_window_ever_admits_more_than_burst_plus_rate(per_minute: int, burst: int, gaps: list[int]) -> None:
    rate = RequestRate(per_minute, burst)
    now, admitted = 0, []
    for gap in gaps:
        now += gap
        wait = rate.take(now)
        if wait == 0:
            admitted.append(now)
        else:
            assert rate.take(now + wait - 1) > 0, "the wait is exact: not a moment sooner"
    for i, start in enumerate(admitted):
        for j in range(i, len(admitted)):
            assert j - i + 1 <= burst + (admitted[j] - start) * per_minute / MINUTE_US + 1e-9


@given(wait_first=st.integers(0, 10**7), per_minute=st.integers(1, 600))
def test_the_wait_it_names_is_enough(wait_first: int, per_minute: int) -> None:
    rate = RequestRate(per_minute, burst=1)
    assert rate.take(wait_first) == 0
    wait = rate.take(wait_first)
    assert wait > 0
    assert rate.take(wait_first + wait) == 0


def test_concurrency_is_counted_and_released() -> None:
    limits = KeyLimits(None, 2)
    assert limits.admit(0) is None
    assert limits.admit(0) is None
    assert limits.admit(0) == Limited("concurrency", 2, 1_000_000)
    limits.release()
    assert limits.admit(0) is None
    assert limits.running == 2


def test_a_request_refused_for_concurrency_does_not_use_up_the_rate() -> None:
    limits = KeyLimits(2, 1)
    assert limits.admit(0) is None
    assert limits.admit(0) is not None
    limits.release()
    assert limits.admit(0) is None
    limits.release()
    refusal = limits.admit(0)
    assert refusal == Limited("requests", 2, 30_000_000)
    assert limits.running == 0


def test_no_limits_limit_nothing() -> None:
    limits = KeyLimits(None, None)
    assert all(limits.admit(0) is None for _ in range(1000))
    assert limits.allowance(0) is None


def test_new_limits_keep_what_is_running_and_what_was_used() -> None:
    limits = KeyLimits(2, 10)
    limits.admit(0)
    limits.admit(0)
    limits.configure(2, 1)
    assert limits.running == 2
    refusal = limits.admit(0)
    assert refusal is not None
    assert refusal.kind == "concurrency"
    limits.configure(2, None)
    refusal = limits.admit(0)
    assert refusal is not None
    assert refusal.kind == "requests", "an unchanged rate keeps its state"
    limits.configure(100, None)
    assert limits.admit(0) is None


def test_releasing_too_often_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="released more often"):
        KeyLimits(None, None).release()
