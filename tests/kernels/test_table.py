"""Which implementation the table picks, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import kernels
from kernels.cpu import CpuOps


@pytest.mark.parametrize(
    ("device", "choice", "threads", "message"),
    [
        ("tpu", "auto", 0, "unknown device"),
        ("cuda", "fast", 0, "do not run on"),
        ("cuda", "cpu", 0, "do not run on"),
        ("cpu", "auto", -1, "threads"),
    ],
)
def test_the_table_refuses_what_a_device_cannot_run(device: str, choice: str, threads: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.table(device, choice, threads)


def test_the_table_gives_what_was_asked_for(kernel_cache: Path) -> None:
    assert kernels.table("cpu", "reference").name == "reference"
    assert kernels.table("cpu", "triton").name == "triton"
    assert kernels.table("cuda", "auto").name == "triton"
    ops = kernels.table("cpu", "auto", 1, kernel_cache)
    assert isinstance(ops, CpuOps)
    assert ops.threads == 1


def test_triton_on_a_cpu_needs_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        kernels.table("cpu", "triton")


def test_a_gpu_without_triton_gets_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert kernels.table("cuda", "auto").name == "reference"
    assert "no package triton" in caplog.text
    with pytest.raises(ValueError, match="not installed"):
        kernels.table("cuda", "triton")
