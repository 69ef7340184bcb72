"""Customer accounts: open, top up by hand, give credit, refund, and read what happened."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from sqlalchemy import func, select

from marketplace.ledger import chain, ledger
from marketplace.ledger.book import AccountState, LedgerError, UnknownAccountError
from marketplace.ledger.ledger import Posted
from marketplace.ledger.money import MoneyError, check_amount
from marketplace.ledger.tables import account, entry, ledger_tx, usage_record
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random, new_id

MAX_KEY = 128


class RefundError(LedgerError):
    """There is nothing to refund, or less than was asked for."""


class HistoryLine(msgspec.Struct, frozen=True):
    """One entry of an account: its ordinal, what it is, its signed amount and the balance after it, in nano-units."""

    ordinal: int
    tx_id: str
    kind: str
    memo: str
    amount: int
    balance_after: int
    at: int


def open_account(
    unit: WriteUnit,
    *,
    owner_kind: str,
    owner_id: str,
    now: int,
    random: Random,
    credit_limit: int = 0,
    unlimited: bool = False,
) -> str:
    """Open an account for a user or a team and return its id."""
    account_id = new_id(now, random)
    ledger.open_account(
        unit,
        account_id,
        owner_kind=owner_kind,
        owner_id=owner_id,
        now=now,
        credit_limit=credit_limit,
        unlimited=unlimited,
    )
    return account_id


def top_up(
    unit: WriteUnit, account_id: str, amount: int, *, key: str, now: int, random: Random, memo: str = ""
) -> Posted:
    """Record money that arrived, once for each `key`.

    MoneyError unless the amount is positive; UnknownAccountError; IdempotencyConflictError when the key was used for
    something else.
    """
    if amount <= 0:
        raise MoneyError(f"a top-up of {amount} nano-units")
    if not 0 < len(key) <= MAX_KEY:
        raise MoneyError(f"an idempotency key has 1 to {MAX_KEY} characters")
    get(unit, account_id)
    return ledger.post(
        unit,
        tx_id=new_id(now, random),
        key=f"topup:{key}",
        kind="topup",
        entries=[(account_id, check_amount(amount)), (ledger.CLEARING, -amount)],
        now=now,
        memo=memo,
    )


def adjust(
    unit: WriteUnit, account_id: str, amount: int, *, key: str, now: int, random: Random, memo: str = ""
) -> Posted:
    """Add or remove funds by hand, once for each `key`.

    MoneyError when nothing would move; UnknownAccountError; InsufficientFundsError when more is removed than the
    account has; IdempotencyConflictError.
    """
    if amount == 0:
        raise MoneyError("an adjustment of nothing")
    get(unit, account_id)
    return ledger.post(
        unit,
        tx_id=new_id(now, random),
        key=f"adjust:{key}",
        kind="adjustment",
        entries=[(account_id, check_amount(amount)), (ledger.CLEARING, -amount)],
        now=now,
        memo=memo,
    )


def refund(
    unit: WriteUnit, request_id: str, amount: int, *, key: str, now: int, random: Random, memo: str = ""
) -> Posted:
    """Give back part or all of what a request cost its customer, once for each `key`.

    RefundError when the request was not charged, or when all refunds together would exceed the charge.
    """
    if amount <= 0:
        raise MoneyError(f"a refund of {amount} nano-units")
    charged = unit.select(
        select(usage_record.c.account_id, usage_record.c.cost, usage_record.c.written_off).where(
            usage_record.c.request_id == request_id
        )
    ).one_or_none()
    if charged is None or charged.cost == charged.written_off:
        raise RefundError(f"request {request_id} was not charged")
    # Every refund is posted to this chain: under its lock two at once see each other.
    chain.lock(unit, chain.DIRECT)
    full_key = f"refund:{key}"
    before = unit.select(
        select(func.coalesce(func.sum(entry.c.amount), 0))
        .join(ledger_tx, ledger_tx.c.id == entry.c.tx_id)
        .where(
            ledger_tx.c.refers_to == request_id,
            ledger_tx.c.idempotency_key != full_key,
            entry.c.account_id == charged.account_id,
        )
    ).scalar_one()
    if int(before) + amount > charged.cost - charged.written_off:
        raise RefundError(f"request {request_id} was charged {charged.cost - charged.written_off}, {before} given back")
    return ledger.post(
        unit,
        tx_id=new_id(now, random),
        key=full_key,
        kind="refund",
        entries=[(charged.account_id, amount), (ledger.REFUNDS, -amount)],
        now=now,
        memo=memo,
        refers_to=request_id,
    )


def set_credit_limit(unit: WriteUnit, account_id: str, credit_limit: int) -> AccountState:
    """Let an account go that far below zero. CreditInUseError when it already is lower."""
    return ledger.set_credit(unit, account_id, credit_limit=credit_limit)


def set_unlimited(unit: WriteUnit, account_id: str, unlimited: bool) -> AccountState:
    """Let an account spend without limit, or stop that. CreditInUseError when it could not be stopped now."""
    return ledger.set_credit(unit, account_id, unlimited=unlimited)


def set_credit(unit: WriteUnit, account_id: str, *, credit_limit: int | None, unlimited: bool | None) -> AccountState:
    """Set both at once; None leaves one as it is. CreditInUseError."""
    return ledger.set_credit(unit, account_id, credit_limit=credit_limit, unlimited=unlimited)


def lock(unit: WriteUnit, account_ids: Collection[str]) -> None:
    """Lock accounts for several changes in one unit: all of them first, in the order that everybody keeps to. Locking
    them one by one as they are changed would deadlock with whoever names them in another order."""
    chain.lock(unit, chain.DIRECT)
    ledger.lock_accounts(unit, {*account_ids, ledger.CLEARING})


def get(unit: ReadUnit, account_id: str) -> AccountState:
    """Return what an account has. UnknownAccountError."""
    found = ledger.account_states(unit, [account_id]).get(account_id)
    if found is None:
        raise UnknownAccountError(f"no customer account {account_id}")
    return found


def of_owner(unit: ReadUnit, owner_kind: str, owner_id: str) -> str | None:
    """Return the id of an owner's account."""
    found: str | None = unit.select(
        select(account.c.id).where(
            account.c.kind == "customer", account.c.owner_kind == owner_kind, account.c.owner_id == owner_id
        )
    ).scalar_one_or_none()
    return found


def history(unit: ReadUnit, account_id: str, *, before: int | None = None, limit: int = 100) -> list[HistoryLine]:
    """Return entries of an account, newest first, older than the ordinal `before`: pages stay equally fast to the
    last."""
    wanted = (
        select(
            entry.c.ordinal,
            entry.c.tx_id,
            ledger_tx.c.kind,
            ledger_tx.c.memo,
            entry.c.amount,
            entry.c.balance_after,
            ledger_tx.c.occurred_at,
        )
        .join(ledger_tx, ledger_tx.c.id == entry.c.tx_id)
        .where(entry.c.account_id == account_id)
        .order_by(entry.c.ordinal.desc())
        .limit(limit)
    )
    if before is not None:
        wanted = wanted.where(entry.c.ordinal < before)
    return [HistoryLine(*row) for row in unit.select(wanted)]
