"""The whole suite on a CPU in its tiny shape, as a command: every section runs, and everything holds."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.gpu import anchors
from benchmarks.gpu_suite import SECTIONS

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
]


def test_every_section_runs_and_nothing_is_broken(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_suite", "--tiny", "--profile", "--out", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    result = json.loads((tmp_path / "gpu_suite_tiny.json").read_text())
    statuses = {section["section"]: section["status"] for section in result["sections"]}
    assert statuses == dict.fromkeys([*(section.name for section in SECTIONS), "profile"], "done"), done.stderr[-3000:]
    assert result["failed"] == [] and done.returncode == 0, done.stdout[-3000:]
    for anchor in anchors.ANCHORS:
        for place in ("in process", "http"):
            assert result["figures"][f"{place}.{anchor.figure}"] > 0
        assert anchor.what in done.stdout
    assert result["figures"]["peer.ttft_128_ms"] > 0
    assert result["facts"]["peer"].startswith("transformers, ")
    assert not Path(result["facts"]["model"]).exists(), "the checkpoint is gone with the run"
