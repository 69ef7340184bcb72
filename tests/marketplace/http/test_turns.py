"""Turns: first come first, nobody twice at once, and never a reason to wait for ever."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from marketplace.http.turns import Turns


def nothing() -> None:
    """What somebody lets go of who holds nothing."""


def test_one_at_a_time_in_the_order_of_arrival() -> None:
    turns, order, came = Turns(60), [], threading.Semaphore(0)
    with ThreadPoolExecutor(3) as pool:
        with turns.take("a", nothing):

            def one(number: int) -> None:
                with turns.take("a", came.release):
                    order.append(number)

            waiting = []
            for number in range(3):
                waiting.append(pool.submit(one, number))
                assert came.acquire(timeout=10), "it has let go of what it saw, and waits"
            with turns.take("b", nothing), turns.take("a", nothing):
                assert order == [], "another line, and one's own turn again"
        for each in waiting:
            each.result(10)
    assert order == [0, 1, 2] and turns._lines == {}


def test_who_has_waited_for_long_goes_ahead_and_who_fails_lets_others_in() -> None:
    turns, met = Turns(0.01), []
    with ThreadPoolExecutor(2) as pool:
        with turns.take("a", nothing):

            def late() -> None:
                with turns.take("a", nothing):
                    met.append("late")

            pool.submit(late).result(10)

            def fails() -> None:
                raise OSError("gone")

            def broken() -> None:
                with turns.take("a", fails):
                    met.append("never")

            with pytest.raises(OSError, match="gone"):
                pool.submit(broken).result(10)
        assert met == ["late"] and turns._lines == {}
        with pytest.raises(ValueError, match="inside"), turns.take("a", nothing):
            raise ValueError("inside")
        assert turns._lines == {}


def test_who_looked_before_a_turn_ended_looks_again() -> None:
    turns, dropped = Turns(60), []

    def come(since: int) -> None:
        with turns.take("a", lambda: dropped.append(since), since):
            pass

    before = turns.ended
    come(before)
    assert dropped == [], "nothing has happened meanwhile"
    come(before)
    assert dropped == [before] and turns.ended == before + 2
    come(turns.ended)
    assert dropped == [before]
