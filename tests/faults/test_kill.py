"""kill -9 at random moments under load: what a client was told is on the books once, and nothing is left open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.rig.crash import TARGETS, Outcome, Plan, run
from benchmarks.rig.headrace import MODEL, House


def crash(plan: Plan, house: House) -> Outcome:
    outcome = asyncio.run(run(plan, house, print))
    print(f"{outcome.sent} requests, {outcome.finished()} answered in full, {len(outcome.books.records)} on the books")
    return outcome


def test_a_plan_kills_every_target_and_depends_on_its_seed_alone() -> None:
    plan = Plan(kills=9, seed=5)
    assert sorted(plan.targets()) == sorted(TARGETS * 3)
    assert plan.targets() == Plan(kills=9, seed=5).targets()
    assert plan.targets() != Plan(kills=9, seed=6).targets()


def test_kill_gateway_engine_and_both_under_load(scripted_house: Callable[..., House]) -> None:
    house = scripted_house(tokens=80, first_token_ms=20, interval_ms=10)
    outcome = crash(Plan(kills=3, clients=8), house)
    assert outcome.findings == []
    assert set(outcome.killed) == set(TARGETS)
    assert outcome.finished() > 0, "no answer survived: nothing was tested"
    assert any(not record.billable for record in outcome.books.records.values()), "no answer was cut by a kill"


@pytest.mark.slow
def test_fifty_kills(scripted_house: Callable[..., House]) -> None:
    house = scripted_house(tokens=80, first_token_ms=20, interval_ms=10)
    outcome = crash(Plan(kills=50, clients=24, seed=2), house)
    assert outcome.findings == []
    assert outcome.finished() > 50


@pytest.mark.slow
def test_kills_with_the_real_model(tmp_path: Path, model_path: Path) -> None:
    assert model_path.exists()
    house = House(tmp_path / "data", MODEL)
    outcome = crash(Plan(kills=6, clients=4, most_tokens=32, pause_s=(0.5, 3.0)), house)
    assert outcome.findings == []
    assert outcome.finished() > 0
