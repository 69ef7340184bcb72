"""Which implementation the table picks, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

import kernels
from kernels.cpu import CpuOps


@pytest.mark.parametrize(
    ("device", "choice", "threads", "message"),
    [
        ("tpu", "auto", 0, "unknown device"),
        ("cpu", "triton", 0, "do not run on"),
        ("cuda", "cpu", 0, "do not run on"),
        ("cpu", "auto", -1, "threads"),
    ],
)
def test_the_table_refuses_what_a_device_cannot_run(device: str, choice: str, threads: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.table(device, choice, threads)


def test_the_table_gives_what_was_asked_for(kernel_cache: Path) -> None:
    assert kernels.table("cpu", "reference").name == "reference"
    ops = kernels.table("cpu", "auto", 1, kernel_cache)
    assert isinstance(ops, CpuOps)
    assert ops.threads == 1
