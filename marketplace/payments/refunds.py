"""Refunds: the money leaves the account before the provider is asked to give it back, and returns where that fails.

So nothing is given back that was spent in the meantime, and whatever a crash interrupts is only made again under the
same key. All refunds of a payment are decided under the lock of its row.
"""

from __future__ import annotations

import msgspec
from sqlalchemy import func, insert, select, update

from marketplace.ledger import chain, ledger
from marketplace.ledger.book import AccountState, InsufficientFundsError
from marketplace.payments import receipts
from marketplace.payments.money import nano
from marketplace.payments.records import REFUNDED, UNDONE, Origin, Payment, Refund
from marketplace.payments.tables import payment_refund
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random, new_id


class RefundTooLargeError(ValueError):
    """All refunds together would exceed the payment; `left_cents` may still be given back."""

    def __init__(self, left_cents: int) -> None:
        super().__init__(f"{left_cents} cents are left")
        self.left_cents = left_cents


def find(unit: ReadUnit, refund_id: str) -> Refund | None:
    """Return the refund of that id."""
    row = unit.select(select(payment_refund).where(payment_refund.c.id == refund_id)).one_or_none()
    return None if row is None else Refund(**row._mapping)


def of_payments(unit: ReadUnit, payment_ids: list[str]) -> dict[str, list[Refund]]:
    """Return the refunds of payments, oldest first, by payment."""
    wanted = (
        select(payment_refund)
        .where(payment_refund.c.payment_id.in_(payment_ids))
        .order_by(payment_refund.c.created_at, payment_refund.c.id)
    )
    found: dict[str, list[Refund]] = {}
    for row in unit.select(wanted):
        found.setdefault(row.payment_id, []).append(Refund(**row._mapping))
    return found


def given_back(unit: ReadUnit, payment_id: str) -> int:
    """Return the cents of a payment that were given back, or are about to be."""
    wanted = select(func.coalesce(func.sum(payment_refund.c.amount_cents), 0)).where(
        payment_refund.c.payment_id == payment_id, payment_refund.c.state != "failed"
    )
    return int(unit.select(wanted).scalar_one())


def begin(unit: WriteUnit, paid: Payment, amount_cents: int | None, *, reason: str, now: int, random: Random) -> Refund:
    """Take an amount, or all that is left, off the account again; the provider was not asked yet. The payment is
    locked. RefundTooLargeError; InsufficientFundsError when the account does not have as much: credit is not given
    back."""
    left = paid.amount_cents - given_back(unit, paid.id)
    cents = left if amount_cents is None else amount_cents
    if not 0 < cents <= left:
        raise RefundTooLargeError(left)
    amount, state = nano(cents), _locked(unit, paid, now)
    if not state.unlimited and state.posted - state.held < amount:
        raise InsufficientFundsError(paid.account_id, amount, state.posted - state.held)
    return _post(unit, paid, cents, amount, reason=reason, origin="admin", now=now, random=random)


def take_over(unit: WriteUnit, paid: Payment, refunded_cents: int, *, now: int, random: Random) -> bool:
    """Post what the provider gave back without being asked by us; says whether there was any. The payment is locked.

    That money is gone: what the account cannot cover is written off.
    """
    cents = min(refunded_cents, paid.amount_cents) - given_back(unit, paid.id)
    if cents <= 0:
        return False
    amount, state = nano(cents), _locked(unit, paid, now)
    covered = amount if state.unlimited else min(amount, max(0, state.available))
    _post(unit, paid, cents, covered, reason="made at the payment provider", origin="provider", now=now, random=random)
    return True


def succeed(unit: WriteUnit, paid: Payment, refund_id: str, reference: str, *, now: int, random: Random) -> bool:
    """The provider gave the money back: whoever paid is told, once. False where it was known before."""
    mine = (payment_refund.c.id == refund_id, payment_refund.c.state == "pending")
    changed = unit.execute(update(payment_refund).where(*mine).values(state="succeeded", reference=reference))
    if not changed.rowcount:
        return False
    given = find(unit, refund_id)
    assert given is not None, "it was just changed"
    receipts.send_refund(unit, paid, given, now=now, random=random)
    return True


def fail(unit: WriteUnit, paid: Payment, refund_id: str, *, now: int, random: Random) -> bool:
    """The provider did not give the money back: the account has it again, once. Whoever was told that it goes back is
    told that it does not. The payment is locked."""
    found = find(unit, refund_id)
    if found is None or found.state == "failed" or found.payment_id != paid.id:
        return False
    amount = nano(found.amount_cents)
    entries = [
        (paid.account_id, amount - found.written_off),
        (ledger.WRITEOFF, found.written_off),
        (ledger.CLEARING, -amount),
    ]
    posted = ledger.post(
        unit,
        tx_id=new_id(now, random),
        key=f"{UNDONE}:{refund_id}",
        kind=UNDONE,
        entries=[(name, value) for name, value in entries if value],
        now=now,
        memo=f"refund of payment {paid.id}, undone",
        refers_to=paid.tx_id,
    )
    changed = update(payment_refund).where(payment_refund.c.id == refund_id)
    unit.execute(changed.values(state="failed", undone_tx_id=posted.tx_id))
    if found.state == "succeeded":
        receipts.send_refund_failed(unit, paid, found, now=now, random=random)
    return True


def _locked(unit: WriteUnit, paid: Payment, now: int) -> AccountState:
    """What the account has, until the unit ends."""
    chain.lock(unit, chain.DIRECT)
    ledger.ensure_platform(unit, {ledger.CLEARING, ledger.WRITEOFF}, now)
    return ledger.lock_accounts(unit, {paid.account_id, ledger.CLEARING, ledger.WRITEOFF})[paid.account_id].state()


def _post(
    unit: WriteUnit,
    paid: Payment,
    cents: int,
    covered: int,
    *,
    reason: str,
    origin: Origin,
    now: int,
    random: Random,
) -> Refund:
    refund_id, amount = new_id(now, random), nano(cents)
    entries = [(paid.account_id, -covered), (ledger.WRITEOFF, covered - amount), (ledger.CLEARING, amount)]
    posted = ledger.post(
        unit,
        tx_id=new_id(now, random),
        key=f"{REFUNDED}:{refund_id}",
        kind=REFUNDED,
        entries=[(name, value) for name, value in entries if value],
        now=now,
        memo=f"refund of payment {paid.id}",
        refers_to=paid.tx_id,
    )
    made = Refund(
        id=refund_id,
        payment_id=paid.id,
        amount_cents=cents,
        reason=reason,
        origin=origin,
        state="pending" if origin == "admin" else "succeeded",
        reference=None,
        written_off=amount - covered,
        tx_id=posted.tx_id,
        undone_tx_id=None,
        created_at=now,
        checked_at=now,
    )
    unit.execute(insert(payment_refund).values(**msgspec.structs.asdict(made)))
    if made.state == "succeeded":
        receipts.send_refund(unit, paid, made, now=now, random=random)
    return made
