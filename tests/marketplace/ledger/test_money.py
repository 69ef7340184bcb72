"""Money: exactness against fractions, bounds, text."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal, localcontext
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.ledger.money import (
    MAX_AMOUNT,
    MAX_PRICE,
    MoneyError,
    Price,
    Tokens,
    check_amount,
    check_tokens,
    cost_nano,
    format_nano,
    parse_nano,
    round_half_up,
)

prices = st.builds(
    Price, prompt=st.integers(0, 10**10), cached=st.integers(0, 10**10), completion=st.integers(0, 10**10)
)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), prices)
def test_cost_is_the_exact_sum_rounded_once_half_up(fresh: int, cached: int, completion: int, price: Price) -> None:
    exact = Fraction(fresh * price.prompt + cached * price.cached + completion * price.completion, 1_000_000)
    cost = cost_nano(fresh + cached, cached, completion, price)
    assert abs(cost - exact) <= Fraction(1, 2)
    with localcontext() as context:
        context.prec = 60
        decimal = Decimal(exact.numerator) / Decimal(exact.denominator)
        assert cost == int(decimal.to_integral_value(ROUND_HALF_UP))


@pytest.mark.parametrize(
    ("numerator", "denominator", "rounded"),
    [
        (1, 2, 1),
        (-1, 2, 0),
        (3, 2, 2),
        (-3, 2, -1),
        (499_999, 1_000_000, 0),
        (500_000, 1_000_000, 1),
        (0, 7, 0),
        (5, 5, 1),
    ],
)
def test_halves_round_up(numerator: int, denominator: int, rounded: int) -> None:
    assert round_half_up(numerator, denominator) == rounded


def test_a_known_bill() -> None:
    # 1,000 prompt tokens, 200 of them cached, 500 generated, at $0.15, $0.075 and $0.60 per million
    price = Price(prompt=150_000_000, cached=75_000_000, completion=600_000_000)
    assert cost_nano(1000, 200, 500, price) == 120_000 + 15_000 + 300_000


def test_one_rounding_for_the_sum_not_one_for_each_part() -> None:
    price = Price(prompt=400_000, cached=400_000, completion=400_000)
    assert cost_nano(2, 1, 1, price) == 1


@given(st.integers(-MAX_AMOUNT, MAX_AMOUNT))
def test_text_and_back(amount: int) -> None:
    text = format_nano(amount)
    assert parse_nano(text) == amount
    assert Decimal(text) * 1_000_000_000 == amount


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0"), (1, "0.000000001"), (-1, "-0.000000001"), (1_500_000_000, "1.5"), (-2_000_000_000, "-2"), (10**9, "1")],
)
def test_the_shortest_text(amount: int, text: str) -> None:
    assert format_nano(amount) == text


@pytest.mark.parametrize(
    "text", ["", "1e3", "NaN", " 1", "1 ", "1.", ".5", "+1", "1.0000000001", "--1", "1,5", "٣", "99999999999"]
)
def test_what_is_not_an_amount(text: str) -> None:
    with pytest.raises(MoneyError):
        parse_nano(text)


@pytest.mark.parametrize(
    "tokens", [Tokens(-1, 0, 0), Tokens(1, 2, 0), Tokens(1, -1, 0), Tokens(0, 0, -1), Tokens(10**10, 0, 0)]
)
def test_impossible_counters(tokens: Tokens) -> None:
    with pytest.raises(MoneyError, match="counters"):
        check_tokens(tokens)


def test_bounds() -> None:
    assert check_amount(MAX_AMOUNT) == MAX_AMOUNT
    assert check_amount(-MAX_AMOUNT) == -MAX_AMOUNT
    for amount in (MAX_AMOUNT + 1, -MAX_AMOUNT - 1):
        with pytest.raises(MoneyError):
            check_amount(amount)
    with pytest.raises(MoneyError, match="price"):
        cost_nano(1, 0, 0, Price(-1, 0, 0))
    with pytest.raises(MoneyError, match="price"):
        cost_nano(1, 0, 0, Price(MAX_PRICE + 1, 0, 0))
    with pytest.raises(MoneyError, match="amount"):
        cost_nano(10**9, 0, 10**9, Price(MAX_PRICE, 0, MAX_PRICE))
    with pytest.raises(MoneyError, match="denominator"):
        round_half_up(1, 0)
