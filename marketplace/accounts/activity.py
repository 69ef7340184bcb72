"""Accounts at a glance: what they have, what they spent, and how many machines they have running."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from sqlalchemy import bindparam, func, select

from marketplace.instances.tables import instance
from marketplace.ledger.book import CUSTOMER
from marketplace.ledger.tables import account
from marketplace.payments.tables import payment
from marketplace.store.db import ReadUnit

_SUMMARIES = select(account.c.id, account.c.posted, account.c.credit_limit, account.c.unlimited, account.c.spent).where(
    account.c.kind == CUSTOMER, account.c.id.in_(bindparam("ids", expanding=True))
)


class Summary(msgspec.Struct, frozen=True):
    """An account at a glance; money in nano-units."""

    balance: int
    credit_limit: int
    unlimited: bool
    total_spent: int
    instance_count: int


def summaries(unit: ReadUnit, account_ids: Collection[str]) -> dict[str, Summary]:
    """Return customers' accounts at a glance, by id."""
    running = live_instances(unit, account_ids)
    return {
        row.id: Summary(row.posted, row.credit_limit, row.unlimited, row.spent, running.get(row.id, 0))
        for row in unit.select(_SUMMARIES, {"ids": sorted(account_ids)}).all()
    }


def pending_payments(unit: ReadUnit, account_id: str) -> int:
    """Return how many payments to an account are under way."""
    mine = select(func.count()).where(payment.c.account_id == account_id, payment.c.state.in_(("creating", "pending")))
    return int(unit.select(mine).scalar_one())


def live_instances(unit: ReadUnit, account_ids: Collection[str] | None = None) -> dict[str, int]:
    """Return how many machines each account has that are not over, of these accounts or of all; an account without any
    is absent."""
    wanted = select(instance.c.account_id, func.count()).where(instance.c.ended_at.is_(None))
    if account_ids is not None:
        wanted = wanted.where(instance.c.account_id.in_(sorted(account_ids)))
    return {account_id: int(number) for account_id, number in unit.select(wanted.group_by(instance.c.account_id))}
