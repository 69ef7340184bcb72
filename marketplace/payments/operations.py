"""Operations on payments: begin one, list them, say that money arrived, give it back, hear from the provider."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from marketplace.accounts import service as accounts
from marketplace.accounts.wire import ByTeam
from marketplace.http import idempotency
from marketplace.http.acting import party
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call, Keyed, Operation, Reads, Steps, Writes
from marketplace.http.pagination import next_cursor
from marketplace.http.wire import Nothing, Wire
from marketplace.ledger.book import InsufficientFundsError
from marketplace.payments import flow, receipts, refunds, service
from marketplace.payments.money import CENT, nano
from marketplace.payments.port import Intent, Notice, ProviderRefusedError, ProviderUnavailableError, SignatureError
from marketplace.payments.records import Payment, Refund
from marketplace.payments.refunds import RefundTooLargeError
from marketplace.payments.wire import (
    ConfirmRequest,
    CreateAnswer,
    CreateRequest,
    ListAnswer,
    ListRequest,
    PaymentAnswer,
    RefundAnswer,
    RefundRequest,
    Status,
    WebhookAnswer,
)
from marketplace.settings import service as settings
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import new_id
from marketplace.users.permissions import Permission

log = logging.getLogger(__name__)


def create(call: Call, request: CreateRequest, key: str | None) -> tuple[CreateAnswer, bool]:
    """Write the payment down, then ask the provider for it. With a key, the same payment is asked for again."""
    context = call.context

    def work(unit: WriteUnit) -> tuple[Payment, bool]:
        known = _claimed(call, unit, "payment_intent.create", request, key)
        if known is not None:
            found = service.find(unit, known)
            assert found is not None, "it was written with its key"
            return found, True
        opened = _open(call, unit, request)
        _keep(call, unit, key, opened.id)
        return opened, False

    opened, replayed = context.database.transact(work)
    intent = _asked(call, opened)
    with context.database.read() as unit:
        now = service.find(unit, opened.id)
    assert now is not None, "payments are never removed"
    secret = intent.client_secret if intent is not None and now.state == "pending" else None
    return CreateAnswer(payment_intent_id=now.id, client_secret=secret, status=_status(now)), replayed


def list_payments(call: Call, unit: ReadUnit, request: ListRequest) -> ListAnswer:
    """Return a page of payments with their receipts."""
    account_id = _listed(call, unit, request)
    rows = service.page(unit, account_id, request.cursor, request.limit)
    given = refunds.of_payments(unit, [row.id for row in rows])
    return ListAnswer(
        payments=[_shown(row, given.get(row.id, [])) for row in rows[: request.limit]],
        next_cursor=next_cursor([(row.created_at, row.id) for row in rows], request.limit),
    )


def confirm(call: Call, unit: WriteUnit, request: ConfirmRequest) -> PaymentAnswer:
    """Credit a payment by hand whose money arrived; once, however often it is said."""
    found = _locked(unit, request.payment_intent_id)
    provider = call.context.payments
    if not provider.by_hand or found.provider != provider.name:
        raise Refusal(
            Code.INVALID_TRANSITION, "The payment provider says when this payment is made.", param="payment_intent_id"
        )
    if found.state == "canceled":
        raise Refusal(Code.INVALID_TRANSITION, "The payment was canceled.", param="payment_intent_id")
    if found.state != "succeeded":
        arrived = Intent(
            reference=found.id,
            state="succeeded",
            amount_cents=found.amount_cents,
            currency=found.currency,
            received_cents=found.amount_cents,
        )
        service.apply(unit, found.id, arrived, now=call.now, random=call.context.random)
        call.record(
            unit, "payments.confirm", owner_id=found.payer_id, subject_id=found.id, nano=nano(found.amount_cents)
        )
    return _answer(unit, found.id)


def refund(call: Call, request: RefundRequest, key: str | None) -> tuple[PaymentAnswer, bool]:
    """Take the amount off the account, then have the provider give it back."""
    context = call.context

    def work(unit: WriteUnit) -> tuple[Refund, bool]:
        known = _claimed(call, unit, "payments.refund", request, key)
        if known is not None:
            found = refunds.find(unit, known)
            assert found is not None, "it was written with its key"
            return found, True
        begun = _begin_refund(call, unit, request)
        _keep(call, unit, key, begun.id)
        return begun, False

    begun, replayed = context.database.transact(work)
    if begun.state == "pending":
        with context.database.read() as unit:
            paid = service.find(unit, begun.payment_id)
        assert paid is not None, "payments are never removed"
        try:
            flow.give_back(context, paid, begun)
        except ProviderUnavailableError:
            log.warning("refund %s is pending: the payment provider does not answer", begun.id)
        except ProviderRefusedError as error:
            raise Refusal(Code.PAYMENT_REFUSED, f"The payment provider refused: {error}") from error
    with context.database.read() as unit:
        return _answer(unit, begun.payment_id), replayed


def webhook(call: Call, request: Nothing) -> WebhookAnswer:
    """Apply a message of the payment provider, once, if it is from the provider."""
    context = call.context
    try:
        notice = context.payments.notice(call.raw, call.headers, call.now)
    except SignatureError as error:
        raise Refusal(Code.INVALID_SIGNATURE, f"The message is not accepted: {error}.") from error

    def work(unit: WriteUnit) -> str:
        outcome = flow.receive(context, unit, notice, call.request_id, call.now)
        if outcome not in ("duplicate", "ignored", "unchanged"):
            subject = notice.failed_refund or (notice.intent.reference if notice.intent else notice.event_id)
            call.record(
                unit, f"payments.{outcome}", owner_id=_payer(unit, call, notice), subject_id=subject,
                event=notice.event_id,
            )  # fmt: skip
        return outcome

    return WebhookAnswer(outcome=context.database.transact(work))


def _payer(unit: ReadUnit, call: Call, notice: Notice) -> str:
    """Whose matter a message is."""
    begun = None if notice.failed_refund is None else refunds.find(unit, notice.failed_refund)
    payment_id = None if begun is None else begun.payment_id
    if notice.intent is not None:
        payment_id = service.id_of(unit, call.context.payments.name, notice.intent.reference)
    found = None if payment_id is None else service.find(unit, payment_id)
    return "" if found is None else found.payer_id


def _claimed(call: Call, unit: WriteUnit, name: str, request: Wire, key: str | None) -> str | None:
    """The id of what was made under the key before; None where it is new. Refusal: IdempotencyKeyReused."""
    if key is None:
        return None
    asked = idempotency.request_hash(name, call.version, request.model_dump())
    kept = idempotency.claim(unit, call.caller.id, key, asked, call.now)
    return None if kept is None else msgspec.json.decode(kept, type=str)


def _keep(call: Call, unit: WriteUnit, key: str | None, made: str) -> None:
    if key is not None:
        idempotency.keep(unit, call.caller.id, key, msgspec.json.encode(made).decode())


def _open(call: Call, unit: WriteUnit, request: CreateRequest) -> Payment:
    mine, now = party(call, unit, request.team_id), settings.current(unit)
    amount = nano(request.amount_cents)
    if not now.payment_minimum <= amount <= now.payment_maximum:
        low, high = -(-now.payment_minimum // CENT), now.payment_maximum // CENT
        message = f"amount_cents: a payment is from {low} to {high} cents"
        raise Refusal(Code.VALIDATION_FAILED, message, param="amount_cents")
    if request.save_card and call.context.payments.by_hand:
        raise Refusal(Code.VALIDATION_FAILED, "save_card: payments by hand keep no cards", param="save_card")
    opened = service.begin(
        unit,
        payment_id=new_id(call.now, call.context.random),
        provider=call.context.payments.name,
        payer_kind=mine.kind,
        payer_id=mine.id,
        account_id=mine.account_id,
        created_by=None if call.caller.user is None else call.caller.user.id,
        amount_cents=request.amount_cents,
        currency=now.server_currency,
        save_card=request.save_card,
        now=call.now,
    )
    call.record(unit, "payments.create", owner_id=mine.id, subject_id=opened.id, nano=amount, currency=opened.currency)
    return opened


def _asked(call: Call, opened: Payment) -> Intent | None:
    """The payment as the provider knows it; None where nobody can be asked any more."""
    context = call.context
    if opened.provider != context.payments.name or opened.state in ("canceled", "mismatched"):
        return None
    try:
        if opened.state == "creating":
            return flow.ask(context, opened)
        return None if context.payments.by_hand else flow.look(context, opened)
    except ProviderUnavailableError as error:
        message = "The payment provider does not answer. The same request with the same Idempotency-Key goes on here."
        raise Refusal(Code.SERVICE_UNAVAILABLE, message, headers=(("Retry-After", "5"),)) from error
    except ProviderRefusedError as error:
        raise Refusal(Code.PAYMENT_REFUSED, f"The payment provider refused: {error}") from error


def _begin_refund(call: Call, unit: WriteUnit, request: RefundRequest) -> Refund:
    paid = _locked(unit, request.payment_intent_id)
    if paid.state != "succeeded" or paid.provider != call.context.payments.name:
        raise Refusal(Code.INVALID_TRANSITION, "Only what was paid here can be given back.", param="payment_intent_id")
    try:
        begun = refunds.begin(
            unit, paid, request.amount_cents, reason=request.reason, now=call.now, random=call.context.random
        )
    except RefundTooLargeError as error:
        raise Refusal(
            Code.REFUND_EXCEEDS_PAYMENT,
            f"{error.left_cents} cents of the payment are left to give back.",
            param="amount_cents",
            details={"left_cents": error.left_cents},
        ) from error
    except InsufficientFundsError as error:
        raise Refusal(
            Code.INSUFFICIENT_FUNDS, "The account does not have as much any more.", param="amount_cents"
        ) from error
    call.record(
        unit,
        "payments.refund",
        owner_id=paid.payer_id,
        subject_id=begun.id,
        payment=paid.id,
        nano=nano(begun.amount_cents),
    )
    return begun


def _listed(call: Call, unit: ReadUnit, request: ListRequest) -> str | None:
    """Whose payments are listed; None for everybody's."""
    everything = Permission.PAYMENTS_READ_ALL in call.caller.permissions
    if request.selector == "All":
        if not everything:
            raise Refusal(Code.PERMISSION_DENIED, "Everybody's payments are for admins.", param="selector")
        return None
    if not isinstance(request.selector, ByTeam):
        return party(call, unit, None).account_id
    team_id = request.selector.team_id
    found = accounts.of_owner(unit, "team", team_id) if everything else None
    return party(call, unit, team_id, param="selector.ByTeam").account_id if found is None else found


