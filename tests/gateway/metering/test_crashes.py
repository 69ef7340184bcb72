"""A gateway that dies anywhere: nothing acknowledged is lost, nothing is charged twice, every hold ends."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.metering import failpoints
from marketplace.ledger.audit import audit
from marketplace.ledger.holds import open_holds
from marketplace.ledger.tables import hold, usage_record
from marketplace.store.db import Database

BALANCE = 10**12
DIED_AT_FAILPOINT = 77
HITS = {
    "meter.open.reserved": 9,
    "meter.open.appended": 13,
    "meter.settle.before_append": 15,
    "meter.settle.appended": 17,
    "meter.settle.durable": 11,
    "journal.before_insert": 4,
    "journal.before_commit": 5,
    "journal.after_commit": 6,
}
"""Die in the middle of the traffic, not at its beginning; the other points are reached once per batch or start."""


@pytest.fixture
def folder(tmp_path: Path, make_database: Callable[[str], Database], make_bank: Callable[[Database], Any]) -> Path:
    """A folder with a ledger whose customer has BALANCE."""
    database = make_database("headrace.sqlite")
    make_bank(database).customer("customer", BALANCE)
    database.close()
    return tmp_path


def told(folder: Path, word: str) -> list[list[str]]:
    """Lines that victims were told, by their first word, without it."""
    path = folder / "told"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split()[1:] for line in lines if line.split()[0] == word]


def verify(folder: Path) -> int:
    """Everything that must hold after the last process has closed; returns how many settlements were acknowledged."""
    database = Database(f"sqlite:///{folder / 'headrace.sqlite'}")
    with database.read() as unit:
        report = audit(unit, now=time.time_ns() // 1000)
        rows = {row.request_id: row for row in unit.select(usage_record.select())}
        posted = unit.select(hold.select()).all()
        still_open = open_holds(unit)
    database.close()
    assert report.clean, "\n".join(report.lines())
    assert still_open == []
    acknowledged = told(folder, "settled")
    for name, cost in acknowledged:
        assert rows[name].cost == int(cost), f"{name} was settled for {cost}"
        assert rows[name].billable
        assert rows[name].source == "engine"
    known = {row.request_id for row in posted}
    assert {name for (name,) in told(folder, "held")} <= known
    recovered = [row for row in rows.values() if row.source != "engine"]
    assert all(row.cost == 0 and row.outcome == "server_fault" for row in recovered)
    return len(acknowledged)


@pytest.mark.parametrize("failpoint", failpoints.NAMES)
def test_death_at_every_boundary_loses_nothing_and_charges_nothing_twice(
    folder: Path, victims: Any, failpoint: str
) -> None:
    for run in ("first", "second"):
        if failpoint.startswith("recovery."):  # leave something to recover
            victims.start(
                victim="gateway",
                folder=folder,
                run=f"{run}-cut-off",
                requests=60,
                failpoint="meter.settle.before_append",
                hit=20,
            )
            assert victims.wait() == DIED_AT_FAILPOINT
        victims.start(
            victim="gateway",
            folder=folder,
            run=run,
            requests=60,
            failpoint=failpoint,
            hit=HITS.get(failpoint, 1),
        )
        assert victims.wait() == DIED_AT_FAILPOINT, f"{failpoint} was not reached"
    victims.start(victim="gateway", folder=folder, run="last", requests=10)
    assert victims.wait() == 0
    assert verify(folder) >= 10


@pytest.mark.parametrize("seed", range(3))
def test_kill_9_at_random_moments_loses_nothing_and_charges_nothing_twice(
    folder: Path, victims: Any, seed: int
) -> None:
    moments = random.Random(seed)
    for round_ in range(5):
        before = len(told(folder, "held"))
        victims.start(victim="gateway", folder=folder, run=f"round{round_}", requests=100_000)
        wanted = before + moments.randrange(1, 120)
        victims.until(lambda wanted=wanted: len(told(folder, "held")) >= wanted)
        victims.kill(after_s=moments.random() * 0.004)
        assert victims.wait() == -9
    victims.start(victim="gateway", folder=folder, run="last", requests=10)
    assert victims.wait() == 0
    assert verify(folder) >= 10
