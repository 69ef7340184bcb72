"""The arithmetic of charges against exact fractions."""

from __future__ import annotations

from fractions import Fraction as Exact
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.ledger.money import MAX_AMOUNT, MoneyError
from marketplace.services.rules import MAX_TERM, NANO_IN_CENT, WHOLE, Fraction, cost

TERMS = st.integers(0, MAX_TERM) | st.integers(0, 10**6)


@given(TERMS, TERMS.filter(bool), st.integers(0, WHOLE))
def test_it_is_the_exact_amount_rounded_once_half_up(numerator: int, denominator: int, share: int) -> None:
    exact = Exact(numerator, denominator) * NANO_IN_CENT
    rounded = floor(exact + Exact(1, 2))
    if rounded > MAX_AMOUNT:
        with pytest.raises(MoneyError):
            cost(Fraction(numerator, denominator), share)
        return
    found = cost(Fraction(numerator, denominator), share)
    assert found.total == rounded
    assert found.payable == floor(Exact(rounded) * share / WHOLE)
    assert 0 <= found.payable <= found.total


@pytest.mark.parametrize(
    ("numerator", "denominator", "total"),
    [
        (1354, 1000, 13_540_000),
        (1, 3, 3_333_333),
        (2, 3, 6_666_667),
        (1, 2 * NANO_IN_CENT, 1),
        (1, 2 * NANO_IN_CENT + 1, 0),
        (0, 7, 0),
        (MAX_TERM, MAX_TERM, NANO_IN_CENT),
    ],
)
def test_known_amounts(numerator: int, denominator: int, total: int) -> None:
    assert cost(Fraction(numerator, denominator), 0).total == total


@pytest.mark.parametrize(("numerator", "denominator"), [(-1, 1), (1, 0), (1, -1), (MAX_TERM + 1, 1), (MAX_TERM, 1)])
def test_impossible_amounts_are_refused(numerator: int, denominator: int) -> None:
    with pytest.raises(MoneyError):
        cost(Fraction(numerator, denominator), 0)