def _locked(unit: WriteUnit, payment_id: str) -> Payment:
    found = service.lock(unit, payment_id)
    if found is None:
        raise Refusal(Code.PAYMENT_NOT_FOUND, "There is no such payment.", param="payment_intent_id")
    return found


def _answer(unit: ReadUnit, payment_id: str) -> PaymentAnswer:
    found = service.find(unit, payment_id)
    assert found is not None, "payments are never removed"
    return _shown(found, refunds.of_payments(unit, [payment_id]).get(payment_id, []))


def _status(found: Payment) -> Status:
    return "pending" if found.state == "creating" else found.state


def _shown(found: Payment, given: list[Refund]) -> PaymentAnswer:
    return PaymentAnswer(
        payment_intent_id=found.id,
        provider=found.provider,
        payer={"Team" if found.payer_kind == "team" else "User": found.payer_id},
        amount_cents=found.amount_cents,
        currency=found.currency,
        status=_status(found),
        created_at=found.created_at,
        paid_at=found.paid_at,
        receipt_number=None if found.paid_at is None else receipts.number(found.id),
        transaction_id=found.tx_id,
        refunded_cents=sum(item.amount_cents for item in given if item.state != "failed"),
        refunds=[
            RefundAnswer(
                refund_id=item.id,
                amount_cents=item.amount_cents,
                reason=item.reason,
                status=item.state,
                created_at=item.created_at,
            )
            for item in given
        ],
    )


