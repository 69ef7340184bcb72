"""The billing truth table, row by row, and what holds for all of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.ledger.money import MoneyError, Price, Tokens
from marketplace.ledger.rules import (
    DAY_US,
    NOT_STARTED,
    OUR_FAULT,
    OUTCOMES,
    PREFILL_ALLOWANCE,
    Outcome,
    charge_nano,
    day_start,
    judge,
)

METERED = Tokens(prompt=100, cached=40, completion=7)
NOTHING = Tokens()


@pytest.mark.parametrize(
    ("outcome", "metered", "charged", "billable", "reason"),
    [
        ("refused", NOTHING, NOTHING, False, "not_started"),
        ("cancelled", NOTHING, NOTHING, False, "not_started"),
        ("disconnected", NOTHING, NOTHING, False, "not_started"),
        ("disconnected", Tokens(100, 40, 0), NOTHING, False, "prefill_allowance"),
        ("disconnected", METERED, METERED, True, "partial_output"),
        ("finished", METERED, METERED, True, "completed"),
        ("finished", Tokens(100, 40, 0), Tokens(100, 40, 0), True, "completed"),
        ("engine_error", METERED, NOTHING, False, "engine_error"),
        ("timeout", METERED, NOTHING, False, "timeout"),
        ("server_fault", METERED, NOTHING, False, "server_fault"),
        ("content_filter", METERED, Tokens(100, 40, 0), True, "filtered"),
        ("out_of_funds", METERED, METERED, True, "funds_exhausted"),
    ],
)
def test_truth_table(outcome: Outcome, metered: Tokens, charged: Tokens, billable: bool, reason: str) -> None:
    verdict = judge(outcome, metered)
    assert (verdict.charged, verdict.billable, verdict.reason) == (charged, billable, reason)


@pytest.mark.parametrize(
    ("left", "billable", "reason", "used"),
    [
        (100, False, "prefill_allowance", 100),
        (PREFILL_ALLOWANCE, False, "prefill_allowance", 100),
        (99, True, "prefill_over_allowance", 0),
        (0, True, "prefill_over_allowance", 0),
    ],
)
def test_abandoned_prefill_is_free_while_the_allowance_lasts(left: int, billable: bool, reason: str, used: int) -> None:
    verdict = judge("disconnected", Tokens(100, 40, 0), allowance_left=left)
    assert (verdict.billable, verdict.reason, verdict.allowance_used) == (billable, reason, used)
    assert verdict.charged == (Tokens(100, 40, 0) if billable else NOTHING)


counters = st.integers(0, 5000).flatmap(
    lambda prompt: st.builds(
        Tokens, prompt=st.just(prompt), cached=st.integers(0, prompt), completion=st.integers(0, 5000)
    )
)
price = Price(prompt=3_000_001, cached=700_003, completion=9_000_007)


@given(st.sampled_from(OUTCOMES), counters, st.integers(0, 10_000))
def test_whatever_happens(outcome: Outcome, metered: Tokens, left: int) -> None:
    verdict = judge(outcome, metered, left)
    cost = charge_nano(outcome, metered, verdict.billable, price)
    assert verdict.charged.prompt <= metered.prompt and verdict.charged.completion <= metered.completion
    assert 0 <= verdict.allowance_used <= left
    assert cost == charge_nano("finished", verdict.charged, True, price)
    if not verdict.billable:
        assert cost == 0 and verdict.charged == NOTHING
    if outcome in OUR_FAULT or outcome in NOT_STARTED:
        assert not verdict.billable
    if outcome == "finished":
        assert verdict.charged == metered


def test_our_fault_costs_nothing_even_if_a_record_says_billable() -> None:
    assert charge_nano("engine_error", METERED, True, price) == 0


def test_impossible_counters_are_refused() -> None:
    with pytest.raises(MoneyError):
        judge("finished", Tokens(1, 2, 0))


@given(st.integers(0, 4 * 10**15))
def test_days(at: int) -> None:
    start = day_start(at)
    assert start <= at < start + DAY_US
    assert start % DAY_US == 0
