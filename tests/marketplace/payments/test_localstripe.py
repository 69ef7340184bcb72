"""The network half of payments through Stripe, against a server that answers as Stripe does."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest
import stripe

from marketplace.http.dispatch import Desk, Incoming
from marketplace.payments import service
from marketplace.payments.port import GivenBack, Intent, Order, ProviderRefusedError, ProviderUnavailableError
from marketplace.payments.records import Payment
from marketplace.payments.stripe_provider import PAYMENT, StripeProvider
from marketplace.store.db import Database
from marketplace.workers.payments import PAUSE_US, reconcile
from tests.marketplace.office import Caller, Office
from tests.marketplace.payments.at_stripe import SECRET, balance, begin, clean, tell

if TYPE_CHECKING:
    from tests.marketplace.payments.conftest import LocalStripe


def order(payment_id: str, cents: int = 2000, customer: str | None = None) -> Order:
    return Order(payment_id=payment_id, account_id="a", amount_cents=cents, currency="USD", customer=customer)


def stored(office: Office, payment_id: str) -> Payment:
    with office.database.read() as unit:
        found = service.find(unit, payment_id)
    assert found is not None
    return found


def reference_of(office: Office, payment_id: str) -> str:
    reference = stored(office, payment_id).reference
    assert reference is not None
    return reference


def test_a_payment_from_its_order_to_its_refund(local_stripe: LocalStripe) -> None:
    provider = local_stripe.provider()
    made = provider.create_intent(order("p1"))
    assert (made.state, made.amount_cents, made.currency, made.received_cents) == ("pending", 2000, "USD", 0)
    assert made.client_secret is not None and made.client_secret.startswith(made.reference)
    assert provider.find_intent(made.reference) == made
    assert local_stripe.ask("GET", f"/v1/payment_intents/{made.reference}")["metadata"] == {PAYMENT: "p1"}
    local_stripe.pay(made.reference)
    found = provider.find_intent(made.reference)
    assert (found.state, found.received_cents, found.refunded_cents) == ("succeeded", 2000, 0)
    given = provider.refund(made.reference, 700, "r1")
    assert given.state == "succeeded" and given.reference.startswith("re_")
    assert provider.refund(made.reference, 700, "r1") == given  # found by our id, not given again
    assert provider.refund(made.reference, 100, "r2").reference != given.reference
    assert provider.find_intent(made.reference).refunded_cents == 800


def test_what_nobody_paid_is_ended_and_what_was_paid_is_not(local_stripe: LocalStripe) -> None:
    provider = local_stripe.provider()
    unpaid, paid = provider.create_intent(order("p2")), provider.create_intent(order("p3"))
    assert provider.cancel_intent(unpaid.reference).state == "canceled"
    assert provider.find_intent(unpaid.reference).state == "canceled"
    local_stripe.pay(paid.reference)
    assert provider.cancel_intent(paid.reference).state == "succeeded"


def test_customers_are_made_without_personal_data(local_stripe: LocalStripe) -> None:
    provider = local_stripe.provider()
    made = local_stripe.ask("GET", f"/v1/customers/{provider.create_customer('account-1')}")
    assert made["metadata"] == {"headrace_account": "account-1"}
    assert (made["name"], made["email"], made["phone"]) == (None, None, None)


def test_a_refusal_is_told_from_silence(local_stripe: LocalStripe) -> None:
    with pytest.raises(ProviderRefusedError):
        local_stripe.provider().find_intent("pi_unknown")
    wrong_key = StripeProvider("nonsense", SECRET, api_base=local_stripe.base, retries=0)
    with pytest.raises(ProviderUnavailableError, match="AuthenticationError"):  # ours to mend: nothing was decided
        wrong_key.create_intent(order("p4"))
    nowhere = StripeProvider("sk_test_1", SECRET, api_base="http://127.0.0.1:9", retries=0)
    with pytest.raises(ProviderUnavailableError, match="APIConnectionError"):
        nowhere.create_intent(order("p5"))


def test_what_stripe_refuses_ends_the_payment(shop_front: Office) -> None:
    person = shop_front.person()
    # localstripe knows no cards kept for later, and refuses them as Stripe refuses what it does not know.
    refused = shop_front.ask("payment_intent.create", {"amount_cents": 2000, "save_card": True}, person)
    assert (refused.status, refused.code) == (402, "PaymentRefused")
    (shown,) = shop_front.ask("payments.list", {}, person).body["payments"]
    assert shown["status"] == "canceled"
    with shop_front.database.read() as unit:
        customer = service.customer(unit, "stripe", person.account_id)
    assert customer is not None and customer.startswith("cus_")


def test_the_message_that_stripe_sends_credits_once(
    shop_front: Office, local_stripe: LocalStripe, address: str
) -> None:
    office, person = shop_front, shop_front.person()
    hook = {"url": f"{address}/api/v1/payments/webhook", "secret": SECRET, "events": ["payment_intent.succeeded"]}
    local_stripe.ask("POST", "/_config/webhooks/test", hook)
    payment = begin(office, person)
    reference = reference_of(office, payment)
    local_stripe.pay(reference)

    until, pause = time.monotonic() + 20, threading.Event()
    while stored(office, payment).state != "succeeded":
        assert time.monotonic() < until, "the message did not arrive"
        pause.wait(0.02)
    assert balance(office, person) == 2000
    event = local_stripe.event(reference)
    text = json.dumps(event)
    signed = stripe.WebhookSignature.generate_signature_header(text, SECRET, office.now // 1_000_000)
    again = office.ask("payments.webhook", raw=text.encode(), Stripe_Signature=signed)
    assert again.body == {"outcome": "duplicate"}
    office.wait(PAUSE_US / 1_000_000)
    reconcile(office.context)
    assert balance(office, person) == 2000 and clean(office)


def test_a_refund_here_and_one_made_at_stripe(shop_front: Office, local_stripe: LocalStripe) -> None:
    office, person, admin = shop_front, shop_front.person(), shop_front.person("admin")
    payment = begin(office, person)
    reference = reference_of(office, payment)
    local_stripe.pay(reference)
    office.wait(PAUSE_US / 1_000_000)
    assert reconcile(office.context).failed == 0  # the message was lost: the worker asks
    assert balance(office, person) == 2000
    ours = office.ask("payments.refund", {"payment_intent_id": payment, "amount_cents": 500}, admin)
    assert ours.body["refunds"][0]["status"] == "succeeded"
    local_stripe.ask("POST", "/v1/refunds", {"payment_intent": reference, "amount": 300})
    charge = local_stripe.ask("GET", f"/v1/payment_intents/{reference}")["latest_charge"]
    assert charge["amount_refunded"] == 800
    assert tell(office, "evt_refund", "charge.refunded", charge).body["outcome"] == "refunded"
    assert tell(office, "evt_again", "charge.refunded", charge).body["outcome"] == "unchanged"
    assert balance(office, person) == 1200 and clean(office)


def test_while_stripe_is_down_payments_wait_for_it(shop_front: Office, local_stripe: LocalStripe) -> None:
    office, person = shop_front, shop_front.person()
    local_stripe.stop()
    try:
        down = office.ask("payment_intent.create", {"amount_cents": 2000}, person, Idempotency_Key="k")
        assert (down.status, down.code, down.headers["Retry-After"]) == (503, "ServiceUnavailable", "5")
        office.wait(PAUSE_US / 1_000_000)
        assert reconcile(office.context).failed == 1
    finally:
        local_stripe.start()
    (shown,) = office.ask("payments.list", {}, person).body["payments"]
    assert (shown["status"], stored(office, shown["payment_intent_id"]).reference) == ("pending", None)
    office.wait(PAUSE_US / 1_000_000)
    assert reconcile(office.context).failed == 0
    reference = reference_of(office, shown["payment_intent_id"])
    again = office.ask("payment_intent.create", {"amount_cents": 2000}, person, Idempotency_Key="k")
    assert again.status == 200 and again.body["client_secret"].startswith(reference)
    local_stripe.pay(reference)
    office.wait(PAUSE_US / 1_000_000)
    reconcile(office.context)
    assert balance(office, person) == 2000 and clean(office)


class Killed(StripeProvider):
    """Stripe as a process meets it that is killed while it asks: before the question leaves, or before the answer."""

    when = "after"

    def create_intent(self, order: Order) -> Intent:
        if self.when == "after":
            super().create_intent(order)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it is dead")

    def refund(self, reference: str, amount_cents: int, refund_id: str) -> GivenBack:
        if self.when == "after":
            super().refund(reference, amount_cents, refund_id)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it is dead")


def die_asking(office: Office, local_stripe: LocalStripe, when: str, name: str, body: object, who: Caller) -> None:
    """Have a process of its own ask an operation, which kills it in the middle."""
    child = os.fork()
    if child == 0:
        try:
            provider = Killed("sk_test_12345", SECRET, api_base=local_stripe.base, retries=0)
            provider.when = when
            database = Database(office.database.url)
            desk = Desk(dataclasses.replace(office.context, database=database, payments=provider))
            sent = Incoming(headers={"authorization": f"Bearer {who.key}"}, body=json.dumps(body).encode())
            desk.serve(Office.OPERATIONS[name], sent)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_that_is_killed_while_it_asks_leaves_nothing_half_done(
    shop_front: Office, local_stripe: LocalStripe, when: str
) -> None:
    office, person, admin = shop_front, shop_front.person(), shop_front.person("admin")
    die_asking(office, local_stripe, when, "payment_intent.create", {"amount_cents": 2000}, person)
    (shown,) = office.ask("payments.list", {}, person).body["payments"]
    payment = shown["payment_intent_id"]
    assert stored(office, payment).state == "creating"
    office.wait(PAUSE_US / 1_000_000)
    reconcile(office.context)
    reference = reference_of(office, payment)
    local_stripe.pay(reference)
    office.wait(PAUSE_US / 1_000_000)
    reconcile(office.context)
    assert balance(office, person) == 2000

    die_asking(
        office, local_stripe, when, "payments.refund", {"payment_intent_id": payment, "amount_cents": 600}, admin
    )
    assert balance(office, person) == 1400  # it is off the account before Stripe is asked
    office.wait(PAUSE_US / 1_000_000)
    reconcile(office.context)
    given = local_stripe.ask("GET", f"/v1/refunds?payment_intent={reference}")["data"]
    assert [item["amount"] for item in given] == [600]  # once, whether it was given before the end or not
    (shown,) = office.ask("payments.list", {}, person).body["payments"]
    assert [item["status"] for item in shown["refunds"]] == ["succeeded"]
    assert balance(office, person) == 1400 and clean(office)
