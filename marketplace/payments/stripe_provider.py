"""Stripe as the payment provider, through its own library (https://docs.stripe.com/api, library `stripe`).

Intents and refunds carry our ids in their metadata, so that a message about one is recognised even when the answer to
the call that made it was lost. Amounts are in cents, which is what Stripe calls the smallest unit of the currencies
that the platform may have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import stripe

from marketplace.payments.port import (
    GivenBack,
    Intent,
    Notice,
    Order,
    ProviderRefusedError,
    ProviderUnavailableError,
    RefundState,
    SignatureError,
    State,
)

PAYMENT = "headrace_payment"
REFUND = "headrace_refund"
SIGNATURE = "stripe-signature"
TOLERANCE_US = 300_000_000
"""How far the time in a signature may be from ours, either way."""
TIMEOUT_S = 20.0
RETRIES = 2
_STATES: dict[str, State] = {"succeeded": "succeeded", "canceled": "canceled"}
_REFUND_STATES: dict[str, RefundState] = {"succeeded": "succeeded", "failed": "failed", "canceled": "failed"}
_REFUSALS = (stripe.InvalidRequestError, stripe.CardError, stripe.IdempotencyError)
_MAX_LISTED = 100
T = TypeVar("T")


class StripeProvider:
    """Payments through Stripe. Safe to share between threads."""

    name = "stripe"
    by_hand = False

    def __init__(
        self, secret_key: str, webhook_secret: str, *, api_base: str | None = None, retries: int = RETRIES
    ) -> None:
        """The secrets are Stripe's `sk_…` and `whsec_…`; `api_base` is another address than Stripe's own."""
        self._webhook_secret = webhook_secret
        self._client = stripe.StripeClient(
            secret_key,
            base_addresses={} if api_base is None else {"api": api_base},
            http_client=stripe.RequestsClient(timeout=TIMEOUT_S),
            max_network_retries=retries,
        )

    def __repr__(self) -> str:
        """Leave the secrets out."""
        return "StripeProvider()"

    def create_customer(self, account_id: str) -> str:
        """Make a customer without personal data; they enter their card at Stripe."""
        made = _ask(
            lambda: self._client.v1.customers.create(
                {"metadata": {"headrace_account": account_id}}, {"idempotency_key": f"customer:{account_id}"}
            )
        )
        return str(made.id)

    def create_intent(self, order: Order) -> Intent:
        """Ask for a payment. With a customer, the card is kept for later payments."""
        params: dict[str, Any] = {
            "amount": order.amount_cents,
            "currency": order.currency.lower(),
            "metadata": {PAYMENT: order.payment_id},
        }
        if order.customer is not None:
            params |= {"customer": order.customer, "setup_future_usage": "off_session"}
        made = _ask(
            lambda: self._client.v1.payment_intents.create(
                params,  # type: ignore[arg-type]  # a dict of what is asked for, not all that could be
                {"idempotency_key": f"payment:{order.payment_id}"},
            )
        )
        return _intent(made.to_dict())

    def find_intent(self, reference: str) -> Intent:
        """Return a payment as it is now, with what went back of it."""
        found = _ask(lambda: self._client.v1.payment_intents.retrieve(reference, {"expand": ["latest_charge"]}))
        return _intent(found.to_dict())

    def cancel_intent(self, reference: str) -> Intent:
        """End a payment. Where it cannot be ended because it was made, it is returned as it is."""
        try:
            return _intent(_ask(lambda: self._client.v1.payment_intents.cancel(reference)).to_dict())
        except ProviderRefusedError:
            return self.find_intent(reference)

    def refund(self, reference: str, amount_cents: int, refund_id: str) -> GivenBack:
        """Give back part or all of a payment. Stripe forgets keys after a day, so an earlier one is looked for."""
        listed = _ask(lambda: self._client.v1.refunds.list({"payment_intent": reference, "limit": _MAX_LISTED}))
        made = next(
            (item for item in (one.to_dict() for one in listed.data) if _metadata(item).get(REFUND) == refund_id), None
        )
        if made is None:
            made = _ask(
                lambda: self._client.v1.refunds.create(
                    {"payment_intent": reference, "amount": amount_cents, "metadata": {REFUND: refund_id}},
                    {"idempotency_key": f"refund:{refund_id}"},
                )
            ).to_dict()
        return GivenBack(reference=str(made["id"]), state=_REFUND_STATES.get(str(made.get("status")), "pending"))

    def notice(self, raw: bytes, headers: Mapping[str, str], now: int) -> Notice:
        """Check the signature (HMAC-SHA256 over time and body, compared in constant time) and read the message.

        The library compares the time with the computer's clock; here it is compared with `now`.
        """
        header = headers.get(SIGNATURE, "")
        try:
            text = raw.decode()
            stripe.WebhookSignature.verify_header(text, header, self._webhook_secret, None)
            event: dict[str, Any] = json.loads(text)
            at = int(next(part[2:] for part in header.split(",") if part.startswith("t=")))
        except (stripe.SignatureVerificationError, ValueError, StopIteration) as error:
            raise SignatureError("the signature does not fit the body") from error
        if abs(now - at * 1_000_000) > TOLERANCE_US:
            raise SignatureError("the signature is too old, or from the future")
        try:
            return _notice(event)
        except (KeyError, TypeError, AttributeError) as error:
            raise SignatureError("the body is not an event") from error


def _notice(event: dict[str, Any]) -> Notice:
    kind, about = str(event["type"]), event["data"]["object"]
    event_id, payment_id = str(event["id"]), _metadata(about).get(PAYMENT)
    if kind.startswith("payment_intent."):
        return Notice(event_id=event_id, kind=kind, payment_id=payment_id, intent=_intent(about))
    if kind == "charge.refunded" and about.get("payment_intent"):
        return Notice(event_id=event_id, kind=kind, payment_id=payment_id, intent=_of_charge(about))
    if kind == "refund.failed":
        return Notice(event_id=event_id, kind=kind, failed_refund=_metadata(about).get(REFUND))
    return Notice(event_id=event_id, kind=kind)


def _intent(found: Mapping[str, Any]) -> Intent:
    charge = found.get("latest_charge")
    charged: Mapping[str, Any] = charge if isinstance(charge, Mapping) else {}
    state: State = _STATES.get(str(found["status"]), "pending")
    amount = int(found["amount"])
    received = int(found.get("amount_received", amount)) if state == "succeeded" else 0
    return Intent(
        reference=str(found["id"]),
        state=state,
        amount_cents=amount,
        currency=str(found["currency"]).upper(),
        received_cents=received,
        refunded_cents=int(charged.get("amount_refunded") or 0),
        client_secret=found.get("client_secret"),
    )


def _of_charge(charge: Mapping[str, Any]) -> Intent:
    """The payment that a charge belongs to: a charge of which something went back was paid."""
    amount = int(charge["amount"])
    return Intent(
        reference=str(charge["payment_intent"]),
        state="succeeded",
        amount_cents=amount,
        currency=str(charge["currency"]).upper(),
        received_cents=int(charge.get("amount_captured", amount)),
        refunded_cents=int(charge["amount_refunded"]),
    )


def _metadata(found: Mapping[str, Any]) -> Mapping[str, str]:
    return found.get("metadata") or {}


def _ask(call: Callable[[], T]) -> T:
    """Make a call. What Stripe refused, it did not do; of every other failure nobody knows."""
    try:
        return call()
    except _REFUSALS as error:
        raise ProviderRefusedError(error.user_message or f"Stripe refused: {error.code}") from error
    except stripe.StripeError as error:
        raise ProviderUnavailableError(type(error).__name__) from error
