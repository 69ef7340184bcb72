"""The open page of the ledger: accounts read under lock, changed in memory by pure steps, written back once.

Every change of money, whether a top-up or a batch of a thousand settlements, is a sequence of these steps; nothing
else computes a balance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from marketplace.ledger.chain import Posting
from marketplace.ledger.money import MAX_AMOUNT, check_amount

CUSTOMER = "customer"
FUNDING = frozenset({"clearing", "promo_expense"})
"""Kinds of platform accounts that funds come from. What moves without them is paid for use, or gives that back."""


class LedgerError(Exception):
    """A posting that the ledger refuses. Nothing of the unit that raised it may be committed."""


class UnknownAccountError(LedgerError):
    """There is no account of that id."""


class InsufficientFundsError(LedgerError):
    """A customer's account cannot cover an amount."""

    def __init__(self, account_id: str, needed: int, available: int) -> None:
        super().__init__(f"account {account_id} has {available} nano-units available, {needed} needed")
        self.account_id = account_id
        self.needed = needed
        self.available = available


class AccountState(msgspec.Struct, frozen=True):
    """What an account has: nano-units posted and held, how far it may go below zero, and the version of this view."""

    posted: int
    held: int
    credit_limit: int
    unlimited: bool
    version: int

    @property
    def available(self) -> int:
        """What may still be spent, in nano-units; without meaning for an unlimited account."""
        return self.posted - self.held + self.credit_limit


@dataclass(slots=True)
class Account:
    """One account while it is locked."""

    id: str
    kind: str
    posted: int
    held: int
    credit_limit: int
    unlimited: bool
    entries: int
    version: int
    spent: int
    changed: bool = False

    @property
    def available(self) -> int:
        """What may still be spent, in nano-units."""
        return self.posted - self.held + self.credit_limit

    @property
    def bounded(self) -> bool:
        """Whether the account must never spend more than is available."""
        return self.kind == CUSTOMER and not self.unlimited

    def hold(self, asked: int) -> int:
        """Set an amount aside, as far as the account can cover it; returns what was set aside."""
        granted = min(asked, max(0, self.available)) if self.bounded else asked
        self.held += granted
        self.changed = True
        return granted

    def release(self, amount: int) -> None:
        """Give back an amount that was set aside."""
        self.held -= amount
        self.changed = True
        if self.held < 0:
            raise LedgerError(f"account {self.id} would hold {self.held}")

    def row(self) -> dict[str, int | str]:
        """Return what steps change, and the id."""
        return {
            "id": self.id,
            "posted": self.posted,
            "held": self.held,
            "spent": self.spent,
            "entries": self.entries,
            "version": self.version,
        }

    def state(self) -> AccountState:
        """Return what others may know of it."""
        return AccountState(self.posted, self.held, self.credit_limit, self.unlimited, self.version)


def post(
    accounts: dict[str, Account],
    posting: Posting,
    *,
    tx_id: str,
    key: str,
    kind: str,
    input_hash: bytes,
    occurred_at: int,
    entries: Sequence[tuple[str, int]],
    memo: str = "",
    refers_to: str | None = None,
) -> None:
    """Add one transaction: (account id, signed amount) pairs that sum to zero, none of them zero.

    LedgerError when they do not, UnknownAccountError, MoneyError beyond the range, InsufficientFundsError when a
    bounded account would go below what it may; the accounts are then half changed and must be thrown away.
    """
    if not entries or sum(amount for _, amount in entries) != 0:
        raise LedgerError(f"transaction {key} does not balance: {list(entries)}")
    posting.txs.append(
        {
            "id": tx_id,
            "idempotency_key": key,
            "input_hash": input_hash,
            "kind": kind,
            "occurred_at": occurred_at,
            "refers_to": refers_to,
            "memo": memo,
        }
    )
    brings_funds = any(name in accounts and accounts[name].kind in FUNDING for name, _ in entries)
    for seq, (account_id, amount) in enumerate(entries):
        account = accounts.get(account_id)
        if account is None:
            raise UnknownAccountError(f"no account {account_id}")
        if amount == 0:
            raise LedgerError(f"transaction {key} moves nothing on account {account_id}")
        if amount < 0 and account.bounded and account.available + amount < 0:
            raise InsufficientFundsError(account_id, -amount, account.available)
        check_amount(amount)
        account.posted += amount
        if account.kind == CUSTOMER:
            posting.customers.add(account_id)
            account.spent -= 0 if brings_funds else amount
        account.entries += 1
        account.changed = True
        # Platform accounts collect what all customers spend and may outgrow one customer's bound, never 64 bits.
        if abs(account.posted) > (MAX_AMOUNT if account.kind == CUSTOMER else 8 * MAX_AMOUNT):
            raise LedgerError(f"balance of account {account_id} would leave its range")
        posting.entries.append(
            {
                "tx_id": tx_id,
                "seq": seq,
                "account_id": account_id,
                "amount": amount,
                "balance_after": account.posted,
                "ordinal": account.entries,
            }
        )
