"""Money and time on the wire, exactly."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.http.wire import CENT, cents_to_nano, nano_to_cents, read_instant, write_instant
from marketplace.ledger.money import MAX_AMOUNT


@given(st.integers(-MAX_AMOUNT, MAX_AMOUNT))
def test_money_goes_out_and_comes_back_unchanged(nano: int) -> None:
    text = orjson.dumps(nano_to_cents(nano)).decode()
    number = json.loads(text, parse_float=Decimal)
    assert cents_to_nano(number) == nano
    assert Fraction(number) == Fraction(nano, CENT)
    assert "e" not in text.lower() and len(text.partition(".")[2]) <= 7


@given(st.integers(-(10**11), 10**11))
def test_whole_cents_are_integers(cents: int) -> None:
    assert nano_to_cents(cents * CENT) == cents and cents_to_nano(cents) == cents * CENT


@given(st.decimals(allow_nan=False, allow_infinity=False))
def test_any_number_is_exact_or_refused(number: Decimal) -> None:
    exact = number.adjusted() < 30 and Fraction(number) * CENT if number.adjusted() > -40 else None
    try:
        nano = cents_to_nano(number)
    except ValueError:
        assert not exact or Fraction(exact).denominator != 1 or abs(Fraction(exact)) > MAX_AMOUNT
    else:
        assert nano == Fraction(number) * CENT if number else nano == 0


@pytest.mark.parametrize("value", [True, None, "5", [5], 5.0])
def test_an_amount_is_a_number(value: object) -> None:
    with pytest.raises(ValueError, match="JSON number"):
        cents_to_nano(value)


def test_zero_with_any_exponent_costs_nothing() -> None:
    assert cents_to_nano(Decimal("0e999999999")) == cents_to_nano(Decimal("-0e-999999999")) == 0


@given(st.integers(0, 4 * 10**15))
def test_time_goes_out_and_comes_back_unchanged(at: int) -> None:
    assert read_instant(write_instant(at)) == at
    assert write_instant(at).endswith("Z")


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01T01:00:00+01:00", 0),
        ("1970-01-01T00:00:00.5Z", 500_000),
    ],
)
def test_offsets_and_fractions_are_understood(text: str, at: int) -> None:
    assert read_instant(text) == at


@pytest.mark.parametrize(
    "text", ["2026-11-21", "2026-11-21T01:00:00", "2026-13-21T01:00:00Z", "20261121T010000Z", "x", "", 5, None]
)
def test_anything_else_is_not_a_time(text: object) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read_instant(text)
