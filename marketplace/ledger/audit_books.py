"""Checks of the books: transactions, balances, holds in sum, limits, refunds."""

from __future__ import annotations

from sqlalchemy import case, func, literal, select, union_all

from marketplace.ledger.audit_finding import Checked
from marketplace.ledger.book import CUSTOMER, FUNDING
from marketplace.ledger.rental_tables import deposit
from marketplace.ledger.tables import account, entry, hold, ledger_tx
from marketplace.store.db import ReadUnit


def transactions_balance(unit: ReadUnit) -> Checked:
    """Σ entries of a transaction = 0, and there are at least two."""
    checked = Checked(unit.select(select(func.count()).select_from(ledger_tx)).scalar_one())
    total = func.coalesce(func.sum(entry.c.amount), 0)
    wrong = (
        select(ledger_tx.c.idempotency_key, total.label("total"), func.count(entry.c.seq).label("entries"))
        .join(entry, entry.c.tx_id == ledger_tx.c.id, isouter=True)
        .group_by(ledger_tx.c.id, ledger_tx.c.idempotency_key)
        .having((total != 0) | (func.count(entry.c.seq) < 2))
    )
    for row in unit.select(wrong):
        checked.wrong(f"transaction {row.idempotency_key}: {row.entries} entries sum to {row.total}")
    return checked


def balances_follow_entries(unit: ReadUnit) -> Checked:
    """Σ entries of an account = posted = the last balance_after, each balance the one before plus the amount."""
    checked = Checked()
    sums = (
        select(
            entry.c.account_id,
            func.sum(entry.c.amount).label("total"),
            func.count().label("entries"),
            func.max(entry.c.ordinal).label("last"),
        )
        .group_by(entry.c.account_id)
        .subquery()
    )
    found = select(
        account.c.id,
        account.c.posted,
        account.c.entries,
        func.coalesce(sums.c.total, 0).label("total"),
        func.coalesce(sums.c.entries, 0).label("counted"),
        func.coalesce(sums.c.last, 0).label("last"),
    ).join(sums, sums.c.account_id == account.c.id, isouter=True)
    for row in unit.stream(found):
        checked.count += 1
        if row.posted != row.total:
            checked.wrong(f"account {row.id}: posted {row.posted}, entries sum to {row.total}")
        if not row.entries == row.counted == row.last:
            checked.wrong(f"account {row.id}: {row.entries} entries expected, {row.counted} found, last is {row.last}")
    before = func.lag(entry.c.balance_after, 1, 0).over(partition_by=entry.c.account_id, order_by=entry.c.ordinal)
    steps = select(
        entry.c.account_id, entry.c.ordinal, (before + entry.c.amount - entry.c.balance_after).label("gap")
    ).subquery()
    for row in unit.select(select(steps).where(steps.c.gap != 0)):
        checked.wrong(f"account {row.account_id}: balance after entry {row.ordinal} is off by {row.gap}")
    return checked


def held_is_open_holds(unit: ReadUnit) -> Checked:
    """Held = Σ open holds + Σ deposits that are held ≥ 0."""
    checked = Checked()
    set_aside = union_all(
        select(hold.c.account_id, hold.c.amount).where(hold.c.state == "open"),
        select(deposit.c.account_id, deposit.c.amount).where(deposit.c.state == "held"),
    ).subquery()
    sums = (
        select(set_aside.c.account_id, func.sum(set_aside.c.amount).label("total"))
        .group_by(set_aside.c.account_id)
        .subquery()
    )
    found = select(account.c.id, account.c.held, func.coalesce(sums.c.total, 0).label("total")).join(
        sums, sums.c.account_id == account.c.id, isouter=True
    )
    for row in unit.stream(found):
        checked.count += 1
        if row.held != row.total or row.held < 0:
            checked.wrong(f"account {row.id}: holds {row.held}, open holds and deposits sum to {row.total}")
    return checked


def nobody_below_limit(unit: ReadUnit) -> Checked:
    """Posted − held + credit_limit ≥ 0 for every customer who is not unlimited."""
    bounded = (account.c.kind == CUSTOMER) & ~account.c.unlimited
    checked = Checked(unit.select(select(func.count()).select_from(account).where(bounded)).scalar_one())
    available = account.c.posted - account.c.held + account.c.credit_limit
    for row in unit.select(select(account.c.id, available.label("available")).where(bounded, available < 0)):
        checked.wrong(f"account {row.id}: {-row.available} below its limit")
    return checked


def money_conserved(unit: ReadUnit) -> Checked:
    """Σ posted of all accounts = 0: money is moved, never made."""
    row = unit.select(
        select(func.count().label("n"), func.coalesce(func.sum(account.c.posted), 0).label("total"))
    ).one()
    checked = Checked(row.n)
    if row.total != 0:
        checked.wrong(f"all accounts sum to {row.total}")
    return checked


def refunds_within_charge(unit: ReadUnit) -> Checked:
    """What refunds give back to the customer of a transaction ≤ what it took from them."""
    checked = Checked()
    original = ledger_tx.alias("original")
    customers = select(account.c.id).where(account.c.kind == CUSTOMER)
    amounts = (
        select(
            entry.c.tx_id,
            func.sum(case((entry.c.account_id.in_(customers), entry.c.amount), else_=literal(0))).label("amount"),
        )
        .group_by(entry.c.tx_id)
        .subquery()
    )
    taken, given = amounts.alias("taken"), amounts.alias("given")
    found = (
        select(
            ledger_tx.c.refers_to,
            original.c.idempotency_key,
            (-func.coalesce(func.max(taken.c.amount), 0)).label("taken"),
            func.coalesce(func.sum(given.c.amount), 0).label("given"),
        )
        .select_from(ledger_tx)
        .join(original, original.c.id == ledger_tx.c.refers_to, isouter=True)
        .join(given, given.c.tx_id == ledger_tx.c.id, isouter=True)
        .join(taken, taken.c.tx_id == original.c.id, isouter=True)
        .where(ledger_tx.c.kind == "refund")
        .group_by(ledger_tx.c.refers_to, original.c.idempotency_key)
    )
    for row in unit.select(found):
        checked.count += 1
        if row.given > row.taken:
            name = row.idempotency_key or f"{row.refers_to}, which is missing,"
            checked.wrong(f"transaction {name} took {row.taken}, refunds gave back {row.given}")
    return checked


def spending_follows_entries(unit: ReadUnit) -> Checked:
    """Spent = what a customer's entries took in transactions that brought no funds."""
    checked = Checked()
    brought = select(entry.c.tx_id).join(account, account.c.id == entry.c.account_id).where(account.c.kind.in_(FUNDING))
    sums = (
        select(entry.c.account_id, func.sum(-entry.c.amount).label("total"))
        .where(entry.c.tx_id.not_in(brought))
        .group_by(entry.c.account_id)
        .subquery()
    )
    found = (
        select(account.c.id, account.c.spent, func.coalesce(sums.c.total, 0).label("total"))
        .join(sums, sums.c.account_id == account.c.id, isouter=True)
        .where(account.c.kind == CUSTOMER)
    )
    for row in unit.stream(found):
        checked.count += 1
        if row.spent != row.total:
            checked.wrong(f"account {row.id}: spent {row.spent}, entries sum to {row.total}")
    return checked
