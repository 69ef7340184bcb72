"""The monitor sees compilations, once it is armed; an engine that has loaded compiles nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.monitor import MONITOR, Monitor, watch_triton


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    """A monitor that Triton tells what it compiles."""
    from triton import knobs

    before = knobs.compilation.listener
    made = Monitor()
    watch_triton(made)
    yield made
    knobs.compilation.listener = before


def test_what_triton_compiles_is_counted_after_ready(monitor: Monitor) -> None:
    from triton import knobs

    listener: Any = knobs.compilation.listener
    details = {"metadata": {}, "metadata_group": {}, "times": None, "cache_hit": False}

    class Source:
        name = "attend"

    listener(src=Source(), **details)
    assert monitor.late == 0
    monitor.arm()
    listener(src=Source(), **details)
    monitor.captured()
    assert monitor.late == 2
    monitor.disarm()
    assert monitor.late == 0


def test_the_snapshot_tells(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    try:
        MONITOR.arm()
        assert bench.core.snapshot().late_compilations == 0
        MONITOR.compiled("late")
        assert bench.core.snapshot().late_compilations == 1
    finally:
        MONITOR.disarm()