_ID = "019a0f6c-2a00-7abc-8def-000000000008"
_EXAMPLE = {
    "payment_intent_id": _ID,
    "provider": "stripe",
    "payer": {"User": "019a0f6c-2a00-7abc-8def-000000000001"},
    "amount_cents": 2000,
    "currency": "USD",
    "status": "succeeded",
    "created_at": "2026-11-21T01:00:00Z",
    "paid_at": "2026-11-21T01:00:42Z",
    "receipt_number": f"R-{_ID}",
    "transaction_id": "019a0f6c-2a00-7abc-8def-000000000006",
    "refunded_cents": 0,
    "refunds": [],
}

OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="payment_intent.create",
        summary="Begin a payment that tops up an account.",
        path="/api/v2/payment_intent/create",
        request=CreateRequest,
        response=CreateAnswer,
        permission=Permission.PAYMENTS_CREATE,
        rate="write",
        idempotent=True,
        handler=Keyed(create),
        example={"amount_cents": 2000},
        answer={
            "payment_intent_id": _ID,
            "client_secret": "pi_3Q0aZ2eZvKYlo2C_secret_8Jm1",
            "status": "pending",
        },
        errors=(Code.NOT_TEAM_MEMBER, Code.PAYMENT_REFUSED),
    ),
    Operation(
        name="payments.list",
        summary="Payments with their receipts and refunds, newest first.",
        path="/api/v1/payments/list",
        request=ListRequest,
        response=ListAnswer,
        permission=Permission.PAYMENTS_READ,
        rate="read",
        handler=Reads(list_payments),
        example={"selector": "ByToken", "limit": 20},
        answer={"payments": [_EXAMPLE], "next_cursor": None},
        errors=(Code.NOT_TEAM_MEMBER,),
    ),
    Operation(
        name="payments.confirm",
        summary="Say that the money of a payment by hand arrived.",
        path="/api/v1/payments/confirm",
        request=ConfirmRequest,
        response=PaymentAnswer,
        permission=Permission.PAYMENTS_SETTLE,
        rate="write",
        handler=Writes(confirm),
        example={"payment_intent_id": _ID},
        answer={**_EXAMPLE, "provider": "manual"},
        errors=(Code.PAYMENT_NOT_FOUND, Code.INVALID_TRANSITION),
    ),
    Operation(
        name="payments.refund",
        summary="Give back a payment, or a part of it.",
        path="/api/v1/payments/refund",
        request=RefundRequest,
        response=PaymentAnswer,
        permission=Permission.PAYMENTS_SETTLE,
        rate="write",
        idempotent=True,
        handler=Keyed(refund),
        example={"payment_intent_id": _ID, "amount_cents": 500, "reason": "unused"},
        answer={**_EXAMPLE, "refunded_cents": 500},
        errors=(
            Code.PAYMENT_NOT_FOUND,
            Code.INVALID_TRANSITION,
            Code.REFUND_EXCEEDS_PAYMENT,
            Code.INSUFFICIENT_FUNDS,
            Code.PAYMENT_REFUSED,
        ),
    ),
    Operation(
        name="payments.webhook",
        summary="What the payment provider tells; its signature is the credential.",
        path="/api/v1/payments/webhook",
        request=Nothing,
        response=WebhookAnswer,
        permission=None,
        rate="webhook",
        opaque=True,
        handler=Steps(webhook),
        example={},
        answer={"outcome": "credited"},
        errors=(Code.INVALID_SIGNATURE,),
    ),
)
