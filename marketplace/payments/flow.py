"""Payments step by step: a row, then the provider, then the row again. No transaction is open while the network is
used, and whatever a crash leaves between two steps can be done again.

All of it works on a `Context`; who may do it was decided before. What a payment came to is in the audit log as the
platform's own doing: it follows from what the provider answered.
"""

from __future__ import annotations

from marketplace.events import service as events
from marketplace.http.operation import Context
from marketplace.payments import refunds, service
from marketplace.payments.port import Intent, Notice, Order, ProviderRefusedError
from marketplace.payments.records import Payment, Refund
from marketplace.store.db import WriteUnit


def ask(context: Context, opened: Payment) -> Intent:
    """Ask the provider for a payment that has a row, again or for the first time, and note what it answered.

    ProviderUnavailableError leaves the row for a later attempt; ProviderRefusedError ends the payment.
    """
    provider = context.payments
    try:
        intent = provider.create_intent(
            Order(
                payment_id=opened.id,
                account_id=opened.account_id,
                amount_cents=opened.amount_cents,
                currency=opened.currency,
                customer=_customer(context, opened) if opened.save_card else None,
            )
        )
    except ProviderRefusedError:
        abandon(context, opened)
        raise
    take_over(context, opened.id, intent)
    return intent


def look(context: Context, opened: Payment) -> Intent:
    """Ask the provider how a payment stands, and note it. ProviderUnavailableError, ProviderRefusedError."""
    assert opened.reference is not None, "the provider knows it"
    intent = context.payments.find_intent(opened.reference)
    take_over(context, opened.id, intent)
    return intent


def end(context: Context, opened: Payment) -> None:
    """End a payment that nobody made. ProviderUnavailableError, ProviderRefusedError."""
    assert opened.reference is not None, "the provider knows it"
    take_over(context, opened.id, context.payments.cancel_intent(opened.reference))


def abandon(context: Context, opened: Payment) -> None:
    """End a payment that the provider refused, or may never have heard of."""

    def work(unit: WriteUnit) -> None:
        if service.cancel(unit, opened.id):
            _record(context, unit, "payments.canceled", opened, opened.id)

    context.database.transact(work)


def give_back(context: Context, paid: Payment, begun: Refund) -> None:
    """Have the provider give back what was taken off the account, again or for the first time.

    ProviderUnavailableError leaves it pending; ProviderRefusedError returns the money to the account.
    """
    assert paid.reference is not None, "what was paid is known to the provider"
    try:
        given = context.payments.refund(paid.reference, begun.amount_cents, begun.id)
    except ProviderRefusedError:
        fail_refund(context, begun)
        raise
    if given.state == "failed":
        fail_refund(context, begun)
    elif given.state == "succeeded":

        def work(unit: WriteUnit) -> None:
            now, random = context.clock(), context.random
            if refunds.succeed(unit, paid, begun.id, given.reference, now=now, random=random):
                _record(context, unit, "payments.refund_succeeded", paid, begun.id)

        context.database.transact(work)


def take_over(context: Context, payment_id: str, intent: Intent) -> service.Outcome:
    """Note how a payment stands."""

    def work(unit: WriteUnit) -> service.Outcome:
        outcome = service.apply(unit, payment_id, intent, now=context.clock(), random=context.random)
        found = service.find(unit, payment_id)
        if outcome != "unchanged" and found is not None:
            _record(context, unit, f"payments.{outcome}", found, intent.reference)
        return outcome

    return context.database.transact(work)


def fail_refund(context: Context, begun: Refund) -> None:
    """Return the money of a refund that failed to its account."""

    def work(unit: WriteUnit) -> None:
        if _fail_refund(context, unit, begun):
            paid = service.find(unit, begun.payment_id)
            assert paid is not None, "payments are never removed"
            _record(context, unit, "payments.refund_undone", paid, begun.id)

    context.database.transact(work)


def receive(context: Context, unit: WriteUnit, notice: Notice, request_id: str, now: int) -> str:
    """Apply a message of the provider in this unit, once for its event; says what became of it."""
    name = context.payments.name
    payment_id = _about(unit, name, notice)
    if not service.note_event(unit, name, notice.event_id, notice.kind, payment_id, request_id, now):
        return "duplicate"
    outcome = "ignored"
    if payment_id is not None and notice.intent is not None:
        outcome = service.apply(unit, payment_id, notice.intent, now=now, random=context.random)
    elif notice.failed_refund is not None:
        begun = refunds.find(unit, notice.failed_refund)
        if begun is not None and _fail_refund(context, unit, begun):
            outcome = "refund_undone"
    service.note_outcome(unit, name, notice.event_id, outcome)
    return outcome


def _record(context: Context, unit: WriteUnit, action: str, about: Payment, subject_id: str) -> None:
    events.record(
        unit,
        action=action,
        actor_kind="system",
        actor_id="",
        credential_id="",
        owner_id=about.payer_id,
        subject_id=subject_id,
        detail={"payment": about.id},
        request_id="",
        now=context.clock(),
        random=context.random,
    )


def _about(unit: WriteUnit, provider: str, notice: Notice) -> str | None:
    """Our id of the payment that a message is about; None where it is about none of ours."""
    if notice.intent is None:
        return None
    known = service.id_of(unit, provider, notice.intent.reference)
    if known is not None or notice.payment_id is None:
        return known
    found = service.find(unit, notice.payment_id)
    return None if found is None or found.provider != provider else found.id


def _fail_refund(context: Context, unit: WriteUnit, begun: Refund) -> bool:
    paid = service.lock(unit, begun.payment_id)
    return paid is not None and refunds.fail(unit, paid, begun.id, now=context.clock(), random=context.random)


def _customer(context: Context, opened: Payment) -> str:
    """Who keeps a card, as the provider calls them; made at the first time."""
    provider = context.payments
    with context.database.read() as unit:
        known = service.customer(unit, provider.name, opened.account_id)
    if known is not None:
        return known
    made = provider.create_customer(opened.account_id)
    context.database.transact(lambda unit: service.keep_customer(unit, provider.name, opened.account_id, made))
    return made
