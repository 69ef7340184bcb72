"""Result files and tables, and the readings of /proc that stand in them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.rig import machine, results


def test_a_result_carries_its_provenance(tmp_path: Path) -> None:
    path = results.write("sample", {"value": 3}, tmp_path)
    written = orjson.loads(path.read_bytes())
    assert (written["benchmark"], written["value"]) == ("sample", 3)
    assert {"date", "commit", "cpu", "cores", "load_average", "command"} <= written["provenance"].keys()
    assert written["provenance"]["cores"] == os.cpu_count()
    assert list(tmp_path.iterdir()) == [path]


def test_samples_stand_on_one_line_and_are_what_they_were(tmp_path: Path) -> None:
    said = {"samples": [1, -2.5, 3e-07], "nested": [[1, 2], [3]], "text": "[ 1, 2 ]", "none": [], "mixed": [1, "a"]}
    text = results.write("sample", said, tmp_path).read_text()
    assert orjson.loads(text).items() >= said.items()
    assert '"samples": [1,-2.5,3e-7]' in text or '"samples": [1,-2.5,3e-07]' in text


def test_numbers_stand_to_the_right_under_their_heading() -> None:
    text = results.table([{"name": "a", "value": 1.5}, {"name": "long name", "value": 1234.56}])
    assert text.splitlines() == [
        "name         value",
        "---------  -------",
        "a              1.5",
        "long name  1,234.6",
    ]


def test_missing_and_undefined_numbers_are_a_dash() -> None:
    assert results.table([{"a": None, "b": float("nan")}]).splitlines()[-1] == "-  -"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_a_percentile_lies_between_the_extremes(values: list[float], share: float) -> None:
    assert min(values) <= results.percentile(values, share) <= max(values)
    assert results.percentile(values, 0) == min(values)
    assert results.percentile(values, 1) == max(values)


def test_percentile_interpolates() -> None:
    assert results.percentile([4.0, 1.0, 3.0, 2.0], 0.5) == pytest.approx(2.5)


def test_a_process_tree_holds_the_children_of_children() -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\n"
        "input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        tree = machine.process_tree(child.pid)
        assert {child.pid, grandchild} <= set(tree)
        assert child.pid in machine.process_tree(os.getpid())
        assert machine.rss_mib(tree) > 1
        assert machine.is_running(grandchild)
        child.kill()
    assert not machine.is_running(child.pid)
    assert machine.cpu_seconds([child.pid]) == 0.0


def test_the_meter_sees_this_process_work() -> None:
    meter = machine.LoadMeter(os.getpid())
    sum(i * i for i in range(2_000_000))
    load = meter.stop()
    assert load.client_cpu_s > 0.01
    assert load.server_rss_mib > 1
    assert 0 <= load.others_share <= 1


def test_waiting_for_quiet_stops_when_the_limit_is_nothing() -> None:
    assert machine.wait_until_quiet(0) == 0.0
