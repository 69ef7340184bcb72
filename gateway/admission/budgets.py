"""What keys may spend in a period: exact at every moment, without asking the database. Pure: the time is passed in.

    left = budget - spent - held        spent: settled in this window; held: what running requests may still cost

Keys that replaced one another share a spending; each has its own limit. A request counts in the window in which it is
settled.
"""

from __future__ import annotations

from typing import NamedTuple

from marketplace.keys.budgets import BudgetPeriod, window


class Spending:
    """What a key, or keys that replaced one another, spent in the current window."""

    __slots__ = ("held", "period", "since", "spender", "spent", "until")

    def __init__(self, spender: str, period: BudgetPeriod) -> None:
        self.spender = spender
        self.period = period
        self.since = self.until = 0
        self.spent = 0
        """nano-units settled since the window began, or since it was last said that it is unknown"""
        self.held = 0
        """nano-units that running requests hold"""

    @property
    def known(self) -> bool:
        """Whether the window's beginning was read from the ledger."""
        return self.until > 0

    def forget(self) -> None:
        """The window is about to be read: count from now on only what the reading will not contain."""
        self.since = self.until = self.spent = 0

    def begin(self, at: int, spent: int, now: int) -> None:
        """Take what the ledger had at `at`; what was counted since `forget`, and what is held, comes on top.

        A window that ended while it was read takes with it what the ledger had of it.
        """
        self.since, self.until = window(self.period, max(at, now))
        self.spent += spent if at >= self.since else 0

    def reserve(self, now: int, amount: int, limit: int) -> bool:
        """Hold `amount` ≥ 0 if the window of `now` has room for it under `limit`; False, and nothing held, if not."""
        if amount < 0:
            raise ValueError(f"a hold of {amount} nano-units")
        self.roll(now)
        if self.spent + self.held + amount > limit:
            return False
        self.held += amount
        return True

    def settle(self, now: int, held: int, cost: int) -> None:
        """Give back a hold of `held` and count what was charged; 0 when it is not billed."""
        if not 0 <= held <= self.held:
            raise ValueError(f"{held} nano-units given back of {self.held}")
        self.roll(now)
        self.held -= held
        self.spent += cost

    def left(self, now: int, limit: int) -> int:
        """What may still be held under `limit`; negative after a limit was lowered."""
        self.roll(now)
        return limit - self.spent - self.held

    def roll(self, now: int) -> None:
        """Begin a new window when the current one is over. A clock that steps back does not bring an old one back."""
        if now >= self.until > 0:
            self.since, self.until = window(self.period, now)
            self.spent = 0


class Budget(NamedTuple):
    """One key's limit, in nano-units, and the spending that it limits."""

    limit: int
    spending: Spending
