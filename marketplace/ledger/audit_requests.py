"""Checks of requests: holds, usage records, prices, and that what was charged is what was metered."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, case, func, literal, or_, select

from marketplace.ledger.audit_finding import Checked
from marketplace.ledger.holds import opening_fingerprint
from marketplace.ledger.ledger import WRITEOFF, revenue_account
from marketplace.ledger.meters import PriceVersion, fingerprint
from marketplace.ledger.money import MoneyError, Price, Tokens
from marketplace.ledger.rules import OUTCOMES, charge_nano
from marketplace.ledger.tables import entry, hold, ledger_tx, price_version, usage_record
from marketplace.store.db import ReadUnit

_usage = usage_record.c


def charged_once(unit: ReadUnit) -> Checked:
    """A usage record with a cost has one transaction, whose entries are its cost and what was written off; others
    have none."""
    checked = Checked(unit.select(select(func.count()).select_from(usage_record)).scalar_one())

    def moved(to: Any) -> ColumnElement[int]:
        return func.coalesce(func.sum(case((entry.c.account_id == to, entry.c.amount), else_=literal(0))), 0)

    charges = (
        select(
            _usage.request_id,
            _usage.cost,
            _usage.written_off,
            ledger_tx.c.idempotency_key,
            moved(_usage.account_id).label("customer"),
            moved(WRITEOFF).label("writeoff"),
            moved(literal(revenue_account("")) + _usage.model).label("revenue"),
            func.count(entry.c.seq).label("entries"),
        )
        .select_from(usage_record)
        .join(ledger_tx, (ledger_tx.c.id == _usage.request_id) & (ledger_tx.c.kind == "usage"), isouter=True)
        .join(entry, entry.c.tx_id == ledger_tx.c.id, isouter=True)
        .group_by(_usage.request_id, _usage.cost, _usage.written_off, ledger_tx.c.idempotency_key)
        .subquery()
    )
    c = charges.c
    wrong = select(charges).where(
        or_(
            c.customer != c.written_off - c.cost,
            c.writeoff != -c.written_off,
            c.revenue != c.cost,
            (c.cost > 0) & c.idempotency_key.is_(None),
            (c.cost == 0) & c.idempotency_key.is_not(None),
            c.idempotency_key != literal("usage:") + c.request_id,
        )
    )
    for row in unit.select(wrong):
        checked.wrong(
            f"request {row.request_id}: cost {row.cost}, written off {row.written_off}; "
            f"posted customer {row.customer}, write-off {row.writeoff}, revenue {row.revenue} "
            f"under key {row.idempotency_key}"
        )
    strays = (
        select(ledger_tx.c.idempotency_key)
        .join(usage_record, _usage.request_id == ledger_tx.c.id, isouter=True)
        .where(
            or_(ledger_tx.c.kind == "usage", ledger_tx.c.idempotency_key.like("usage:%")), _usage.request_id.is_(None)
        )
    )
    for row in unit.select(strays):
        checked.wrong(f"transaction {row.idempotency_key} charges for no usage record")
    return checked


def holds_ended_once(unit: ReadUnit) -> Checked:
    """A hold is settled when, and only when, it has a usage record, which names the same account, key, model and
    price."""
    checked = Checked(unit.select(select(func.count()).select_from(hold)).scalar_one())
    joined = select(
        hold.c.request_id,
        hold.c.state,
        hold.c.closed_at,
        _usage.request_id.label("used"),
        or_(
            hold.c.account_id != _usage.account_id,
            hold.c.key_id != _usage.key_id,
            hold.c.model != _usage.model,
            hold.c.node != _usage.node,
        ).label("differs"),
    ).join(usage_record, _usage.request_id == hold.c.request_id, isouter=True)
    found = joined.where(
        or_(
            (hold.c.state == "settled") & _usage.request_id.is_(None),
            (hold.c.state != "settled") & _usage.request_id.is_not(None),
            (hold.c.state == "open") & hold.c.closed_at.is_not(None),
            (hold.c.state != "open") & hold.c.closed_at.is_(None),
            hold.c.account_id != _usage.account_id,
            hold.c.key_id != _usage.key_id,
            hold.c.model != _usage.model,
            hold.c.node != _usage.node,
        )
    )
    for row in unit.select(found):
        what = "another account, key, model or node than" if row.differs else "yes" if row.used else "no"
        checked.wrong(f"hold {row.request_id} is {row.state}, closed at {row.closed_at}; usage record: {what}")
    orphans = (
        select(_usage.request_id)
        .join(hold, hold.c.request_id == _usage.request_id, isouter=True)
        .where(hold.c.request_id.is_(None))
    )
    for row in unit.select(orphans):
        checked.wrong(f"usage record {row.request_id} has no hold")
    return checked


def deadlines_kept(unit: ReadUnit, before: int) -> Checked:
    """No hold is still open whose deadline was before that time (µs)."""
    checked = Checked()
    for row in unit.select(select(hold.c.request_id, hold.c.deadline).where(hold.c.state == "open")):
        checked.count += 1
        if row.deadline < before:
            checked.wrong(f"hold {row.request_id} is open, its deadline was {row.deadline}")
    return checked


def overruns_flagged(unit: ReadUnit) -> Checked:
    """Cost ≤ hold unless flagged as overrun; only an overrun is ever written off."""
    checked = Checked(unit.select(select(func.count()).select_from(usage_record)).scalar_one())
    found = (
        select(_usage.request_id, _usage.cost, _usage.overrun, _usage.written_off, hold.c.amount)
        .join(hold, hold.c.request_id == _usage.request_id)
        .where(
            or_(
                (_usage.cost > hold.c.amount) & ~_usage.overrun,
                (_usage.cost <= hold.c.amount) & _usage.overrun,
                (_usage.written_off > 0) & ~_usage.overrun,
            )
        )
    )
    for row in unit.select(found):
        checked.wrong(
            f"request {row.request_id}: cost {row.cost}, hold {row.amount}, written off {row.written_off}, "
            f"{'flagged' if row.overrun else 'not flagged'} as overrun"
        )
    return checked


def costs_follow_counters(unit: ReadUnit) -> Checked:
    """Cost = charge_nano(outcome, counters, billable, price version), recomputed for every request."""
    checked = Checked()
    wanted = select(
        _usage.request_id,
        _usage.outcome,
        _usage.prompt,
        _usage.cached,
        _usage.completion,
        _usage.billable,
        _usage.cost,
        price_version.c.prompt.label("prompt_price"),
        price_version.c.cached.label("cached_price"),
        price_version.c.completion.label("completion_price"),
    ).join(price_version, price_version.c.id == _usage.price_id)
    for row in unit.stream(wanted):
        checked.count += 1
        if row.outcome not in OUTCOMES:
            checked.wrong(f"request {row.request_id}: unknown outcome {row.outcome!r}")
            continue
        price = Price(row.prompt_price, row.cached_price, row.completion_price)
        try:
            cost = charge_nano(row.outcome, Tokens(row.prompt, row.cached, row.completion), row.billable, price)
        except MoneyError as error:
            checked.wrong(f"request {row.request_id}: {error}")
            continue
        if cost != row.cost:
            checked.wrong(f"request {row.request_id}: cost {row.cost} recorded, {cost} follows from its counters")
    return checked


def prices_unaltered(unit: ReadUnit) -> Checked:
    """A price version still has the fingerprint it was made with, and a request is settled at the version of its
    hold."""
    checked = Checked()
    numbers: dict[str, list[int]] = {}
    for row in unit.select(select(price_version)):
        checked.count += 1
        numbers.setdefault(row.model, []).append(row.number)
        version = PriceVersion(
            row.id, row.model, row.number, Price(row.prompt, row.cached, row.completion), row.effective_from
        )
        if fingerprint(version) != row.fingerprint:
            checked.wrong(f"price version {row.id} of {row.model} was altered")
    for model, found in sorted(numbers.items()):
        if sorted(found) != list(range(1, len(found) + 1)):
            checked.wrong(f"price versions of {model} are not numbered without a gap: {sorted(found)}")
    changed = (
        select(hold.c.request_id, hold.c.price_id, _usage.price_id.label("settled_at"))
        .join(usage_record, _usage.request_id == hold.c.request_id)
        .where(_usage.price_id != hold.c.price_id)
    )
    for row in unit.select(changed):
        checked.wrong(f"request {row.request_id} was held at price {row.price_id} and settled at {row.settled_at}")
    for row in unit.stream(select(hold)):
        checked.count += 1
        if opening_fingerprint(dict(row._mapping)) != row.opened_by:
            checked.wrong(f"hold {row.request_id} was altered since it was opened")
    foreign = (
        select(hold.c.request_id, hold.c.model, price_version.c.model.label("priced"))
        .join(price_version, price_version.c.id == hold.c.price_id)
        .where(price_version.c.model != hold.c.model)
    )
    for row in unit.select(foreign):
        checked.wrong(f"request {row.request_id} for {row.model} is held at a price of {row.priced}")
    return checked


def totals_agree(unit: ReadUnit) -> Checked:
    """Σ cost by model = what usage posted to its revenue account; Σ paid by customer = what usage took from their
    account."""
    checked = Checked()
    posted = (
        select(entry.c.account_id, func.sum(entry.c.amount).label("total"))
        .join(ledger_tx, ledger_tx.c.id == entry.c.tx_id)
        .where(ledger_tx.c.kind == "usage")
        .group_by(entry.c.account_id)
        .subquery()
    )
    by_account = {row.account_id: int(row.total) for row in unit.select(select(posted))}
    by_account.pop(WRITEOFF, None)
    expected = _expected(unit)
    for account_id in sorted(by_account.keys() | expected.keys()):
        checked.count += 1
        if by_account.get(account_id, 0) != expected.get(account_id, 0):
            checked.wrong(
                f"account {account_id}: usage records sum to {expected.get(account_id, 0)}, "
                f"usage posted {by_account.get(account_id, 0)}"
            )
    return checked


def _expected(unit: ReadUnit) -> dict[str, int]:
    models = select(_usage.model, func.sum(_usage.cost).label("total")).group_by(_usage.model)
    customers = select(_usage.account_id, func.sum(_usage.written_off - _usage.cost).label("total")).group_by(
        _usage.account_id
    )
    expected = {revenue_account(row.model): int(row.total) for row in unit.select(models)}
    return expected | {row.account_id: int(row.total) for row in unit.select(customers)}
