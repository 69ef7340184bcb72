"""Budgets: what is spent and held, against a model that remembers everything; windows of the calendar."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.admission.budgets import Budget, Spending
from marketplace.keys.budgets import NEVER, PERIODS, BudgetPeriod, BudgetPeriodError, read_period, window

DAY = 86_400_000_000
AT = 1_800_000_000_000_000  # Friday, 2027-01-15 08:00 UTC


def us(*date: int) -> int:
    return int(datetime(*date, tzinfo=UTC).timestamp()) * 1_000_000  # type: ignore[misc,arg-type]


@pytest.mark.parametrize(
    ("period", "begin", "end"),
    [
        ("day", us(2027, 1, 15), us(2027, 1, 16)),
        ("week", us(2027, 1, 11), us(2027, 1, 18)),
        ("month", us(2027, 1, 1), us(2027, 2, 1)),
        ("total", 0, NEVER),
    ],
)
def test_windows_are_those_of_the_calendar_in_utc(period: BudgetPeriod, begin: int, end: int) -> None:
    assert window(period, AT) == (begin, end)
    assert window(period, begin) == (begin, end)
    if end != NEVER:
        assert window(period, end - 1) == (begin, end)
        assert window(period, end)[0] == end


@given(st.sampled_from(PERIODS), st.integers(0, us(2199, 1, 1)))
def test_windows_follow_one_another_without_a_gap(period: BudgetPeriod, at: int) -> None:
    begin, end = window(period, at)
    assert begin <= at < end
    if period != "total":
        assert begin % DAY == end % DAY == 0
        assert window(period, end)[0] == end and (begin == 0 or window(period, begin - 1)[1] == begin or begin < 0)
        first, following = datetime.fromtimestamp(begin / 1e6, UTC), datetime.fromtimestamp(end / 1e6, UTC)
        assert period != "week" or (first.weekday() == 0 and (following - first).days == 7)
        assert period != "month" or (first.day == following.day == 1 and 28 <= (following - first).days <= 31)


def test_there_are_no_other_periods() -> None:
    assert [read_period(period) for period in PERIODS] == list(PERIODS)
    with pytest.raises(BudgetPeriodError, match="'year'"):
        read_period("year")


class BudgetMachine(RuleBasedStateMachine):
    """Requests hold, extend and end while days pass; the model keeps a list of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.now = AT
        self.spending = Spending("key", "day")
        self.spending.forget()
        self.spending.begin(AT, 0, AT)
        self.limit = 1000
        self.holds: list[int] = []
        self.paid: list[tuple[int, int]] = []
        self.peak = 0

    def spent(self) -> int:
        begin, end = window("day", self.now)
        return sum(cost for at, cost in self.paid if begin <= at < end)

    @rule(amount=st.integers(0, 1200))
    def hold(self, amount: int) -> None:
        fits = self.spent() + sum(self.holds) + amount <= self.limit
        assert self.spending.reserve(self.now, amount, self.limit) == fits
        if fits:
            self.holds.append(amount)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        held = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        cost = data.draw(st.integers(0, held))
        self.spending.settle(self.now, held, cost)
        self.paid.append((self.now, cost))

    @rule(us=st.sampled_from([1, 3_600_000_000, DAY, 40 * DAY]))
    def wait(self, us: int) -> None:
        self.now += us

    @rule(limit=st.integers(1, 2000))
    def another_limit(self, limit: int) -> None:
        self.limit = limit

    @rule()
    def restart(self) -> None:
        """A crash: what ran is over, free of charge; the ledger knows the rest."""
        self.holds.clear()
        before = self.spent()
        self.spending = Spending("key", "day")
        assert not self.spending.known
        self.spending.forget()
        self.spending.begin(self.now, before, self.now)

    @invariant()
    def nothing_is_forgotten(self) -> None:
        assert self.spending.left(self.now, self.limit) == self.limit - self.spent() - sum(self.holds)
        assert (self.spending.spent, self.spending.held) == (self.spent(), sum(self.holds))


TestBudgetMachine = BudgetMachine.TestCase


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 500))
def test_a_limit_is_never_passed_by_what_was_admitted(amounts: list[int], limit: int) -> None:
    spending = Spending("key", "total")
    spending.begin(AT, 0, AT)
    admitted = [amount for amount in amounts if spending.reserve(AT, amount, limit)]
    assert sum(admitted) == spending.held <= limit
    for amount in admitted:
        spending.settle(AT, amount, amount)
    assert (spending.spent, spending.held) == (sum(admitted), 0)


def test_a_budget_for_seven_admits_seven() -> None:
    budget = Budget(7 * 100, Spending("key", "month"))
    budget.spending.begin(AT, 0, AT)
    assert [budget.spending.reserve(AT, 100, budget.limit) for _ in range(10)] == [True] * 7 + [False] * 3
    budget.spending.settle(AT, 100, 40)
    assert budget.spending.left(AT, budget.limit) == 60
    assert not budget.spending.reserve(AT, 61, budget.limit) and budget.spending.reserve(AT, 60, budget.limit)


def test_what_is_counted_while_the_ledger_is_read_comes_on_top() -> None:
    spending = Spending("key", "day")
    spending.held = 50
    spending.forget()
    spending.settle(AT, 50, 30)
    spending.begin(AT, 200, AT + 1)
    assert (spending.spent, spending.held, spending.known) == (230, 0, True)


def test_a_day_that_ends_while_it_is_read_takes_its_sum_along() -> None:
    midnight = us(2027, 1, 16)
    spending = Spending("key", "day")
    spending.forget()
    spending.begin(midnight - 1, 200, midnight + 1)
    assert (spending.spent, spending.since) == (0, midnight)


def test_a_clock_that_steps_back_does_not_renew_anything() -> None:
    spending = Spending("key", "day")
    spending.begin(AT, 0, AT)
    assert spending.reserve(AT + DAY, 10, 10)
    assert not spending.reserve(AT, 1, 10)
    assert spending.since == window("day", AT + DAY)[0]


def test_impossible_amounts_are_refused() -> None:
    spending = Spending("key", "day")
    spending.begin(AT, 0, AT)
    with pytest.raises(ValueError, match="a hold of -1"):
        spending.reserve(AT, -1, 10)
    with pytest.raises(ValueError, match="given back"):
        spending.settle(AT, 1, 0)
