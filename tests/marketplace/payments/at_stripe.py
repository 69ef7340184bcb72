"""An office whose payments go through Stripe: its messages, signed, and a stand-in that remembers what it was asked."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import stripe

from marketplace.http.dispatch import Desk
from marketplace.ledger.audit import audit
from marketplace.payments.port import GivenBack, Intent, Order, ProviderRefusedError, ProviderUnavailableError
from marketplace.payments.stripe_provider import PAYMENT, StripeProvider
from tests.marketplace.office import Answer, Caller, Office

SECRET = "whsec_of_the_test"


class Lines(StripeProvider):
    """Stripe without its network: it remembers what it was asked for by key, and can fail before or after."""

    def __init__(self) -> None:
        super().__init__("sk_test_12345", SECRET)
        self.made: dict[str, Intent] = {}
        self.given: dict[str, GivenBack] = {}
        self.silent_after = 0
        self.refuses = False

    def create_intent(self, order: Order) -> Intent:
        intent = Intent(
            reference=f"pi_{order.payment_id}",
            state="pending",
            amount_cents=order.amount_cents,
            currency=order.currency,
            client_secret="pi_secret",
        )
        known = self.made.setdefault(order.payment_id, intent)
        self._perhaps_lose_the_answer()
        return known

    def find_intent(self, reference: str) -> Intent:
        return self.made[reference.removeprefix("pi_")]

    def cancel_intent(self, reference: str) -> Intent:
        return Intent(reference=reference, state="canceled", amount_cents=0, currency="USD")

    def refund(self, reference: str, amount_cents: int, refund_id: str) -> GivenBack:
        if self.refuses:
            raise ProviderRefusedError("no")
        given = self.given.setdefault(refund_id, GivenBack(reference=f"re_{refund_id}", state="succeeded"))
        self._perhaps_lose_the_answer()
        return given

    def _perhaps_lose_the_answer(self) -> None:
        if self.silent_after:
            self.silent_after -= 1
            raise ProviderUnavailableError("lost")


def at_stripe(office: Office) -> Lines:
    lines = Lines()
    office.context = dataclasses.replace(office.context, payments=lines)
    office.desk = Desk(office.context)
    return lines


def tell(office: Office, event_id: str, kind: str, about: dict[str, Any], *, age_s: int = 0) -> Answer:
    text = json.dumps({"id": event_id, "object": "event", "type": kind, "data": {"object": about}})
    signed = stripe.WebhookSignature.generate_signature_header(text, SECRET, office.now // 1_000_000 - age_s)
    return office.ask("payments.webhook", raw=text.encode(), Stripe_Signature=signed)


def paid(payment_id: str, cents: int = 2000, currency: str = "usd") -> dict[str, Any]:
    return {
        "id": f"pi_{payment_id}",
        "object": "payment_intent",
        "status": "succeeded",
        "amount": cents,
        "amount_received": cents,
        "currency": currency,
        "metadata": {PAYMENT: payment_id},
    }


def refunded(payment_id: str, cents: int) -> dict[str, Any]:
    charge = {"id": "ch_1", "amount": 2000, "amount_captured": 2000, "amount_refunded": cents, "currency": "usd"}
    return {**charge, "payment_intent": f"pi_{payment_id}", "metadata": {}}


def balance(office: Office, who: Caller) -> int:
    return int(office.ask("account.info", {}, who).body["balance"])


def begin(office: Office, who: Caller, cents: int = 2000) -> str:
    made = office.ask("payment_intent.create", {"amount_cents": cents}, who)
    assert made.status == 200, made.body
    return str(made.body["payment_intent_id"])


def clean(office: Office) -> bool:
    with office.database.read() as unit:
        return audit(unit).clean
