"""What a charge costs, pure: a fraction of cents, rounded once, and who gets how much of it."""

from __future__ import annotations

import msgspec

from marketplace.ledger.money import MAX_AMOUNT, MoneyError, round_half_up

NANO_IN_CENT = 10_000_000
WHOLE = 10_000
"""A share of everything, in basis points."""
MAX_TERM = 2**63 - 1
"""Largest numerator or denominator that is kept."""


class Fraction(msgspec.Struct, frozen=True):
    """An amount in cents, as it was sent: not reduced."""

    numerator: int
    denominator: int


class Cost(msgspec.Struct, frozen=True):
    """What a charge takes from its customer, and what of it is the provider's; both in nano-units."""

    total: int
    payable: int


def cost(amount: Fraction, share: int) -> Cost:
    """Return the amount in nano-units, rounded once, half up, and the provider's part of it.

    `share` is in basis points. The provider's part is rounded down, the rest is the platform's: nothing is lost or
    made. MoneyError for a fraction that is negative, divides by nothing or is beyond MAX_AMOUNT.
    """
    if not 0 <= amount.numerator <= MAX_TERM or not 0 < amount.denominator <= MAX_TERM:
        raise MoneyError("an amount is a numerator from 0 and a denominator from 1, each within 63 bits")
    total = round_half_up(amount.numerator * NANO_IN_CENT, amount.denominator)
    if total > MAX_AMOUNT:
        raise MoneyError(f"an amount is at most {MAX_AMOUNT // NANO_IN_CENT} cents")
    return Cost(total, total * share // WHOLE)
