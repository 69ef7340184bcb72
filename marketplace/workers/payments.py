"""What a crash, a lost message or a silent payer left open: ask the payment provider, and finish.

One pass looks at payments and refunds that are due, one after the other. Each is claimed by moving the time at which it
was last asked about, so that several servers do not ask at once; if they do, nothing is done twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import msgspec
from sqlalchemy import Table, select, update

from marketplace.http.operation import Context
from marketplace.payments import flow
from marketplace.payments.port import ProviderRefusedError, ProviderUnavailableError
from marketplace.payments.records import Payment, Refund
from marketplace.payments.tables import payment, payment_refund

log = logging.getLogger(__name__)

SECOND = 1_000_000
PAUSE_US = 60 * SECOND
"""Least time between two questions about the same payment or refund."""
KEYS_US = 23 * 3600 * SECOND
"""For how long a provider surely remembers the key of a payment that it was asked for."""
BATCH = 50


class Pass(msgspec.Struct):
    """What one pass did."""

    asked: int = 0
    failed: int = 0


def reconcile(context: Context, stopping: Callable[[], bool] = lambda: False) -> Pass:
    """Look once at everything that is due; once `stopping` says so, the rest is for the next time."""
    done = Pass()
    now = context.clock()
    lifetime = context.settings.read(context.database, now).payment_lifetime * SECOND
    for found in _due_payments(context, now):
        if stopping():
            return done
        if _claim(context, payment, found.id, found.checked_at, now):
            _try(done, f"payment {found.id}", partial(_payment, context, found, now, lifetime))
    for begun, paid in _due_refunds(context, now):
        if stopping():
            return done
        if _claim(context, payment_refund, begun.id, begun.checked_at, now):
            _try(done, f"refund {begun.id}", partial(flow.give_back, context, paid, begun))
    return done


def _payment(context: Context, found: Payment, now: int, lifetime: int) -> None:
    age = now - found.created_at
    if found.state == "creating" and age < KEYS_US:
        flow.ask(context, found)
    elif found.state == "creating":
        # Nobody was told its secret, so nobody can pay it; should somebody, the message about it still counts.
        flow.abandon(context, found)
    elif age >= lifetime:
        flow.end(context, found)
    elif not context.payments.by_hand:
        flow.look(context, found)


def _try(done: Pass, what: str, work: Callable[[], object]) -> None:
    """Do one thing; that the provider does not answer, or refuses, must not stop the others."""
    done.asked += 1
    try:
        work()
    except (ProviderUnavailableError, ProviderRefusedError) as error:
        done.failed += 1
        log.warning("%s: %s: %s", what, type(error).__name__, error)


def _due_payments(context: Context, now: int) -> list[Payment]:
    wanted = (
        select(payment)
        .where(
            payment.c.state.in_(("creating", "pending")),
            payment.c.provider == context.payments.name,
            payment.c.checked_at <= now - PAUSE_US,
        )
        .order_by(payment.c.checked_at)
        .limit(BATCH)
    )
    with context.database.read() as unit:
        return [Payment(**row._mapping) for row in unit.select(wanted)]


def _due_refunds(context: Context, now: int) -> list[tuple[Refund, Payment]]:
    wanted = (
        select(payment_refund)
        .where(payment_refund.c.state == "pending", payment_refund.c.checked_at <= now - PAUSE_US)
        .order_by(payment_refund.c.checked_at)
        .limit(BATCH)
    )
    with context.database.read() as unit:
        begun = [Refund(**row._mapping) for row in unit.select(wanted)]
        paid = {
            row.id: Payment(**row._mapping)
            for row in unit.select(select(payment).where(payment.c.id.in_([item.payment_id for item in begun])))
        }
    mine = context.payments.name
    return [(item, paid[item.payment_id]) for item in begun if paid[item.payment_id].provider == mine]


def _claim(context: Context, table: Table, row_id: str, checked_at: int, now: int) -> bool:
    """Whether this server is the one that asks now."""
    mine = update(table).where(table.c.id == row_id, table.c.checked_at == checked_at).values(checked_at=now)
    return context.database.transact(lambda unit: unit.execute(mine).rowcount == 1)
