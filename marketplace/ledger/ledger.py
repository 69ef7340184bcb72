"""Accounts and transactions: open an account, post a transaction once, read balances.

Lock order, everywhere: chain of the node, then accounts sorted by id, then the epoch row. Whoever keeps to it cannot
deadlock; a unit that posts several transactions may, on PostgreSQL, and is run again by `Database.transact`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import msgspec
from sqlalchemy import insert, select, update

from marketplace.ledger import book, chain
from marketplace.ledger.book import CUSTOMER, Account, AccountState, LedgerError, UnknownAccountError
from marketplace.ledger.money import MAX_AMOUNT, MoneyError
from marketplace.ledger.tables import account, ledger_tx
from marketplace.store import epochs
from marketplace.store.db import ReadUnit, WriteUnit

CLEARING = "platform:payments_clearing"
WRITEOFF = "platform:writeoff"
PROMO_EXPENSE = "platform:promo_expense"
REFUNDS = "platform:refunds"
ROUNDING = "platform:rounding"
_REVENUE = "platform:revenue:"
_SERVICE = "platform:service:"
_PAYABLE = "payable:"
_KINDS = {
    CLEARING: "clearing",
    WRITEOFF: "writeoff",
    PROMO_EXPENSE: "promo_expense",
    REFUNDS: "refunds",
    ROUNDING: "rounding",
}
_FAMILIES = ((_REVENUE, "revenue"), (_SERVICE, "service"), (_PAYABLE, "payable"))

_CHANGING = ("posted", "held", "spent", "entries", "version")


class IdempotencyConflictError(LedgerError):
    """The key was used before for something else."""


class CreditInUseError(LedgerError):
    """The credit limit or the unlimited flag cannot be taken back: the account already stands on it."""

    def __init__(self, account_id: str, minimum: int) -> None:
        super().__init__(f"account {account_id} needs a credit limit of at least {minimum} nano-units")
        self.account_id = account_id
        self.minimum = minimum


class Posted(msgspec.Struct, frozen=True):
    """A transaction that is in the ledger; `replayed` when it already was."""

    tx_id: str
    replayed: bool


def revenue_account(model: str) -> str:
    """Return the id of the account that a model's income goes to."""
    return _REVENUE + model


def service_account(service: str) -> str:
    """Return the id of the account that the platform's part of a service's income goes to."""
    return _SERVICE + service


def payable_account(provider_id: str) -> str:
    """Return the id of the account that says what is owed to a provider."""
    return _PAYABLE + provider_id


RENTALS = service_account("rentals")
"""Where the platform's part of what rentals cost goes."""


def payable_part(amount: int, provider_id: str | None, share: int) -> int:
    """What of an amount is owed to a provider; `share` is in basis points, rounded down. The rest is the platform's."""
    return 0 if provider_id is None else amount * share // 10_000


def sale(
    account_id: str, amount: int, income: str, provider_id: str | None, share: int, *, written_off: int = 0
) -> list[tuple[str, int]]:
    """Return the entries of something sold: the customer pays, its provider is owed their part, `income` gets the rest,
    and the platform bears what is written off."""
    payable = payable_part(amount, provider_id, share)
    entries = [
        (account_id, written_off - amount),
        (WRITEOFF, -written_off),
        (payable_account(provider_id or ""), payable),
        (income, amount - payable),
    ]
    return [(name, moved) for name, moved in entries if moved]


def open_account(
    unit: WriteUnit,
    account_id: str,
    *,
    owner_kind: str,
    owner_id: str,
    now: int,
    credit_limit: int = 0,
    unlimited: bool = False,
) -> None:
    """Open a customer's account, empty. An owner has at most one: sqlalchemy.exc.IntegrityError for a second."""
    if not 0 <= credit_limit <= MAX_AMOUNT:
        raise MoneyError(f"credit limit {credit_limit} is outside 0..{MAX_AMOUNT} nano-units")
    row = _new_row(account_id, CUSTOMER, now, owner_kind=owner_kind, owner_id=owner_id)
    row.update(credit_limit=credit_limit, unlimited=unlimited)
    unit.execute(insert(account).values(**row))
    announce(unit, [account_id])


def ensure_platform(unit: WriteUnit, account_ids: Collection[str], now: int) -> None:
    """Open those of the platform's own accounts that are still missing, and of those that say what it owes providers;
    LedgerError for a name that is none of them."""
    rows = []
    for account_id in sorted(account_ids):
        kind = _KINDS.get(account_id) or next((of for prefix, of in _FAMILIES if account_id.startswith(prefix)), None)
        if kind is None:
            raise LedgerError(f"{account_id} is not one of the platform's accounts")
        provider_id = account_id.removeprefix(_PAYABLE)
        owner = ("platform", "platform") if provider_id == account_id else ("provider", provider_id)
        rows.append(_new_row(account_id, kind, now, owner_kind=owner[0], owner_id=owner[1]))
    unit.insert_missing(account, rows)


def _new_row(account_id: str, kind: str, now: int, *, owner_kind: str, owner_id: str) -> chain.Row:
    return {
        "id": account_id,
        "kind": kind,
        "owner_kind": owner_kind,
        "owner_id": owner_id,
        "posted": 0,
        "held": 0,
        "credit_limit": 0,
        "unlimited": False,
        "entries": 0,
        "spent": 0,
        "version": 1,
        "epoch": 0,
        "created_at": now,
    }


