"""Checks of what rentals cost: meters and their charges, deposits and what became of them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import case, func, literal, select

from marketplace.ledger.audit_finding import Checked
from marketplace.ledger.money import round_half_up
from marketplace.ledger.rental_tables import deposit, rental_charge, rental_meter
from marketplace.ledger.tables import entry, ledger_tx
from marketplace.store.db import ReadUnit


def meters_charge_their_time(unit: ReadUnit) -> Checked:
    """Charged = Σ charges = rate × charged time, the rest carried or, at the end, rounded half up; every charge posted
    what its account paid of it; exempt meters charge nothing, and no meter runs backwards."""
    checked = Checked()
    sums = (
        select(
            rental_charge.c.meter_id,
            func.sum(rental_charge.c.amount).label("amount"),
            func.max(rental_charge.c.end_at).label("last"),
        )
        .group_by(rental_charge.c.meter_id)
        .subquery()
    )
    found = select(rental_meter, func.coalesce(sums.c.amount, 0).label("amount"), sums.c.last).join(
        sums, sums.c.meter_id == rental_meter.c.id, isouter=True
    )
    for row in unit.stream(found):
        checked.count += 1
        cost = row.rate * row.charged_us
        due = (cost - row.remainder) // row.per_us if row.stopped_at is None else round_half_up(cost, row.per_us)
        exact = row.stopped_at is not None or (cost - row.remainder) % row.per_us == 0
        if not (row.charged == row.amount == due and exact):
            checked.wrong(
                f"meter {row.id} charged {row.charged}, its charges sum to {row.amount}, its time costs {due}"
            )
        if row.exempt and row.charged:
            checked.wrong(f"meter {row.id} is exempt and charged {row.charged}")
        if row.metered_to < row.started_at or (row.last or 0) > row.metered_to:
            checked.wrong(f"meter {row.id} stands at {row.metered_to}, and began or charged later")
    for row in _unposted(unit):
        checked.wrong(f"charge {row.tx_id} of meter {row.meter_id} posted {row.moved}, {row.paid} were to be paid")
    return checked


def deposits_ended_once(unit: ReadUnit) -> Checked:
    """A captured deposit has the transaction that charged all of it; others have none."""
    checked = Checked(unit.select(select(func.count()).select_from(deposit)).scalar_one())
    moved = func.coalesce(
        func.sum(case((entry.c.account_id == deposit.c.account_id, -entry.c.amount), else_=literal(0))), 0
    )
    found = (
        select(deposit.c.id, deposit.c.state, deposit.c.amount, deposit.c.tx_id, moved.label("moved"))
        .join(entry, entry.c.tx_id == deposit.c.tx_id, isouter=True)
        .group_by(deposit.c.id, deposit.c.state, deposit.c.amount, deposit.c.tx_id)
    )
    for row in unit.stream(found):
        captured = row.state == "captured"
        if captured != (row.tx_id is not None) or row.moved != (row.amount if captured else 0):
            checked.wrong(f"deposit {row.id} of {row.amount} is {row.state}, transaction {row.tx_id} took {row.moved}")
    strays = (
        select(ledger_tx.c.idempotency_key)
        .join(deposit, deposit.c.tx_id == ledger_tx.c.id, isouter=True)
        .where(ledger_tx.c.kind == "reservation", deposit.c.id.is_(None))
    )
    for key in unit.select(strays).scalars():
        checked.wrong(f"transaction {key} captures no deposit")
    return checked


def _unposted(unit: ReadUnit) -> list[Any]:
    mine = case((entry.c.account_id == rental_meter.c.account_id, -entry.c.amount), else_=literal(0))
    moved = func.coalesce(func.sum(mine), 0)
    paid = rental_charge.c.amount - rental_charge.c.written_off
    found = (
        select(rental_charge.c.tx_id, rental_charge.c.meter_id, paid.label("paid"), moved.label("moved"))
        .join(rental_meter, rental_meter.c.id == rental_charge.c.meter_id)
        .join(entry, entry.c.tx_id == rental_charge.c.tx_id, isouter=True)
        .group_by(rental_charge.c.tx_id, rental_charge.c.meter_id, rental_charge.c.amount, rental_charge.c.written_off)
        .having(moved != paid)
    )
    return list(unit.select(found).all())
