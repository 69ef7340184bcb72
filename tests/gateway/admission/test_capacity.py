from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.capacity import SNAPSHOT_FRESH_US, Capacity, OverloadedError, Ticket


@dataclass
class View:
    running: int
    waiting: int


def test_places_and_queue_are_filled_and_then_refused() -> None:
    capacity = Capacity("tiny", places=2, queue_bound=3)
    tickets = [capacity.enter(0) for _ in range(5)]
    assert capacity.waiting == 3
    with pytest.raises(OverloadedError) as refusal:
        capacity.enter(0)
    assert (refusal.value.model, refusal.value.waiting, refusal.value.bound) == ("tiny", 3, 3)
    assert refusal.value.retry_after_s >= 1
    assert capacity.refused == 1
    capacity.leave(tickets[0], 10)
    capacity.leave(tickets[0], 10)  # once only
    assert capacity.in_flight == 4
    capacity.enter(10)
    with pytest.raises(OverloadedError):
        capacity.enter(10)


def test_choices_take_a_place_each_and_a_giant_may_enter_an_empty_house() -> None:
    capacity = Capacity("tiny", places=2, queue_bound=1)
    giant = capacity.enter(0, sequences=9)
    with pytest.raises(OverloadedError):
        capacity.enter(0)
    capacity.leave(giant, 1)
    capacity.enter(1, sequences=2)
    with pytest.raises(OverloadedError):
        capacity.enter(1, sequences=2)


def test_the_engines_own_queue_closes_the_door_while_its_word_is_fresh() -> None:
    capacity = Capacity("tiny", places=4, queue_bound=2)
    capacity.enter(0)
    capacity.observe(View(running=4, waiting=2), 0)
    with pytest.raises(OverloadedError):
        capacity.enter(SNAPSHOT_FRESH_US)
    capacity.enter(SNAPSHOT_FRESH_US + 1)
    capacity.observe(View(running=4, waiting=0), SNAPSHOT_FRESH_US + 2)
    capacity.enter(SNAPSHOT_FRESH_US + 2)
    capacity.enter(SNAPSHOT_FRESH_US + 2)
    with pytest.raises(OverloadedError):
        capacity.enter(SNAPSHOT_FRESH_US + 2)


def test_free_places_of_a_snapshot_are_used_before_its_queue() -> None:
    capacity = Capacity("tiny", places=4, queue_bound=0)
    capacity.observe(View(running=2, waiting=0), 0)
    capacity.enter(0)
    capacity.enter(0)
    with pytest.raises(OverloadedError):
        capacity.enter(0)


def test_retry_after_follows_from_how_long_requests_take() -> None:
    capacity = Capacity("tiny", places=1, queue_bound=1)
    slow = capacity.enter(0)
    capacity.leave(slow, 7_000_000)
    capacity.leave(capacity.enter(7_000_000), 7_000_001, served=False)  # a refused one teaches nothing
    capacity.enter(8_000_000)
    capacity.enter(8_000_000)
    with pytest.raises(OverloadedError) as refusal:
        capacity.enter(8_000_000)
    assert refusal.value.retry_after_s == 7
    capacity.leave(Ticket(0, 0), 10**12)
    with pytest.raises(OverloadedError) as refusal:
        capacity.enter(8_000_000)
    assert refusal.value.retry_after_s == 60


def test_bounds_can_be_changed_while_running() -> None:
    capacity = Capacity("tiny", places=1, queue_bound=0)
    capacity.enter(0)
    with pytest.raises(OverloadedError):
        capacity.enter(0)
    capacity.resize(2, 0)
    capacity.enter(0)
    capacity.resize(1, 0)
    assert capacity.in_flight == 2
    with pytest.raises(OverloadedError):
        capacity.enter(0)


@pytest.mark.parametrize(("places", "bound"), [(0, 1), (1, -1)])
def test_impossible_bounds_are_refused(places: int, bound: int) -> None:
    with pytest.raises(ValueError, match="places"):
        Capacity("tiny", places, bound)
    with pytest.raises(ValueError, match="places"):
        Capacity("tiny", 1, 1).resize(places, bound)


@given(
    places=st.integers(1, 5),
    bound=st.integers(0, 5),
    steps=st.lists(st.one_of(st.integers(1, 3), st.just(0)), max_size=60),
)
def test_single_requests_never_exceed_places_and_queue_together(places: int, bound: int, steps: list[int]) -> None:
    capacity = Capacity("tiny", places, bound)
    inside: list[Ticket] = []
    for step in steps:
        if step:
            empty = capacity.in_flight == 0
            try:
                inside.append(capacity.enter(0, step))
            except OverloadedError:
                assert capacity.in_flight + step > places + bound
            else:
                assert empty or capacity.in_flight <= places + bound
        elif inside:
            capacity.leave(inside.pop(0), 1)
        assert capacity.in_flight == sum(ticket.sequences for ticket in inside)
