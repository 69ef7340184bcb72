"""Checks of payments: what was paid is credited once, and what was given back was paid before."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, and_, case, func, literal, or_, select

from marketplace.ledger.audit_finding import Checked
from marketplace.ledger.ledger import CLEARING, WRITEOFF
from marketplace.ledger.tables import entry, ledger_tx
from marketplace.payments.money import CENT
from marketplace.payments.records import PAID, REFUNDED, UNDONE
from marketplace.payments.tables import payment, payment_refund
from marketplace.store.db import ReadUnit


def paid_is_credited_once(unit: ReadUnit) -> Checked:
    """A payment that was made has one transaction, under its own key, which credits its account with what was paid;
    others have none, and nothing else is credited as a payment."""
    checked = Checked(unit.select(select(func.count()).select_from(payment)).scalar_one())
    c = payment.c
    credits = (
        select(
            c.id,
            c.state,
            c.amount_cents,
            c.tx_id,
            ledger_tx.c.id.label("posted"),
            ledger_tx.c.kind,
            _moved(c.account_id).label("customer"),
            _moved(literal(CLEARING)).label("clearing"),
        )
        .join(ledger_tx, ledger_tx.c.idempotency_key == literal(f"{PAID}:") + c.id, isouter=True)
        .join(entry, entry.c.tx_id == ledger_tx.c.id, isouter=True)
        .group_by(c.id, c.state, c.amount_cents, c.tx_id, ledger_tx.c.id, ledger_tx.c.kind)
        .subquery()
    )
    found = credits.c
    made = found.state == "succeeded"
    wrong = or_(
        ~made & found.posted.is_not(None),
        made & found.posted.is_(None),
        made & or_(found.posted != found.tx_id, found.tx_id.is_(None), found.kind != PAID),
        made & or_(found.customer != found.amount_cents * CENT, found.clearing != -found.amount_cents * CENT),
    )
    for row in unit.select(select(credits).where(wrong)):
        checked.wrong(
            f"payment {row.id} of {row.amount_cents} cents is {row.state}, credited by {row.tx_id}; "
            f"transaction {row.posted} of kind {row.kind} posted {row.customer} to its account"
        )
    for key in _strays(unit, PAID, c.tx_id):
        checked.wrong(f"transaction {key} credits a payment that was not made")
    return checked


def refunds_within_payment(unit: ReadUnit) -> Checked:
    """All refunds of a payment together, but for those that failed, are at most what was paid; each took off the
    account what was not written off, and what failed brought it back."""
    checked = Checked()
    refund = payment_refund.c
    counted = case((refund.state == "failed", 0), else_=refund.amount_cents)
    sums = (
        select(payment.c.id, payment.c.state, payment.c.amount_cents, func.sum(counted).label("given"))
        .join(payment_refund, refund.payment_id == payment.c.id)
        .group_by(payment.c.id, payment.c.state, payment.c.amount_cents)
    )
    for row in unit.select(sums):
        checked.count += 1
        if row.given > row.amount_cents or row.state != "succeeded":
            checked.wrong(f"payment {row.id} of {row.amount_cents} cents is {row.state}, {row.given} were given back")
    for row in _unposted(unit, refund.tx_id, REFUNDED, -1):
        checked.wrong(f"refund {row.id} of {row.amount_cents} cents: transaction {row.tx} posted {row.customer}")
    for row in _unposted(unit, refund.undone_tx_id, UNDONE, 1):
        checked.wrong(f"refund {row.id}, {row.state}, is undone by {row.tx}, which posted {row.customer}")
    for kind, column in ((REFUNDED, refund.tx_id), (UNDONE, refund.undone_tx_id)):
        for key in _strays(unit, kind, column):
            checked.wrong(f"transaction {key} belongs to no refund")
    return checked


def _unposted(unit: ReadUnit, column: ColumnElement[Any], kind: str, sign: int) -> list[Any]:
    """Refunds whose transaction in that column is not there, is there without reason, or moved something else."""
    refund = payment_refund.c
    wanted = literal(True) if kind == REFUNDED else refund.state == "failed"
    amount = refund.amount_cents * CENT
    posted = (
        select(
            refund.id,
            refund.state,
            refund.amount_cents,
            column.label("tx"),
            case((wanted, 1), else_=0).label("wanted"),
            ledger_tx.c.kind,
            (amount - refund.written_off).label("covered"),
            refund.written_off,
            _moved(payment.c.account_id).label("customer"),
            _moved(literal(WRITEOFF)).label("writeoff"),
            _moved(literal(CLEARING)).label("clearing"),
        )
        .join(payment, payment.c.id == refund.payment_id)
        .join(ledger_tx, ledger_tx.c.id == column, isouter=True)
        .join(entry, entry.c.tx_id == ledger_tx.c.id, isouter=True)
        .group_by(
            refund.id,
            refund.state,
            refund.amount_cents,
            refund.written_off,
            column,
            ledger_tx.c.kind,
        )
        .subquery()
    )
    p = posted.c
    moved = and_(
        p.kind == kind,
        p.customer == sign * p.covered,
        p.writeoff == sign * p.written_off,
        p.clearing == -sign * (p.covered + p.written_off),
    )
    wrong = or_(
        and_(p.wanted == 1, or_(p.kind.is_(None), ~moved)),
        and_(p.wanted == 0, p.tx.is_not(None)),
    )
    return list(unit.select(select(posted).where(wrong)))


def _moved(to: ColumnElement[Any]) -> ColumnElement[int]:
    """What the entries of a transaction sum to on an account."""
    return func.coalesce(func.sum(case((entry.c.account_id == to, entry.c.amount), else_=literal(0))), 0)


def _strays(unit: ReadUnit, kind: str, column: ColumnElement[Any]) -> list[str]:
    """Keys of transactions of a kind that no row of the column names."""
    wanted = (
        select(ledger_tx.c.idempotency_key)
        .join(column.table, column == ledger_tx.c.id, isouter=True)
        .where(or_(ledger_tx.c.kind == kind, ledger_tx.c.idempotency_key.like(f"{kind}:%")), column.is_(None))
        .order_by(ledger_tx.c.idempotency_key)
    )
    return list(unit.select(wanted).scalars())
