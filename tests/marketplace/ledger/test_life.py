"""The ledger under a random life: every step is also taken by a small oracle made of dicts, and both must agree.

Top-ups (repeated too), credit, holds, extensions, checkpoints, ends of every kind, price changes, refunds, batches of
any size, replays of any part of the journal, crashes before a commit. At the end the audit must be clean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from marketplace.accounts import service as accounts
from marketplace.accounts.service import RefundError
from marketplace.ledger.apply import apply_batch
from marketplace.ledger.ledger import CLEARING, REFUNDS, WRITEOFF, CreditInUseError, revenue_account
from marketplace.ledger.records import Checkpoint, Extend, Hold, JournalRecord, Settle

if TYPE_CHECKING:
    from marketplace.store.db import Database
    from tests.marketplace.conftest import MakeDatabase, Shop

FREE = {"engine_error", "timeout", "server_fault"}


@dataclass
class Purse:
    """The oracle's idea of a customer."""

    posted: int = 0
    limit: int = 0
    unlimited: bool = False
    holds: dict[str, int] = field(default_factory=dict)

    @property
    def available(self) -> int:
        return self.posted - sum(self.holds.values()) + self.limit


class Life(RuleBasedStateMachine):
    """One random life of a shop with three customers."""

    def __init__(self, shop: Shop) -> None:
        super().__init__()
        self.shop = shop
        self.purses = {shop.customer(): Purse() for _ in range(3)}
        self.names = sorted(self.purses)
        self.platform = dict.fromkeys((CLEARING, WRITEOFF, REFUNDS, revenue_account("tiny")), 0)
        self.journal: list[JournalRecord] = []
        self.applied = 0
        self.running: dict[str, str] = {}
        self.prices = {shop.price_id: (1_000_000, 500_000, 2_000_000)}
        self.price_of: dict[str, str] = {}
        self.paid: dict[str, tuple[str, int]] = {}
        self.refunded: dict[str, int] = {}
        self.top_ups: list[tuple[str, str, int]] = []

    @rule(who=st.integers(0, 2), amount=st.integers(1, 3000))
    def top_up(self, who: int, amount: int) -> None:
        name, key = self.names[who], f"key-{len(self.top_ups)}"
        assert not self.shop.top_up(name, amount, key=key).replayed
        self.top_ups.append((name, key, amount))
        self.purses[name].posted += amount
        self.platform[CLEARING] -= amount

    @precondition(lambda self: self.top_ups)
    @rule(data=st.data())
    def top_up_again(self, data: st.DataObject) -> None:
        name, key, amount = data.draw(st.sampled_from(self.top_ups))
        assert self.shop.top_up(name, amount, key=key).replayed

    @rule(who=st.integers(0, 2), limit=st.integers(0, 1000), unlimited=st.booleans())
    def give_credit(self, who: int, limit: int, unlimited: bool) -> None:
        name = self.names[who]
        purse = self.purses[name]
        allowed = purse.unlimited or purse.available - purse.limit + limit >= 0
        try:
            with self.shop.database.write() as unit:
                accounts.set_credit_limit(unit, name, limit)
        except CreditInUseError:
            assert not allowed
        else:
            assert allowed
            purse.limit = limit
        allowed = unlimited or purse.available >= 0
        try:
            with self.shop.database.write() as unit:
                accounts.set_unlimited(unit, name, unlimited)
        except CreditInUseError:
            assert not allowed
        else:
            assert allowed
            purse.unlimited = unlimited

    @rule(prompt=st.integers(0, 3_000_000), completion=st.integers(0, 5_000_000))
    def reprice(self, prompt: int, completion: int) -> None:
        self.shop.price_id = self.shop.price(prompt, prompt // 3, completion)
        self.prices[self.shop.price_id] = (prompt, prompt // 3, completion)

    @rule(who=st.integers(0, 2), amount=st.integers(0, 800))
    def begin(self, who: int, amount: int) -> None:
        record = self.shop.hold(self.names[who], amount)
        self.journal.append(record)
        self.running[record.request_id] = record.account_id
        self.price_of[record.request_id] = record.price_id

    @precondition(lambda self: self.running)
    @rule(data=st.data(), amount=st.integers(0, 500), counters=st.integers(0, 100))
    def go_on(self, data: st.DataObject, amount: int, counters: int) -> None:
        request = data.draw(st.sampled_from(sorted(self.running)))
        self.journal.append(self.shop.checkpoint(request, counters, counters // 2, counters))
        if amount:
            self.journal.append(self.shop.extend(request, amount))

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(),
        prompt=st.integers(0, 300),
        completion=st.integers(0, 300),
        outcome=st.sampled_from(
            ["finished", "disconnected", "content_filter", "out_of_funds", "engine_error", "timeout"]
        ),
    )
    def end(self, data: st.DataObject, prompt: int, completion: int, outcome: str) -> None:
        request = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[request]
        self.journal.append(self.shop.settle(request, prompt, prompt // 4, completion, outcome=outcome))  # type: ignore[arg-type]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reason=st.sampled_from(["refused", "expired"]))
    def give_up(self, data: st.DataObject, reason: str) -> None:
        request = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[request]
        self.journal.append(self.shop.void(request, reason))

    @precondition(lambda self: self.applied < len(self.journal))
    @rule(size=st.integers(1, 12), overlap=st.integers(0, 5))
    def apply(self, size: int, overlap: int) -> None:
        until = min(len(self.journal), self.applied + size)
        done = self.shop.apply(*self.journal[max(0, self.applied - overlap) : until])
        for record in self.journal[self.applied : until]:
            self._follow(record)
        self.applied = until
        assert done.quarantined == 0
        for name, state in done.accounts.items():
            purse = self.purses[name]
            assert (state.posted, state.held) == (purse.posted, sum(purse.holds.values()))

    @precondition(lambda self: self.applied < len(self.journal))
    @rule(size=st.integers(1, 12))
    def crash(self, size: int) -> None:
        with pytest.raises(RuntimeError, match="power"), self.shop.database.write() as unit:
            apply_batch(unit, "gateway-1", self.journal[self.applied : self.applied + size])
            raise RuntimeError("power failure")

    @precondition(lambda self: self.applied)
    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, self.applied))
        before = self.shop.dump()
        self.shop.apply(*self.journal[start : self.applied])
        assert self.shop.dump() == before

    @precondition(lambda self: self.paid)
    @rule(data=st.data(), amount=st.integers(1, 200))
    def give_back(self, data: st.DataObject, amount: int) -> None:
        request = data.draw(st.sampled_from(sorted(self.paid)))
        name, charged = self.paid[request]
        allowed = self.refunded.get(request, 0) + amount <= charged
        key = f"refund-{request}-{self.refunded.get(request, 0)}"
        try:
            with self.shop.database.write() as unit:
                accounts.refund(unit, request, amount, key=key, now=self.shop.tick(), random=self.shop.random)
        except RefundError:
            assert not allowed
        else:
            assert allowed
            self.refunded[request] = self.refunded.get(request, 0) + amount
            self.purses[name].posted += amount
            self.platform[REFUNDS] -= amount

    def _follow(self, record: JournalRecord) -> None:
        """Take the same step in the oracle."""
        if isinstance(record, Checkpoint):
            return
        purse = next(
            (purse for purse in self.purses.values() if record.request_id in purse.holds),
            self.purses[record.account_id] if isinstance(record, Hold) else None,
        )
        assert purse is not None
        if isinstance(record, Hold | Extend):
            granted = record.amount if purse.unlimited else min(record.amount, max(0, purse.available))
            purse.holds[record.request_id] = purse.holds.get(record.request_id, 0) + granted
            return
        del purse.holds[record.request_id]
        if isinstance(record, Settle):
            self._charge(record, purse)

    def _charge(self, record: Settle, purse: Purse) -> None:
        prompt_price, cached_price, completion_price = self.prices[self.price_of[record.request_id]]
        exact = Fraction(
            (record.prompt - record.cached) * prompt_price
            + record.cached * cached_price
            + (0 if record.outcome == "content_filter" else record.completion * completion_price),
            1_000_000,
        )
        abandoned = record.outcome == "disconnected" and record.completion == 0
        cost = 0 if record.outcome in FREE or abandoned else math.floor(exact + Fraction(1, 2))
        paid = cost if purse.unlimited else min(cost, max(0, purse.available))
        purse.posted -= paid
        self.platform[WRITEOFF] -= cost - paid
        self.platform[revenue_account("tiny")] += cost
        if paid:
            name = next(name for name, other in self.purses.items() if other is purse)
            self.paid[record.request_id] = (name, paid)

    def teardown(self) -> None:
        """Let everything arrive, compare every balance, and audit."""
        for request in sorted(self.running):
            self.journal.append(self.shop.void(request))
        self.running.clear()
        if self.applied < len(self.journal):
            self.apply(size=len(self.journal), overlap=0)
        for name, purse in self.purses.items():
            state = self.shop.state(name)
            assert (state.posted, state.held, state.credit_limit) == (purse.posted, 0, purse.limit)
            assert purse.unlimited or purse.posted + purse.limit >= 0
        for name, posted in self.platform.items():
            assert self.shop.posted(name) == posted
        report = self.shop.audit()
        assert report.clean, "\n".join(report.lines())


def _live(
    fresh: MakeDatabase, make_shop: Callable[[Database], Shop], examples: int, steps: int, same: bool = False
) -> list[Life]:
    """Live so many lives, the `same` ones each time or others."""
    lives: list[Life] = []

    def begin() -> Life:
        lives.append(Life(make_shop(fresh())))
        return lives[-1]

    run_state_machine_as_test(
        begin,  # type: ignore[arg-type]  # any callable that makes a machine is called the same way
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=same,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return lives


def test_a_random_life(fresh_database: MakeDatabase, make_shop: Callable[[Database], Shop]) -> None:
    lives = _live(fresh_database, make_shop, examples=6, steps=50, same=True)
    assert any(life.paid for life in lives)


@pytest.mark.slow
def test_many_random_lives(fresh_database: MakeDatabase, make_shop: Callable[[Database], Shop]) -> None:
    lives = _live(fresh_database, make_shop, examples=200, steps=80)
    assert any(life.refunded for life in lives) and any(life.platform[WRITEOFF] for life in lives)
