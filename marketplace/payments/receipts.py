"""Receipts by mail: for every payment, for what is given back, and where that fails."""

from __future__ import annotations

from marketplace.notify import outbox
from marketplace.payments.money import units
from marketplace.payments.records import Payment, Refund
from marketplace.store.db import WriteUnit
from marketplace.store.ids import Random
from marketplace.teams import service as teams
from marketplace.users import service as users


def number(payment_id: str) -> str:
    """The receipt's number: the payment's own, so that it is never given twice."""
    return f"R-{payment_id}"


def send_receipt(unit: WriteUnit, paid: Payment, *, now: int, random: Random) -> None:
    """Tell whoever paid that the money is there, once."""
    _send(unit, paid, "receipt", f"receipt:{paid.id}", {"amount": units(paid.amount_cents)}, now, random)


def send_refund(unit: WriteUnit, paid: Payment, given: Refund, *, now: int, random: Random) -> None:
    """Tell whoever paid that money goes back, once."""
    values = {"amount": units(given.amount_cents), "paid": units(paid.amount_cents), "reason": given.reason}
    _send(unit, paid, "refund", f"refund:{given.id}", values, now, random)


def send_refund_failed(unit: WriteUnit, paid: Payment, given: Refund, *, now: int, random: Random) -> None:
    """Tell whoever was told of a refund that it failed, and where the money is now, once."""
    values = {"amount": units(given.amount_cents), "paid": units(paid.amount_cents)}
    _send(unit, paid, "refund-failed", f"refund-failed:{given.id}", values, now, random)


def _send(
    unit: WriteUnit, paid: Payment, template: str, dedupe: str, values: dict[str, str], now: int, random: Random
) -> None:
    for user_id, email, name in _people(unit, paid):
        outbox.enqueue(
            unit,
            template=template,
            to=email,
            values={"name": name or email, "receipt_number": number(paid.id), "paid_in": paid.currency, **values},
            now=now,
            random=random,
            user_id=user_id,
            dedupe=f"{dedupe}:{user_id}",
        )


def _people(unit: WriteUnit, paid: Payment) -> list[tuple[str, str, str]]:
    """Who asked for the payment; the owners of the team, where its key did or that person is gone."""
    found = None if paid.created_by is None else users.find(unit, paid.created_by)
    if found is not None:
        return [(found.id, found.email, found.name)]
    if paid.payer_kind != "team":
        return []
    members = teams.members(unit, [paid.payer_id])
    return [(item.user_id, item.email, item.name) for item in members if item.role == "Owner"]
