"""The suite's checks of kernels: none is left out, a wrong one is found, and a broken device ends the section."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.batches import spoiled_batch
from benchmarks.gpu.budget import Deadline
from benchmarks.gpu.cases import FP8, Case, check_all, close
from benchmarks.gpu.record import Recorder
from benchmarks.gpu.supervise import Context
from benchmarks.gpu.timing import HostTimer
from kernels import reference

ROOT = Path(__file__).resolve().parents[3]

COVERAGE = """
import os
os.environ["TRITON_INTERPRET"] = "1"
from benchmarks.gpu import attending, choosing, rowwise
from kernels.triton.compile import MODULES
for rooms in (attending, choosing, rowwise):
    for tiny in (True, False):
        assert {case.kernel for case in rooms.cases("cpu", tiny)} == set(rooms.KERNELS), rooms.__name__
checked = {*attending.KERNELS, *choosing.KERNELS, *rowwise.KERNELS}
assert checked == set(MODULES), checked ^ set(MODULES)
for case in [next(case for case in rooms.cases("cpu", True)) for rooms in (attending, rowwise)]:
    case.run()
print("covered")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_every_kernel_is_checked() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COVERAGE], capture_output=True, text=True, cwd=ROOT, check=False, env={**os.environ}
    )
    assert done.stdout.strip().endswith("covered"), done.stderr


def context(tmp_path: Path, seconds: float = 60) -> Context:
    options = {"tiny": True, "device": "cpu", "work": str(tmp_path)}
    return Context(options, Recorder("kernels", tmp_path / "kernels.json"), Deadline(seconds))


def wrong() -> None:
    close(torch.ones(3), torch.zeros(3), 1e-3)


def broken() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_what_differs_is_a_broken_check_and_the_rest_still_runs(tmp_path: Path) -> None:
    given = context(tmp_path)
    check_all(given, [Case("a", "differs", wrong), Case("a", "agrees", lambda: None), Case("b", "fine", lambda: None)])
    found = given.recorder.record
    assert [(check["name"], check["ok"]) for check in found.checks] == [
        ("a is as defined", False),
        ("b is as defined", True),
    ]
    assert "differs: Tensor-likes are not close" in found.checks[0]["detail"]
    (rows,) = found.tables.values()
    assert [(row["kernel"], row["cases"], row["failed"]) for row in rows] == [("a", 2, 1), ("b", 1, 0)]


def test_a_fault_of_the_device_ends_the_section(tmp_path: Path) -> None:
    given = context(tmp_path)
    with pytest.raises(RuntimeError, match="the device failed: faulty: RuntimeError: CUDA error"):
        check_all(given, [Case("a", "faulty", broken), Case("b", "never run", wrong)])
    assert [check["name"] for check in given.recorder.record.checks] == ["a is as defined"]


def test_no_case_begins_without_time(tmp_path: Path) -> None:
    given = context(tmp_path, seconds=0.5)
    check_all(given, [Case("a", "late", lambda: None)])
    assert given.recorder.record.checks[0]["ok"] is False, "a kernel without a case that ran is not as defined"
    assert given.recorder.record.notes == ["out of time before a: late"]


@pytest.mark.parametrize("kv_dtype", [torch.float32, FP8])
def test_a_spoiled_batch_is_whole_where_it_is_read(kv_dtype: torch.dtype) -> None:
    batch = spoiled_batch(
        ((20, 1), (0, 5), (0, 0)), heads=(2, 1), head_dim=16, dtype=torch.float32, kv_dtype=kv_dtype, padding_rows=2
    )
    out = reference.paged_attention(*batch.arguments, batch.scale, **batch.scales)  # type: ignore[arg-type]
    assert out.isfinite().all() and not out[6:].any() and out[:6].any()
    assert batch.keys.float().isnan().any(), "nothing would show a slot that is read by mistake"


def test_a_call_is_timed_at_least_once() -> None:
    calls: list[int] = []
    assert HostTimer().seconds(lambda: calls.append(1), budget_s=0.0) >= 0
    assert len(calls) >= 2, "once to warm up"
