"""Results of the GPU suite: what is judged against the anchors, what is merged, and what the exit status says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu_suite
from benchmarks.gpu import anchors, record
from benchmarks.gpu.record import Record, Recorder
from benchmarks.gpu.table import closing, final_rows
from benchmarks.rig.results import Row

H200 = {"tiny": False, "gpu": "NVIDIA H200"}


def rows(figures: dict[str, float], facts: dict[str, object]) -> dict[str, Row]:
    return {anchor.figure: row for anchor, row in zip(anchors.ANCHORS, final_rows(figures, facts), strict=True)}


def test_targets_are_judged_over_http_and_in_process_where_there_is_no_http() -> None:
    found = rows(
        {
            "http.ttft_128_ms": 7.9, "in process.ttft_128_ms": 6.0, "peer.ttft_128_ms": 40.0,
            "http.ttft_2048_ms": 52.1, "in process.tpot_1_ms": 4.1, "http.ttft_512_ms": 11.0,
            "http.decode_256_tok_s": 16_000.0, "in process.gap_p99_ms": 44.0,
        },
        H200,
    )  # fmt: skip
    verdicts = {figure: row["verdict"] for figure, row in found.items() if row["verdict"] != "-"}
    assert verdicts == {
        "ttft_128_ms": "met",
        "ttft_2048_ms": "missed",
        "tpot_1_ms": "met (in process)",
        "decode_256_tok_s": "met",
        "gap_p99_ms": "missed (in process)",
    }
    assert found["ttft_128_ms"]["peer"] == 40.0 and found["start_s"]["http"] is None


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ({"tiny": True, "gpu": "NVIDIA H200"}, "tiny shape"),
        ({"tiny": False, "gpu": "NVIDIA H100 80GB HBM3"}, "on NVIDIA H100 80GB HBM3"),
        ({"tiny": False}, "on no GPU"),
    ],
)
def test_nothing_is_judged_on_another_device_or_shape(facts: dict[str, object], verdict: str) -> None:
    found = rows({"http.ttft_128_ms": 1.0}, facts)
    assert {row["verdict"] for row in found.values()} == {verdict}


def test_no_target_is_below_what_the_device_can_do() -> None:
    for anchor in anchors.ANCHORS:
        if anchor.target is not None and anchor.floor is not None:
            beaten = anchor.target < anchor.floor if anchor.better == "less" else anchor.target > anchor.floor
            assert not beaten, anchor.figure
            assert anchors.judge(anchor, anchor.floor) == "met"
        assert anchors.judge(anchor, None) == "-"


def test_everything_found_is_on_disk_at_once_and_merged(tmp_path: Path) -> None:
    recorder = Recorder("one", tmp_path / "one.json")
    recorder.figure("http.start_s", 9.0)
    recorder.figure("http.gap_p99_ms", float("nan"))
    recorder.check("holds", True)
    recorder.check("does not", False, "1 ≠ 2")
    recorder.row("Rows", {"a": 1})
    recorder.fact("gpu", "NVIDIA H200")
    recorder.note("a note")
    held = record.load(tmp_path / "one.json", "one")
    assert held.status == record.RUNNING and held.figures == {"http.start_s": 9.0, "http.gap_p99_ms": None}
    held.status, late = record.DONE, Record("two", record.NOT_REACHED, "3 s are left")
    document = record.merged([held, late], {"tiny": False})
    assert document["failed"] == ["one", "two"] and document["figures"]["http.start_s"] == 9.0
    record.save(tmp_path / "suite.json", document)
    assert json.loads((tmp_path / "suite.json").read_text())["sections"][0]["tables"] == {"Rows": [{"a": 1}]}
    text = closing([held, late], H200)
    said = ("BROKEN one: does not: 1 ≠ 2", "two: not reached: 3 s are left", "note (one): a note", "Rows", "2 checks")
    assert [part for part in said if part not in text] == []


def test_sections_are_chosen_by_name_after_the_two_that_all_need() -> None:
    assert [section.name for section in gpu_suite.chosen(["choice"], False)] == ["machine", "checkpoint", "choice"]
    assert gpu_suite.chosen([], False) == list(gpu_suite.SECTIONS)
    assert gpu_suite.chosen([], True)[-1] is gpu_suite.PROFILE
    assert sum(section.vital for section in gpu_suite.SECTIONS) == 1
    names = [section.name for section in gpu_suite.SECTIONS]
    assert len(set(names)) == len(names)


def test_the_result_goes_where_out_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu_suite.parse([]).out == tmp_path
    monkeypatch.delenv("OUT")
    assert gpu_suite.parse([]).out.name == "results" and gpu_suite.parse([]).budget_s < 540
