"""Amounts of payments: whole cents outside, nano-units inside."""

from __future__ import annotations

from marketplace.ledger.money import MAX_AMOUNT, check_amount

CENT = 10_000_000
"""nano-units in a cent"""
MAX_CENTS = MAX_AMOUNT // CENT


def nano(cents: int) -> int:
    """Cents as nano-units. MoneyError beyond the range."""
    return check_amount(cents * CENT)


def units(cents: int) -> str:
    """Cents as people read them: 2050 → "20.50"."""
    return f"{cents // 100}.{cents % 100:02d}"
