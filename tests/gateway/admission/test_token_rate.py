"""Tokens per minute: a bucket against a model of fractions, requests that are larger than it, and corrections."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.token_rate import MINUTE_US, Allowance, TokenRate


def test_a_minutes_worth_at_once_then_evenly() -> None:
    rate = TokenRate(60)
    assert rate.take(0, 60) == 0
    assert rate.take(0, 1) == 1_000_000
    assert rate.take(999_999, 1) == 1
    assert rate.take(1_000_000, 1) == 0
    assert rate.take(1_000_000, 30) == 30_000_000


def test_idleness_fills_the_bucket_and_no_more() -> None:
    rate = TokenRate(10)
    assert rate.take(0, 10) == 0
    assert rate.take(10 * MINUTE_US, 10) == 0
    assert rate.take(10 * MINUTE_US, 1) > 0


def test_what_was_not_used_comes_back_at_once() -> None:
    rate = TokenRate(1000)
    assert rate.take(0, 900) == 0
    assert rate.take(0, 200) > 0
    rate.correct(0, 850)
    assert rate.allowance(0) == Allowance(1000, 950, 3_000_000)
    assert rate.take(0, 200) == 0
    rate.correct(0, 10**6)
    assert rate.allowance(0) == Allowance(1000, 1000, 0)


def test_a_request_that_is_larger_than_the_bucket_needs_it_full_and_leaves_a_debt() -> None:
    rate = TokenRate(100)
    assert rate.take(0, 1) == 0
    assert rate.take(0, 8000) == 600_000
    assert rate.take(600_000, 8000) == 0
    assert rate.allowance(600_000).remaining == 0
    assert rate.take(600_000, 1) > 70 * MINUTE_US
    rate.correct(600_000, 7990)
    assert rate.take(600_000, 90) == 0 and rate.take(600_000, 1) > 0


def test_more_than_was_taken_is_a_debt_too() -> None:
    rate = TokenRate(100)
    assert rate.take(0, 100) == 0
    rate.correct(0, -20)
    assert rate.take(0, 1) == 21 * 600_000


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        TokenRate(0)


@given(
    st.integers(1, 10**7),
    st.lists(st.tuples(st.integers(0, 2 * MINUTE_US), st.integers(0, 2 * 10**7), st.integers(0, 10**6)), max_size=30),
)
def test_it_is_a_bucket_of_fractions(per_minute: int, steps: list[tuple[int, int, int]]) -> None:
    rate, now = TokenRate(per_minute), 0
    level = Fraction(per_minute)
    for passed, tokens, unused in steps:
        now += passed
        level = min(Fraction(per_minute), level + Fraction(passed * per_minute, MINUTE_US))
        fits = min(tokens, per_minute) <= level
        wait = rate.take(now, tokens)
        assert (wait == 0) == fits
        if fits:
            level = min(Fraction(per_minute), level - tokens + min(unused, tokens))
            rate.correct(now, min(unused, tokens))
        else:
            missing = min(tokens, per_minute) - level
            assert wait - 1 < missing * MINUTE_US / per_minute <= wait
        left = rate.allowance(now)
        assert left.remaining == max(0, int(level // 1)) and left.limit == per_minute
        assert left.reset_us - 1 < (per_minute - level) * MINUTE_US / per_minute <= left.reset_us
