"""The whole compute side, under any order of events, on both databases."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from marketplace.store.db import Database
from tests.marketplace.life.machine import LifeMachine

MakeDatabase = Callable[[], Database]


def play(make: MakeDatabase, *, examples: int, steps: int, same: bool = False) -> int:
    """Play so many games of so many steps, the `same` ones each time or others; returns how many steps held."""
    machine = type("Played", (LifeMachine,), {"make": staticmethod(make), "steps": 0})
    rules = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=same,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=rules)  # type: ignore[arg-type]
    return int(machine.steps)  # type: ignore[attr-defined]


@pytest.mark.parametrize("fresh_database", ["sqlite"], indirect=True)
def test_games_of_the_whole_machine(fresh_database: MakeDatabase) -> None:
    assert play(fresh_database, examples=5, steps=14, same=True) > 40


@pytest.mark.slow
@pytest.mark.parametrize("fresh_database", ["sqlite"], indirect=True)
def test_ten_thousand_steps(fresh_database: MakeDatabase) -> None:
    done = 0
    LifeMachine.reached.clear()
    while done < 10_000:
        done += play(fresh_database, examples=10, steps=60)
        print(f"{done} steps held, {sum(LifeMachine.reached.values())} things seen", flush=True)  # with -s, as it goes
    seen = ("rent 201", "rent 409", "Active", "Failed", "Inactive", "reservation Bound", "environment Retained")
    assert all(LifeMachine.reached[what] for what in seen), LifeMachine.reached


@pytest.mark.slow
@pytest.mark.parametrize("fresh_database", ["postgresql"], indirect=True)
def test_any_order_of_events_on_postgresql(fresh_database: MakeDatabase) -> None:
    assert play(fresh_database, examples=20, steps=40) > 500
