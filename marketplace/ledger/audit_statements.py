"""Check of statements: their lines are sums, and must be those of what they sum."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, case, except_, func, select

from marketplace.ledger.audit_finding import Checked
from marketplace.ledger.book import CUSTOMER
from marketplace.ledger.tables import account, entry, ledger_tx, statement_line, usage_record
from marketplace.store.db import ReadUnit

_usage = usage_record.c


def statements_follow_entries(unit: ReadUnit) -> Checked:
    """Every entry of a customer is in one line, every line is the sum of its entries and usage records."""
    checked = Checked(unit.select(select(func.count()).select_from(statement_line)).scalar_one())
    wanted, written = _wanted(), select(*statement_line.c)
    for row in unit.select(except_(wanted, written)):
        checked.wrong(f"account {row.account_id}: the line of transaction {row.tx_id} is missing or says otherwise")
    for row in unit.select(except_(written, wanted)):
        checked.wrong(f"account {row.account_id}: line {row.ordinal} says what its entries do not")
    return checked


def _wanted() -> Select[*tuple[Any, ...]]:
    """What the lines have to be, summed again; columns in the order of the table."""
    alone = case((_usage.request_id.is_(None), ledger_tx.c.id))
    sums = (
        select(
            entry.c.account_id,
            func.max(ledger_tx.c.occurred_at).label("at"),
            func.max(entry.c.ordinal).label("ordinal"),
            func.sum(entry.c.amount).label("amount"),
            func.count(_usage.request_id).label("requests"),
            _usage.key_id,
            _usage.model,
            func.coalesce(func.sum(_usage.prompt), 0).label("prompt"),
            func.coalesce(func.sum(_usage.cached), 0).label("cached"),
            func.coalesce(func.sum(_usage.completion), 0).label("completion"),
            func.min(_usage.opened_at).label("begin_at"),
        )
        .select_from(entry)
        .join(account, account.c.id == entry.c.account_id)
        .join(ledger_tx, ledger_tx.c.id == entry.c.tx_id)
        .join(usage_record, _usage.request_id == ledger_tx.c.id, isouter=True)
        .where(account.c.kind == CUSTOMER)
        .group_by(entry.c.account_id, ledger_tx.c.node, ledger_tx.c.batch, _usage.key_id, _usage.model, alone)
        .subquery()
    )
    newest, tx = entry.alias("newest"), ledger_tx.alias("newest_tx")
    return (
        select(
            sums.c.account_id,
            sums.c.at,
            sums.c.ordinal,
            newest.c.tx_id,
            tx.c.kind,
            tx.c.memo,
            sums.c.amount,
            sums.c.requests,
            sums.c.key_id,
            sums.c.model,
            sums.c.prompt,
            sums.c.cached,
            sums.c.completion,
            sums.c.begin_at,
        )
        .join(newest, (newest.c.account_id == sums.c.account_id) & (newest.c.ordinal == sums.c.ordinal))
        .join(tx, tx.c.id == newest.c.tx_id)
    )
