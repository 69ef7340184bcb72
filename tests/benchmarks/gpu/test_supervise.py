"""Sections end alone: one that hangs, crashes or raises loses nothing that was found, and leaves nothing behind."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import gpu_suite
from benchmarks.gpu import record, supervise
from benchmarks.gpu.budget import Budget, Deadline
from benchmarks.gpu.record import Record
from benchmarks.gpu.supervise import Section

MODULE = "tests.benchmarks.gpu.scripted_sections"
RunSections = Callable[..., list[Record]]


@pytest.fixture
def run_sections(tmp_path: Path) -> RunSections:
    """run_sections(fate, *sections, budget=…) → their records, those so far seen after each."""

    def run(fate: str, *sections: Section, budget: float = 60) -> list[Record]:
        seen: list[int] = []
        options = {"tiny": True, "device": "cpu", "work": str(tmp_path), "fate": fate}
        found = supervise.run_sections(
            supervise.server(()), sections, options, Budget(budget), lambda records: seen.append(len(records))
        )
        assert seen == list(range(1, len(sections) + 1))
        return found

    return run


def ends(pid: int) -> bool:
    """Whether a process is gone within seconds."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ready, _, _ = select.select([handle], [], [], 10)
    os.close(handle)
    return bool(ready)


def test_a_section_that_hangs_is_killed_with_what_it_started(
    run_sections: RunSections, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "GRACE_S", 0.1)
    monkeypatch.setattr(supervise, "WATCH_S", 0.05)
    (found,) = run_sections("hangs", Section("one", MODULE, limit_s=3))
    assert (found.status, found.reason) == (record.TIMED_OUT, "not done within 3 s")
    assert found.figures == {"in process.tpot_1_ms": 4.0} and len(found.checks) == 1
    assert ends(int((tmp_path / "hangs").read_text()))


def test_a_crash_is_told_from_a_timeout(run_sections: RunSections, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "WATCH_S", 0.05)
    (found,) = run_sections("crashes", Section("one", MODULE, limit_s=30))
    assert (found.status, found.reason) == (record.FAILED, "the process ended with 11")
    assert found.figures["in process.tpot_1_ms"] == 4.0


def test_later_sections_are_told_facts_and_run_after_failures(run_sections: RunSections) -> None:
    first, second = run_sections("finds", Section("one", MODULE, limit_s=30), Section("two", MODULE, limit_s=30))
    assert first.facts == {"fate": "ends"} and second.facts == {}
    assert [first.status, second.status] == [record.DONE, record.DONE]
    first, second = run_sections("raises", Section("one", MODULE, limit_s=30), Section("two", MODULE, limit_s=30))
    assert [first.status, second.status] == [record.FAILED, record.FAILED]
    assert first.reason == "RuntimeError: no such weights"


def test_nothing_runs_without_a_vital_section_a_package_or_time(run_sections: RunSections) -> None:
    sections = (
        Section("skipped", MODULE, limit_s=30, needs=("torch", "no_such_package")),
        Section("vital", "no.such.module", limit_s=30, vital=True),
        Section("after", MODULE, limit_s=30),
    )
    found = run_sections("ends", *sections)
    assert [one.status for one in found] == [record.SKIPPED, record.FAILED, record.NOT_REACHED]
    assert found[0].reason == "not installed here: no_such_package"
    assert found[2].reason == "nothing runs without vital"
    (late,) = run_sections("ends", Section("late", MODULE, limit_s=30, least_s=8), budget=10)
    assert late.status == record.NOT_REACHED and late.reason.endswith("s left, it needs 8")


def test_a_package_is_there_by_either_of_its_names() -> None:
    assert supervise.missing(("sqlalchemy", "SQLAlchemy", "argon2-cffi", "argon2", "no-such-thing")) == [
        "no-such-thing"
    ]
    assert supervise.missing(gpu_suite.GATEWAY) == [] and len(gpu_suite.GATEWAY) > 20


def test_a_budget_is_shared_and_ends() -> None:
    now = 100.0
    budget = Budget(60, clock=lambda: now)
    assert (budget.left, budget.share(20, 1), budget.share(200, 1)) == (55, 20, 55)
    assert budget.share(200, 56) == 0
    now = 150.0
    assert budget.share(20, 1) == 5 and budget.share(20, 6) == 0
    now = 500.0
    assert budget.left == 0 and budget.share(20, 1) == 0


def test_a_deadline_counts_down() -> None:
    now = 0.0
    deadline = Deadline(10, clock=lambda: now)
    assert deadline.allows(10) and not deadline.allows(10.5) and deadline.within(3) == 3
    now = 8.0
    assert deadline.within(3) == 2 and deadline.allows(1)
    now = 11.0
    assert deadline.left == 0 and deadline.within(3) == 0
    assert Deadline(5).left <= 5 < time.monotonic()
