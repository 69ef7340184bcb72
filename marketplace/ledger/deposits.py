"""Deposits: money of an account set aside for what may begin later. A deposit is held, and ends once: captured, when
what it was for began, or released, when it never will."""

from __future__ import annotations

from sqlalchemy import insert, select, update

from marketplace.ledger import chain, ledger
from marketplace.ledger.book import InsufficientFundsError, UnknownAccountError
from marketplace.ledger.money import MoneyError, check_amount
from marketplace.ledger.rental_tables import deposit
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random, new_id


def hold(unit: WriteUnit, account_id: str, subject_id: str, amount: int, *, now: int, random: Random) -> str:
    """Set an amount aside, all of it, and return the deposit's id.

    MoneyError unless the amount is positive; UnknownAccountError; InsufficientFundsError.
    """
    if check_amount(amount) <= 0:
        raise MoneyError(f"a deposit of {amount} nano-units")
    chain.lock(unit, chain.DIRECT)
    found = ledger.lock_accounts(unit, [account_id]).get(account_id)
    if found is None:
        raise UnknownAccountError(f"no customer account {account_id}")
    if found.bounded and found.available < amount:
        raise InsufficientFundsError(account_id, amount, found.available)
    found.hold(amount)
    ledger.save_accounts(unit, [found])
    ledger.announce(unit, [account_id])
    deposit_id = new_id(now, random)
    unit.execute(
        insert(deposit).values(
            id=deposit_id,
            account_id=account_id,
            subject_id=subject_id,
            amount=amount,
            state="held",
            created_at=now,
            resolved_at=None,
            tx_id=None,
        )
    )
    return deposit_id


def release(unit: WriteUnit, subject_id: str, now: int) -> int:
    """Give back what is held for a subject; returns how much: 0 when nothing is held, as after the first time."""
    chain.lock(unit, chain.DIRECT)
    row = _held(unit, subject_id)
    if row is None:
        return 0
    account_id, deposit_id, amount = row
    _give_back(unit, account_id, amount)
    unit.execute(update(deposit).where(deposit.c.id == deposit_id).values(state="released", resolved_at=now))
    return amount


def capture(
    unit: WriteUnit, subject_id: str, *, provider_id: str | None, share: int, memo: str, now: int, random: Random
) -> int:
    """Charge what is held for a subject; returns how much: 0 when nothing is held, as after the first time."""
    chain.lock(unit, chain.DIRECT)
    row = _held(unit, subject_id)
    if row is None:
        return 0
    account_id, deposit_id, amount = row
    _give_back(unit, account_id, amount)
    posted = ledger.post(
        unit,
        tx_id=new_id(now, random),
        key=f"deposit:{deposit_id}",
        kind="reservation",
        entries=ledger.sale(account_id, amount, ledger.RENTALS, provider_id, share),
        now=now,
        memo=memo,
    )
    unit.execute(
        update(deposit).where(deposit.c.id == deposit_id).values(state="captured", resolved_at=now, tx_id=posted.tx_id)
    )
    return amount


def held_for(unit: ReadUnit, subject_id: str) -> int:
    """How much is held for a subject."""
    row = _held(unit, subject_id)
    return 0 if row is None else row[2]


def _held(unit: ReadUnit, subject_id: str) -> tuple[str, str, int] | None:
    wanted = select(deposit.c.account_id, deposit.c.id, deposit.c.amount).where(
        deposit.c.subject_id == subject_id, deposit.c.state == "held"
    )
    row = unit.select(wanted).one_or_none()
    return None if row is None else (row.account_id, row.id, row.amount)


def _give_back(unit: WriteUnit, account_id: str, amount: int) -> None:
    account = ledger.lock_accounts(unit, [account_id])[account_id]
    account.release(amount)
    ledger.save_accounts(unit, [account])
    ledger.announce(unit, [account_id])
