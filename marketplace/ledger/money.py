"""Money as integers: nano-units (1e-9 of the server currency), one rounding per charge, no float and no Decimal on
the way.

A signed 64-bit integer of nano-units reaches 9.2 billion units. Single amounts are bounded a little lower
(MAX_AMOUNT), so that sums of a few of them, as SQL computes them, never leave 64 bits.
"""

from __future__ import annotations

import re

import msgspec

NANO = 1_000_000_000
"""nano-units in one unit of the server currency"""
PER_TOKENS = 1_000_000
"""Prices are quoted per this many tokens."""
MAX_AMOUNT = 10**18
"""Largest absolute value of one amount, balance or credit limit: a billion units."""
MAX_PRICE = 10**15
"""Largest price: a million units per million tokens."""
MAX_TOKENS = 10**9
"""Largest token counter of one request."""

_DECIMAL = re.compile(r"(-?)([0-9]{1,10})(?:\.([0-9]{1,9}))?", re.ASCII)


class MoneyError(ValueError):
    """An amount, price or counter outside its range, or a text that is not an amount."""


class Tokens(msgspec.Struct, frozen=True):
    """What one request consumed: prompt tokens, how many of them came from the prefix cache, and generated tokens."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0


class Price(msgspec.Struct, frozen=True):
    """Nano-units per 1,000,000 tokens of each sort. A cached prompt token costs `cached` instead of `prompt`, not in
    addition."""

    prompt: int
    cached: int
    completion: int


def check_amount(amount: int) -> int:
    """Return the amount; MoneyError when it is beyond MAX_AMOUNT either way."""
    if not -MAX_AMOUNT <= amount <= MAX_AMOUNT:
        raise MoneyError(f"amount {amount} is outside ±{MAX_AMOUNT} nano-units")
    return amount


def check_tokens(tokens: Tokens) -> Tokens:
    """Return the counters; MoneyError unless 0 ≤ cached ≤ prompt and every counter is within MAX_TOKENS."""
    if not (0 <= tokens.cached <= tokens.prompt <= MAX_TOKENS and 0 <= tokens.completion <= MAX_TOKENS):
        raise MoneyError(
            f"impossible counters: prompt {tokens.prompt}, cached {tokens.cached}, completion {tokens.completion}"
        )
    return tokens


def check_price(price: Price) -> Price:
    """Return the price; MoneyError when a part is negative or beyond MAX_PRICE."""
    if not (0 <= price.prompt <= MAX_PRICE and 0 <= price.cached <= MAX_PRICE and 0 <= price.completion <= MAX_PRICE):
        raise MoneyError(
            f"impossible price: {price.prompt}, {price.cached}, {price.completion} nano-units per million tokens"
        )
    return price


def round_half_up(numerator: int, denominator: int) -> int:
    """Return numerator/denominator rounded to the nearest integer, exact halves towards plus infinity; denominator >
    0."""
    if denominator <= 0:
        raise MoneyError(f"denominator {denominator} is not positive")
    return (2 * numerator + denominator) // (2 * denominator)


def cost_nano(prompt: int, cached: int, completion: int, price: Price) -> int:
    """Return the cost in nano-units: the exact sum over the three sorts of tokens, rounded once, half up.

    MoneyError for impossible counters or prices, or for a cost beyond MAX_AMOUNT.
    """
    check_tokens(Tokens(prompt, cached, completion))
    check_price(price)
    numerator = (prompt - cached) * price.prompt + cached * price.cached + completion * price.completion
    return check_amount(round_half_up(numerator, PER_TOKENS))


def format_nano(amount: int) -> str:
    """Render nano-units as the shortest exact decimal number of units: 1500000000 → "1.5", -1 → "-0.000000001"."""
    sign = "-" if amount < 0 else ""
    whole, part = divmod(abs(amount), NANO)
    if part == 0:
        return f"{sign}{whole}"
    return f"{sign}{whole}.{part:09d}".rstrip("0")


def parse_nano(text: str) -> int:
    """Read a decimal number of units with at most 9 decimals, exactly; MoneyError for anything else (exponents, NaN,
    spaces)."""
    match = _DECIMAL.fullmatch(text)
    if match is None:
        raise MoneyError(f"not an amount with at most 9 decimals: {text!r}")
    sign, whole, part = match.groups()
    amount = int(whole) * NANO + int((part or "").ljust(9, "0"))
    return check_amount(-amount if sign else amount)
