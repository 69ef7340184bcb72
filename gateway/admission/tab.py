"""One request's tab on the limits of its key: what it holds of the budget, and what it took of the tokens per minute.

A tab stands between a charge and the meter that owns it: it sees every report of progress and the end, passes them
on, and keeps the key's counters in step with them. Only requests of keys with such limits have one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from gateway.admission.budgets import Spending
from gateway.admission.token_rate import TokenRate
from gateway.metering.charge import Charge, Owner, Settlement, Stop, Timings
from gateway.metering.cover import Cover
from marketplace.ledger.money import Tokens
from marketplace.ledger.records import Source
from marketplace.ledger.rules import Outcome

Clock = Callable[[], int]


class BudgetShare:
    """What one request holds of a spending; follows the arithmetic of the hold on its account."""

    __slots__ = ("_clock", "_cover", "_limit", "spending")

    def __init__(self, spending: Spending, limit: int | None, cover: Cover, clock: Clock) -> None:
        """The cover's amount is held already. Without a limit it only counts. `clock` gives µs UTC."""
        self.spending = spending
        self._limit = limit
        self._cover = cover
        self._clock = clock

    def extend(self, tokens: Tokens) -> Stop | None:
        """Hold one more slice when what is held runs low. Without room the request goes on until only the stop margin
        is left: others may give back theirs."""
        cover = self._cover
        if not cover.low(tokens):
            return None
        wider = cover.next(tokens)
        more = wider.amount - cover.amount
        if self._limit is None:
            self.spending.held += more
        elif not self.spending.reserve(self._clock(), more, self._limit):
            return Stop.INSUFFICIENT_QUOTA if cover.spent(tokens) else None
        self._cover = wider
        return None

    def end(self, cost: int) -> None:
        """Give back what is held and count what was charged."""
        self.spending.settle(self._clock(), self._cover.amount, cost)


class TokenShare:
    """What one request took of the tokens per minute."""

    __slots__ = ("_clock", "_rate", "_taken")

    def __init__(self, rate: TokenRate, taken: int, clock: Clock) -> None:
        """`clock` gives µs that never jump."""
        self._rate = rate
        self._taken = taken
        self._clock = clock

    def end(self, used: Tokens) -> None:
        """Give back what was not used."""
        self._rate.correct(self._clock(), self._taken - used.prompt - used.completion)


class Tab:
    """Made at admission; `follow` the charge once it is open, `cancel` when it never is, `close` when the answer is
    over."""

    __slots__ = ("_charge", "_closed", "_owner", "budget", "tokens")

    def __init__(self, budget: BudgetShare | None = None, tokens: TokenShare | None = None) -> None:
        self.budget = budget
        self.tokens = tokens
        self._charge: Charge | None = None
        self._owner: Owner
        self._closed = False

    def follow(self, charge: Charge) -> None:
        """See everything that the charge tells its owner from now on."""
        self._charge = charge
        self._owner = charge.through(self)

    def follows(self, spending: Spending) -> bool:
        """Whether this tab, or one behind it, counts for the spending."""
        if self.budget is not None and self.budget.spending is spending:
            return True
        return isinstance(self._owner, Tab) and self._owner.follows(spending)

    def cancel(self) -> None:
        """The request never began; changes nothing once its charge is followed."""
        if self._charge is None and self._closes(Tokens()) and self.budget is not None:
            self.budget.end(0)

    def close(self) -> None:
        """The answer is over: learn of an end that its charge did not ask for."""
        charge = self._charge
        if charge is not None and charge.end is not None and not self._closed:
            self._await_end(charge, charge.counters)

    # -- what a charge asks of its owner ------------------------------------------------------------

    def note(self, charge: Charge, tokens: Tokens) -> Stop | None:
        """Take note of what the request has consumed so far."""
        stop = self._owner.note(charge, tokens)
        if stop is None and self.budget is not None:
            stop = self.budget.extend(tokens)
        return stop

    def finish(
        self, charge: Charge, outcome: Outcome, tokens: Tokens, source: Source, engine_epoch: str, timings: Timings
    ) -> None:
        """Queue the settlement."""
        self._owner.finish(charge, outcome, tokens, source, engine_epoch, timings)
        self._await_end(charge, tokens)

    def give_back(self, charge: Charge, reason: str) -> None:
        """Queue the void."""
        self._owner.give_back(charge, reason)
        self._await_end(charge, Tokens())

    def own(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run the work in a task that outlives the request."""
        return self._owner.own(work)

    # -- the end ------------------------------------------------------------------------------------

    def _await_end(self, charge: Charge, used: Tokens) -> None:
        """The tokens are known now; the money when the settlement is durable."""
        assert charge.end is not None, "an end was queued"
        if self._closes(used) and self.budget is not None:
            charge.end.add_done_callback(self._settled)

    def _settled(self, done: asyncio.Future[Settlement | None]) -> None:
        """A settlement that could not be written in time is written later, and free; a hold that was lost owes
        nothing."""
        failed = done.cancelled() or done.exception() is not None
        settlement = None if failed else done.result()
        assert self.budget is not None
        self.budget.end(0 if settlement is None else settlement.cost)

    def _closes(self, used: Tokens) -> bool:
        """Give back the tokens that were not used; False when the tab was closed before."""
        if self._closed:
            return False
        self._closed = True
        if self.tokens is not None:
            self.tokens.end(used)
        return True
