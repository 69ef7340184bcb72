"""How much money each account can still promise, in memory: exact at every moment, without asking the database.

    available = posted - held + credit_limit        (the ledger's own rule, over the ledger's rows …)
              + effects of journal records that the ledger has not applied yet   (… and what is still on its way to
              them)

The sum is kept as two parts so that the ledger may also be changed by others (a top-up, a new credit limit): the row
as last read, and the effects of our own records above the sequence number that this reading included. Pure: no clock,
no I/O, one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec

from marketplace.ledger.book import AccountState


class _Effect(msgspec.Struct, frozen=True):
    seq: int
    posted: int
    held: int


class Purse:
    """One account's money. Effects are given in rising sequence numbers."""

    __slots__ = ("_held", "_pending", "_posted", "_standing")

    def __init__(self, standing: AccountState) -> None:
        self._standing = standing
        self._pending: deque[_Effect] = deque()
        self._posted = standing.posted
        self._held = standing.held

    @property
    def standing(self) -> AccountState:
        """The ledger's row as last read."""
        return self._standing

    @property
    def posted(self) -> int:
        """Posted balance with everything on its way to the ledger, nano-units."""
        return self._posted

    @property
    def held(self) -> int:
        """Sum of open holds with everything on its way to the ledger, nano-units."""
        return self._held

    @property
    def available(self) -> int:
        """What a new hold may take, nano-units; says nothing for an unlimited account."""
        return self._posted - self._held + self._standing.credit_limit

    def reserve(self, seq: int, amount: int) -> bool:
        """Take `amount` ≥ 0 for the journal record `seq`; False, and nothing taken, when there is not enough."""
        if amount < 0:
            raise ValueError(f"a hold of {amount} nano-units")
        if amount > self.available and not self._standing.unlimited:
            return False
        self._add(_Effect(seq, 0, amount))
        return True

    def end_hold(self, seq: int, held: int, charged: int) -> None:
        """The record `seq` releases a hold of `held` and takes `charged` (0 when it is not billed)."""
        self._add(_Effect(seq, -charged, -held))

    def lost(self, from_seq: int) -> None:
        """Records from `from_seq` on were never written: their effects did not happen."""
        pending = self._pending
        while pending and pending[-1].seq >= from_seq:
            effect = pending.pop()
            self._posted -= effect.posted
            self._held -= effect.held

    def refresh(self, standing: AccountState, applied_seq: int) -> None:
        """Take a reading of the row that includes our records up to applied_seq. Older readings change nothing."""
        if standing.version < self._standing.version:
            return
        pending = self._pending
        while pending and pending[0].seq <= applied_seq:
            pending.popleft()
        self._standing = standing
        self._posted = standing.posted + sum(effect.posted for effect in pending)
        self._held = standing.held + sum(effect.held for effect in pending)

    def _add(self, effect: _Effect) -> None:
        assert not self._pending or effect.seq > self._pending[-1].seq, "effects out of order"
        if effect.posted or effect.held:
            self._pending.append(effect)
            self._posted += effect.posted
            self._held += effect.held


class Purses:
    """The purses of every account that this gateway has met."""

    def __init__(self) -> None:
        self._purses: dict[str, Purse] = {}

    def __len__(self) -> int:
        return len(self._purses)

    def get(self, account_id: str) -> Purse | None:
        """The account's purse, None while its row has not been read."""
        return self._purses.get(account_id)

    def ids(self) -> list[str]:
        """Accounts that are known."""
        return list(self._purses)

    def refresh(self, standings: Mapping[str, AccountState], applied_seq: int) -> None:
        """Take rows by account id, read in one transaction that included our records up to applied_seq."""
        purses = self._purses
        for account_id, standing in standings.items():
            purse = purses.get(account_id)
            if purse is None:
                purses[account_id] = Purse(standing)
            else:
                purse.refresh(standing, applied_seq)

    def lost(self, from_seq: int) -> None:
        """Records from `from_seq` on were never written."""
        for purse in self._purses.values():
            purse.lost(from_seq)