def lock_accounts(unit: WriteUnit, account_ids: Collection[str]) -> dict[str, Account]:
    """Lock accounts, sorted by id, and return those that exist."""
    wanted = (
        select(
            account.c.id,
            account.c.kind,
            account.c.posted,
            account.c.held,
            account.c.credit_limit,
            account.c.unlimited,
            account.c.entries,
            account.c.version,
            account.c.spent,
        )
        .where(account.c.id.in_(sorted(account_ids)))
        .order_by(account.c.id)
        .with_for_update()
    )
    return {row.id: Account(*row) for row in unit.select(wanted)}


def save_accounts(unit: WriteUnit, accounts: Collection[Account]) -> None:
    """Write the changed accounts back, one version further."""
    changed = [item for item in accounts if item.changed]
    for item in changed:
        item.version += 1
    unit.update_rows(account, "id", _CHANGING, [item.row() for item in changed])


def post(
    unit: WriteUnit,
    *,
    tx_id: str,
    key: str,
    kind: str,
    entries: Sequence[tuple[str, int]],
    now: int,
    memo: str = "",
    refers_to: str | None = None,
) -> Posted:
    """Post one transaction: (account id, signed amount) pairs that sum to zero.

    The same key with the same kind, entries, memo and reference posts nothing and returns the first one; with others
    it is an IdempotencyConflictError. `tx_id` and `now` are not compared: a retry has new ones. Platform accounts are
    opened as needed. LedgerError, UnknownAccountError, InsufficientFundsError and MoneyError leave the unit to be
    rolled back.
    """
    input_hash = hashlib.sha256(msgspec.msgpack.encode((kind, entries, memo, refers_to))).digest()
    head = chain.lock(unit, chain.DIRECT)
    before = unit.select(
        select(ledger_tx.c.id, ledger_tx.c.input_hash).where(ledger_tx.c.idempotency_key == key)
    ).one_or_none()
    if before is not None:
        if before.input_hash != input_hash:
            raise IdempotencyConflictError(f"key {key!r} was used before for another transaction")
        return Posted(before.id, replayed=True)
    ids = {account_id for account_id, _ in entries}
    ensure_platform(unit, [name for name in ids if name.startswith(("platform:", _PAYABLE))], now)
    accounts = lock_accounts(unit, ids)
    posting = chain.Posting()
    book.post(
        accounts,
        posting,
        tx_id=tx_id,
        key=key,
        kind=kind,
        input_hash=input_hash,
        occurred_at=now,
        entries=entries,
        memo=memo,
        refers_to=refers_to,
    )
    chain.append(unit, head, posting, first_seq=0, last_seq=0, records=0, at=now)
    save_accounts(unit, accounts.values())
    announce(unit, [item.id for item in accounts.values() if item.kind == CUSTOMER])
    return Posted(tx_id, replayed=False)


def set_credit(
    unit: WriteUnit, account_id: str, *, credit_limit: int | None = None, unlimited: bool | None = None
) -> AccountState:
    """Set how far a customer's account may go below zero; None leaves a setting as it is.

    UnknownAccountError; CreditInUseError when the account already stands lower than that; MoneyError outside
    0..MAX_AMOUNT.
    """
    if credit_limit is not None and not 0 <= credit_limit <= MAX_AMOUNT:
        raise MoneyError(f"credit limit {credit_limit} is outside 0..{MAX_AMOUNT} nano-units")
    found = lock_accounts(unit, [account_id]).get(account_id)
    if found is None or found.kind != CUSTOMER:
        raise UnknownAccountError(f"no customer account {account_id}")
    found.credit_limit = found.credit_limit if credit_limit is None else credit_limit
    found.unlimited = found.unlimited if unlimited is None else unlimited
    found.version += 1
    if found.bounded and found.available < 0:
        raise CreditInUseError(account_id, found.held - found.posted)
    unit.execute(
        update(account)
        .where(account.c.id == account_id)
        .values(credit_limit=found.credit_limit, unlimited=found.unlimited, version=found.version)
    )
    announce(unit, [account_id])
    return found.state()


def announce(unit: WriteUnit, account_ids: Collection[str]) -> None:
    """Raise the accounts epoch for accounts that something other than a journal changed: whoever keeps a copy of them
    looks again."""
    if account_ids:
        value = epochs.bump(unit, epochs.ACCOUNTS)
        unit.execute(update(account).where(account.c.id.in_(sorted(account_ids))).values(epoch=value))


_STATE = select(
    account.c.id,
    account.c.posted,
    account.c.held,
    account.c.credit_limit,
    account.c.unlimited,
    account.c.version,
)


def account_states(unit: ReadUnit, account_ids: Collection[str] | None = None) -> dict[str, AccountState]:
    """Return customers' accounts by id: those asked for, or all."""
    wanted = _STATE.where(account.c.kind == CUSTOMER)
    if account_ids is not None:
        wanted = wanted.where(account.c.id.in_(sorted(account_ids)))
    return {row.id: AccountState(*row[1:]) for row in unit.select(wanted)}


def changed_since(unit: ReadUnit, epoch: int) -> tuple[int, dict[str, AccountState]]:
    """Return the accounts epoch and the customers' accounts that something other than a journal changed after
    `epoch`."""
    now = epochs.current(unit, epochs.ACCOUNTS)
    if now == epoch:
        return now, {}
    rows = unit.select(_STATE.where(account.c.kind == CUSTOMER, account.c.epoch > epoch))
    return now, {row.id: AccountState(*row[1:]) for row in rows}
