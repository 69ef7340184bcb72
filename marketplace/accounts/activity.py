"""What accounts did: how much they spent, and what they have running."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from sqlalchemy import Select, func, select

from marketplace.ledger import ledger
from marketplace.ledger.tables import entry, ledger_tx
from marketplace.store.db import ReadUnit

SPENDING = ("usage", "charge", "refund")
"""Kinds of transactions that a customer's use makes; refunds count against it."""


class Summary(msgspec.Struct, frozen=True):
    """An account at a glance; money in nano-units."""

    balance: int
    credit_limit: int
    unlimited: bool
    total_spent: int
    instance_count: int


def summaries(unit: ReadUnit, account_ids: Collection[str]) -> dict[str, Summary]:
    """Return customers' accounts at a glance, by id."""
    states = ledger.account_states(unit, account_ids)
    spent = total_spent(unit, account_ids)
    running = live_instances(unit, account_ids)
    return {
        account_id: Summary(
            balance=state.posted,
            credit_limit=state.credit_limit,
            unlimited=state.unlimited,
            total_spent=spent.get(account_id, 0),
            instance_count=running.get(account_id, 0),
        )
        for account_id, state in states.items()
    }


def total_spent(unit: ReadUnit, account_ids: Collection[str]) -> dict[str, int]:
    """Return what accounts were charged for their use less what they were given back, in nano-units; an account that
    never used anything is absent."""
    wanted = _spent().where(entry.c.account_id.in_(sorted(account_ids)))
    return {row.account_id: int(row.spent) for row in unit.select(wanted)}


def spent_at_least(nano: int) -> Select[str]:
    """A query for the ids of accounts that spent at least so much. Everybody spent at least nothing: do not ask for
    that here, because accounts without any use are not found."""
    return select(_spent().having(_spending >= nano).subquery().c.account_id)


def live_instances(unit: ReadUnit, account_ids: Collection[str] | None = None) -> dict[str, int]:
    """Return how many machines each account has that are not over, of these accounts or of all; one without any is
    absent. No machine can be rented yet, so none has any."""
    return {}


_spending = -func.sum(entry.c.amount)


def _spent() -> Select[str, int]:
    return (
        select(entry.c.account_id, _spending.label("spent"))
        .join(ledger_tx, ledger_tx.c.id == entry.c.tx_id)
        .where(ledger_tx.c.kind.in_(SPENDING))
        .group_by(entry.c.account_id)
    )
