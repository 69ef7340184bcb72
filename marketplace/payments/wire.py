"""Requests and answers of payments. Amounts are whole cents of the currency that the payment names."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from marketplace.accounts.wire import ByTeam
from marketplace.http.pagination import DEFAULT_LIMIT
from marketplace.http.wire import CursorText, Id, Instant, Limit, Wire
from marketplace.payments.money import MAX_CENTS

AmountCents = Annotated[int, Field(ge=1, le=MAX_CENTS)]
Status = Literal["pending", "succeeded", "canceled", "mismatched"]
"""mismatched: what arrived is not what was asked for; an admin looks at it"""


class CreateRequest(Wire):
    """A payment to make, for the caller's account or a team's."""

    amount_cents: AmountCents
    team_id: Id | None = None
    save_card: bool = False
    """whether the payment provider keeps the card for later payments"""


class CreateAnswer(Wire):
    """A payment that can be made now."""

    payment_intent_id: str
    client_secret: str | None
    """for the payment provider's own form; null where payments are made by hand or the payment is over"""
    status: Status


class ListRequest(Wire):
    """A page of payments, newest first: the caller's, a team's, or everybody's for admins."""

    selector: Literal["ByToken", "All"] | ByTeam = "ByToken"
    limit: Limit = DEFAULT_LIMIT
    cursor: CursorText | None = None


class RefundAnswer(Wire):
    """What was given back of a payment. One that failed was returned to the account."""

    refund_id: str
    amount_cents: int
    reason: str
    status: Literal["pending", "succeeded", "failed"]
    created_at: Instant


class PaymentAnswer(Wire):
    """A payment and its receipt."""

    payment_intent_id: str
    provider: str
    payer: dict[Literal["User", "Team"], str]
    amount_cents: int
    currency: str
    status: Status
    created_at: Instant
    paid_at: Instant | None
    receipt_number: str | None
    """null until it is paid"""
    transaction_id: str | None
    refunded_cents: int
    refunds: list[RefundAnswer]


class ListAnswer(Wire):
    """Payments, and where to go on."""

    payments: list[PaymentAnswer]
    next_cursor: str | None


class ConfirmRequest(Wire):
    """A payment by hand whose money arrived."""

    payment_intent_id: Id


class RefundRequest(Wire):
    """What to give back of a payment: an amount, or all that is left."""

    payment_intent_id: Id
    amount_cents: AmountCents | None = None
    reason: Annotated[str, StringConstraints(max_length=1024)] = ""


class WebhookAnswer(Wire):
    """What became of a message."""

    outcome: str
