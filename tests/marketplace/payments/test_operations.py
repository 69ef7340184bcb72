"""Payments over the API: by hand, and as Stripe's messages tell of them."""

from __future__ import annotations

import json
import threading

from marketplace.payments.port import Intent
from marketplace.payments.stripe_provider import PAYMENT
from marketplace.workers.payments import PAUSE_US, reconcile
from tests.marketplace.office import Office
from tests.marketplace.payments.at_stripe import (
    SECRET,
    Lines,
    at_stripe,
    balance,
    begin,
    clean,
    paid,
    refunded,
    tell,
)


def test_a_payment_by_hand_counts_once_an_admin_says_so(office: Office) -> None:
    person, admin = office.person(), office.person("admin")
    payment = begin(office, person)
    assert (balance(office, person), office.ask("account.info", {}, person).body["pending"]) == (0, 2000)
    for _ in range(2):
        confirmed = office.ask("payments.confirm", {"payment_intent_id": payment}, admin)
        assert (confirmed.status, confirmed.body["status"]) == (200, "succeeded")
    assert balance(office, person) == 2000
    part = office.ask("payments.refund", {"payment_intent_id": payment, "amount_cents": 500}, admin)
    assert (part.body["refunded_cents"], part.body["refunds"][0]["status"]) == (500, "succeeded")
    more = office.ask("payments.refund", {"payment_intent_id": payment, "amount_cents": 1501}, admin)
    assert (more.status, more.code, more.param) == (409, "RefundExceedsPayment", "amount_cents")
    assert balance(office, person) == 1500
    listed = office.ask("payments.list", {}, person).body["payments"]
    assert [item["payment_intent_id"] for item in listed] == [payment]
    assert office.ask("payments.list", {}, office.person()).body["payments"] == []
    assert office.ask("payments.list", {"selector": "All"}, person).code == "PermissionDenied"
    assert clean(office)


def test_the_same_message_from_eight_threads_credits_once(office: Office) -> None:
    at_stripe(office)
    person = office.person()
    payment = begin(office, person)
    together, outcomes = threading.Barrier(8), []

    def deliver() -> None:
        together.wait()
        outcomes.append(tell(office, "evt_1", "payment_intent.succeeded", paid(payment)).body["outcome"])

    threads = [threading.Thread(target=deliver) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["credited"] + ["duplicate"] * 7
    assert tell(office, "evt_2", "payment_intent.succeeded", paid(payment)).body["outcome"] == "unchanged"
    assert balance(office, person) == 2000
    line = office.ask("account.transactions_list", {}, person).body["transactions"][0]
    assert line["info"] == {"Stripe": {"Payment": {"payment_intent_id": payment, "auto_top_up": False}}}
    assert clean(office)


def test_messages_that_do_not_prove_themselves_change_nothing(office: Office) -> None:
    at_stripe(office)
    person = office.person()
    payment = begin(office, person)
    body = json.dumps({"id": "e", "type": "payment_intent.succeeded", "data": {"object": paid(payment)}}).encode()
    for header in ("", "t=1,v1=00", "nonsense"):
        assert office.ask("payments.webhook", raw=body, Stripe_Signature=header).code == "InvalidSignature"
    assert tell(office, "e", "payment_intent.succeeded", paid(payment), age_s=301).code == "InvalidSignature"
    assert tell(office, "e", "payment_intent.succeeded", paid(payment), age_s=-302).code == "InvalidSignature"
    assert balance(office, person) == 0


def test_what_does_not_agree_is_set_aside(office: Office) -> None:
    at_stripe(office)
    person = office.person()
    for number, other in enumerate((paid("x", 1999), paid("x", currency="eur"))):
        payment = begin(office, person)
        about = {**other, "id": f"pi_{payment}", "metadata": {PAYMENT: payment}}
        assert tell(office, f"e{number}", "payment_intent.succeeded", about).body["outcome"] == "mismatched"
    assert balance(office, person) == 0


def test_a_lost_answer_is_made_good_by_the_worker_or_the_same_key(office: Office) -> None:
    lines, person = at_stripe(office), office.person()
    lines.silent_after = 2
    lost = office.ask("payment_intent.create", {"amount_cents": 2000}, person, Idempotency_Key="k")
    assert lost.status == 503
    other = office.ask("payment_intent.create", {"amount_cents": 3000}, person)
    assert other.status == 503
    again = office.ask("payment_intent.create", {"amount_cents": 2000}, person, Idempotency_Key="k")
    assert (again.status, again.body["client_secret"]) == (200, "pi_secret")
    assert again.headers["Idempotency-Replayed"] == "true"
    reused = office.ask("payment_intent.create", {"amount_cents": 9}, person, Idempotency_Key="k")
    assert reused.code == "IdempotencyKeyReused"
    office.wait(PAUSE_US / 1_000_000)
    assert reconcile(office.context).failed == 0
    assert len(lines.made) == 2
    for payment in lines.made:
        lines.made[payment] = Intent(
            reference=f"pi_{payment}",
            state="succeeded",
            amount_cents=lines.made[payment].amount_cents,
            currency="USD",
            received_cents=lines.made[payment].amount_cents,
        )
    office.wait(PAUSE_US / 1_000_000)
    reconcile(office.context)
    assert balance(office, person) == 5000
    assert clean(office)


def test_refunds_survive_a_lost_answer_and_are_undone_where_stripe_refuses(office: Office) -> None:
    lines, person, admin = at_stripe(office), office.person(), office.person("admin")
    payment = begin(office, person)
    tell(office, "e1", "payment_intent.succeeded", paid(payment))
    lines.silent_after = 1
    lost = office.ask("payments.refund", {"payment_intent_id": payment, "amount_cents": 700}, admin)
    assert lost.body["refunds"][0]["status"] == "pending"
    assert balance(office, person) == 1300
    office.wait(PAUSE_US / 1_000_000)
    reconcile(office.context)
    assert len(lines.given) == 1
    assert tell(office, "e2", "charge.refunded", refunded(payment, 700)).body["outcome"] == "unchanged"
    assert tell(office, "e3", "charge.refunded", refunded(payment, 900)).body["outcome"] == "refunded"
    assert balance(office, person) == 1100
    lines.refuses = True
    refused = office.ask("payments.refund", {"payment_intent_id": payment}, admin)
    assert (refused.status, refused.code) == (402, "PaymentRefused")
    shown = office.ask("payments.list", {}, person).body["payments"][0]
    assert [item["status"] for item in shown["refunds"]] == ["succeeded", "succeeded", "failed"]
    assert (shown["refunded_cents"], balance(office, person)) == (900, 1100)
    assert clean(office)


def test_the_secrets_are_in_no_repr() -> None:
    assert "sk_test" not in repr(Lines()) and SECRET not in repr(Lines())
