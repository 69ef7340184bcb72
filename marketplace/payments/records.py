"""Payments and refunds as they are stored."""

from __future__ import annotations

from typing import Literal

import msgspec

PaymentState = Literal["creating", "pending", "succeeded", "canceled", "mismatched"]
Origin = Literal["admin", "provider"]
PAID = "payment"
REFUNDED = "payment_refund"
UNDONE = "payment_refund_undone"
"""Kinds of the transactions that payments make; their keys begin with them."""


class Payment(msgspec.Struct, frozen=True, kw_only=True):
    """A payment: whose account it tops up, with how much, and how far it got."""

    id: str
    provider: str
    reference: str | None
    payer_kind: str
    payer_id: str
    account_id: str
    created_by: str | None
    amount_cents: int
    currency: str
    save_card: bool
    state: PaymentState
    tx_id: str | None
    created_at: int
    paid_at: int | None
    checked_at: int


class Refund(msgspec.Struct, frozen=True, kw_only=True):
    """A payment, or a part of it, given back. `written_off` is what the account could not cover, in nano-units."""

    id: str
    payment_id: str
    amount_cents: int
    reason: str
    origin: Origin
    state: Literal["pending", "succeeded", "failed"]
    reference: str | None
    written_off: int
    tx_id: str
    undone_tx_id: str | None
    created_at: int
    checked_at: int
