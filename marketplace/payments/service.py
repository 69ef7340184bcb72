"""Payments: opened before their provider is asked, credited once when the provider says that the money is there.

Lock order: the payment's row, then what the ledger locks. What the provider says may come several times, late and out
of order: the state of the row and the key of the transaction make that it counts once.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Literal

import msgspec
from sqlalchemy import delete, func, insert, select, update

from marketplace.http.pagination import newest_first
from marketplace.ledger import ledger
from marketplace.payments import receipts, refunds
from marketplace.payments.money import nano
from marketplace.payments.port import Intent
from marketplace.payments.records import PAID, REFUNDED, UNDONE, Payment
from marketplace.payments.tables import payment, payment_customer, payment_event, payment_refund
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random, new_id

log = logging.getLogger(__name__)

KINDS = frozenset({PAID, REFUNDED, UNDONE})
Outcome = Literal["credited", "refunded", "canceled", "mismatched", "unchanged"]


class Moved(msgspec.Struct, frozen=True):
    """What a transaction moved: a payment, or a refund of it, perhaps one that was undone."""

    payment_id: str
    provider: str
    refund_id: str | None = None
    undone: bool = False


def begin(
    unit: WriteUnit,
    *,
    payment_id: str,
    provider: str,
    payer_kind: str,
    payer_id: str,
    account_id: str,
    created_by: str | None,
    amount_cents: int,
    currency: str,
    save_card: bool,
    now: int,
) -> Payment:
    """Write down that a payment is about to be asked for. Nothing was asked yet."""
    made = Payment(
        id=payment_id,
        provider=provider,
        reference=None,
        payer_kind=payer_kind,
        payer_id=payer_id,
        account_id=account_id,
        created_by=created_by,
        amount_cents=amount_cents,
        currency=currency,
        save_card=save_card,
        state="creating",
        tx_id=None,
        created_at=now,
        paid_at=None,
        checked_at=now,
    )
    unit.execute(insert(payment).values(**msgspec.structs.asdict(made)))
    return made


def find(unit: ReadUnit, payment_id: str) -> Payment | None:
    """Return the payment of that id."""
    row = unit.select(select(payment).where(payment.c.id == payment_id)).one_or_none()
    return None if row is None else Payment(**row._mapping)


def lock(unit: WriteUnit, payment_id: str) -> Payment | None:
    """Return the payment of that id; nobody else changes it until the unit ends."""
    row = unit.select(select(payment).where(payment.c.id == payment_id).with_for_update()).one_or_none()
    return None if row is None else Payment(**row._mapping)


def id_of(unit: ReadUnit, provider: str, reference: str) -> str | None:
    """Return the id of the payment that a provider calls so."""
    wanted = select(payment.c.id).where(payment.c.provider == provider, payment.c.reference == reference)
    found: str | None = unit.select(wanted).scalar_one_or_none()
    return found


def page(unit: ReadUnit, account_id: str | None, cursor: str | None, limit: int) -> list[Payment]:
    """Return payments of an account, or of all for None, newest first: one more than `limit` when there are more."""
    wanted = select(payment)
    if account_id is not None:
        wanted = wanted.where(payment.c.account_id == account_id)
    rows = unit.select(newest_first(wanted, payment.c.created_at, payment.c.id, cursor, limit))
    return [Payment(**row._mapping) for row in rows]


def pending(unit: ReadUnit, account_id: str) -> int:
    """Return the nano-units of payments of an account that are under way."""
    wanted = select(func.coalesce(func.sum(payment.c.amount_cents), 0)).where(
        payment.c.account_id == account_id, payment.c.state.in_(("creating", "pending"))
    )
    return nano(int(unit.select(wanted).scalar_one()))


def apply(unit: WriteUnit, payment_id: str, intent: Intent, *, now: int, random: Random) -> Outcome:
    """Take over what the provider says about a payment; says what it changed.

    Money that arrived is credited whatever was thought of the payment before, if it is as much as was asked for, in
    its currency; if not, the payment is set aside for somebody to look at.
    """
    found = lock(unit, payment_id)
    if found is None or found.state == "mismatched":
        return "unchanged"
    if found.reference not in (None, intent.reference):
        log.error("payment %s is %s, not %s", found.id, found.reference, intent.reference)
        return "unchanged"
    if found.reference is None:
        state = "pending" if found.state == "creating" else found.state
        found = _change(unit, found, reference=intent.reference, state=state)
    if intent.state == "canceled" and found.state == "pending":
        _change(unit, found, state="canceled")
        return "canceled"
    if intent.state != "succeeded":
        return "unchanged"
    outcome: Outcome = "unchanged"
    if found.state != "succeeded":
        if not _agrees(found, intent):
            log.error("payment %s: %s does not agree with what was asked for", found.id, intent)
            _change(unit, found, state="mismatched")
            return "mismatched"
        found = _credit(unit, found, now, random)
        outcome = "credited"
    if refunds.take_over(unit, found, intent.refunded_cents, now=now, random=random):
        outcome = "refunded"
    return outcome


def cancel(unit: WriteUnit, payment_id: str) -> bool:
    """End a payment that its provider never accepted; False where it was over before."""
    found = lock(unit, payment_id)
    if found is None or found.state not in ("creating", "pending"):
        return False
    _change(unit, found, state="canceled")
    return True


def note_event(
    unit: WriteUnit, provider: str, event_id: str, kind: str, payment_id: str | None, request_id: str, now: int
) -> bool:
    """Write down that a message of a provider is applied in this unit; False when another delivery of it was.

    Two deliveries at once come here one after the other: the second waits for what becomes of the first.
    """
    row = {
        "provider": provider,
        "event_id": event_id,
        "kind": kind,
        "payment_id": payment_id,
        "outcome": "",
        "request_id": request_id,
        "received_at": now,
    }
    unit.insert_missing(payment_event, [row])
    mine = (payment_event.c.provider == provider, payment_event.c.event_id == event_id)
    return bool(unit.select(select(payment_event.c.request_id).where(*mine)).scalar_one() == request_id)


def note_outcome(unit: WriteUnit, provider: str, event_id: str, outcome: str) -> None:
    """Write down what became of a message."""
    mine = (payment_event.c.provider == provider, payment_event.c.event_id == event_id)
    unit.execute(update(payment_event).where(*mine).values(outcome=outcome))


def customer(unit: ReadUnit, provider: str, account_id: str) -> str | None:
    """Return what a provider calls the owner of an account, where it keeps cards of theirs."""
    mine = (payment_customer.c.provider == provider, payment_customer.c.account_id == account_id)
    found: str | None = unit.select(select(payment_customer.c.reference).where(*mine)).scalar_one_or_none()
    return found


def keep_customer(unit: WriteUnit, provider: str, account_id: str, reference: str) -> None:
    """Remember what a provider calls the owner of an account."""
    unit.insert_missing(payment_customer, [{"provider": provider, "account_id": account_id, "reference": reference}])


def forget(unit: WriteUnit, user_id: str, account_id: str) -> int:
    """Take a person off their payments, and forget what providers call them; the payments themselves stay. Returns how
    many providers knew them."""
    unit.execute(update(payment).where(payment.c.created_by == user_id).values(created_by=None))
    return unit.execute(delete(payment_customer).where(payment_customer.c.account_id == account_id)).rowcount


def described(unit: ReadUnit, tx_ids: Collection[str]) -> dict[str, Moved]:
    """Return what these transactions moved, by transaction."""
    ids = sorted(tx_ids)
    paid = select(payment.c.tx_id, payment.c.id, payment.c.provider).where(payment.c.tx_id.in_(ids))
    found = {row.tx_id: Moved(row.id, row.provider) for row in unit.select(paid)}
    for column in (payment_refund.c.tx_id, payment_refund.c.undone_tx_id):
        given = (
            select(column.label("tx_id"), payment_refund.c.id, payment_refund.c.payment_id, payment.c.provider)
            .join(payment, payment.c.id == payment_refund.c.payment_id)
            .where(column.in_(ids))
        )
        undone = column is payment_refund.c.undone_tx_id
        for row in unit.select(given):
            found[row.tx_id] = Moved(row.payment_id, row.provider, row.id, undone)
    return found


def _agrees(found: Payment, intent: Intent) -> bool:
    return intent.currency.upper() == found.currency and intent.received_cents == found.amount_cents


def _credit(unit: WriteUnit, found: Payment, now: int, random: Random) -> Payment:
    amount = nano(found.amount_cents)
    posted = ledger.post(
        unit,
        tx_id=new_id(now, random),
        key=f"{PAID}:{found.id}",
        kind=PAID,
        entries=[(found.account_id, amount), (ledger.CLEARING, -amount)],
        now=now,
        memo=f"payment {found.id}",
    )
    credited = _change(unit, found, state="succeeded", tx_id=posted.tx_id, paid_at=now)
    receipts.send_receipt(unit, credited, now=now, random=random)
    return credited


def _change(unit: WriteUnit, found: Payment, **values: str | int) -> Payment:
    unit.execute(update(payment).where(payment.c.id == found.id).values(**values))
    return msgspec.structs.replace(found, **values)
