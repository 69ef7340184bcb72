from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.wire import Counters
from gateway.metering.cover import SLICE, STOP_MARGIN, Cover, metered, worst_cost
from marketplace.ledger.money import Price, Tokens, cost_nano

PRICES = st.builds(Price, *(st.integers(0, 10**12) for _ in range(3)))


def test_the_first_slice_is_the_prompt_and_at_most_1024_tokens_for_each_choice() -> None:
    price = Price(10**6, 10**5, 4 * 10**6)  # 1, 0.1 and 4 nano-units per token
    assert Cover.first(price, 10, 100, 1).amount == 10 + 4 * 100
    assert Cover.first(price, 10, 5000, 1).amount == 10 + 4 * 1024
    assert Cover.first(price, 10, 5000, 3).amount == 10 + 4 * 3 * 1024
    assert Cover.first(price, 10, 5000, 3).limit == 15_000


@pytest.mark.parametrize(("prompt", "most", "choices"), [(-1, 1, 1), (1, -1, 1), (1, 1, 0)])
def test_impossible_counts_are_refused(prompt: int, most: int, choices: int) -> None:
    with pytest.raises(ValueError, match="prompt tokens"):
        Cover.first(Price(1, 1, 1), prompt, most, choices)


def test_runs_low_at_three_quarters_of_a_slice_and_stops_at_the_margin() -> None:
    cover = Cover.first(Price(1, 1, 1), 10, 5000, 1)
    assert not cover.low(Tokens(10, 0, SLICE * 3 // 4 - 1))
    assert cover.low(Tokens(10, 0, SLICE * 3 // 4))
    assert not cover.spent(Tokens(10, 0, SLICE - STOP_MARGIN - 1))
    assert cover.spent(Tokens(10, 0, SLICE - STOP_MARGIN))


def test_a_cover_that_reaches_the_limit_never_runs_low() -> None:
    cover = Cover.first(Price(1, 1, 1), 10, 1024, 2)
    assert not cover.low(Tokens(10, 0, 2048))
    assert not cover.spent(Tokens(10, 0, 2048))
    assert cover.low(Tokens(11, 0, 0)), "a prompt longer than estimated must be covered"


def test_what_waited_in_the_queue_has_consumed_nothing() -> None:
    assert metered(Counters(prompt=50, cached=10, completion=0, started=False)) == Tokens()
    assert metered(Counters(prompt=50, cached=10, completion=0, started=True)) == Tokens(50, 10, 0)
    assert metered(Counters(prompt=50, cached=60, completion=3, started=True)) == Tokens(50, 50, 3)


@given(
    price=PRICES,
    prompt=st.integers(0, 10_000),
    most=st.integers(1, 5_000),
    choices=st.integers(1, 4),
    longer=st.integers(0, 500),
    data=st.data(),
)
def test_what_fits_the_cover_never_costs_more_than_it_holds(
    price: Price, prompt: int, most: int, choices: int, longer: int, data: st.DataObject
) -> None:
    cover = Cover.first(price, prompt, most, choices)
    used = 0
    while True:
        cached = data.draw(st.integers(0, prompt + longer))
        used = min(cover.completion, used + data.draw(st.integers(1, 900)))
        tokens = Tokens(prompt + longer, cached, used)
        before = cover
        if cover.low(tokens):
            cover = cover.next(tokens)
        assert cover.amount >= before.amount
        assert cost_nano(tokens.prompt, tokens.cached, tokens.completion, price) <= cover.amount
        assert cover.completion <= cover.limit == most * choices
        assert not cover.spent(tokens) or cover.completion - used <= STOP_MARGIN * choices
        if used == cover.limit:
            break
    assert cover.amount == max(cover.amount, worst_cost(prompt, used, price))
