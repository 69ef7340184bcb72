"""Every kernel compiles for every architecture, within its bounds of registers and shared memory, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.triton.compile import MAX_SHARED, MODULES, Report, compile_all, configurations, render

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import json, sys
from dataclasses import asdict
from kernels.triton.compile import compile_all, configurations
archs, only, hot, one = json.loads(sys.argv[1])
configs = list(configurations(only))
if one:
    configs = list({config.kernel: config for config in reversed(configs) if config.hot}.values())
print(json.dumps([asdict(report) for report in compile_all(archs, hot=hot, configs=configs)]))
"""


def compiled(archs: list[int], only: str = "", *, hot: bool, one: bool = False) -> list[Report]:
    """What compile_all reports in a process of its own: this one runs its kernels in the interpreter. one: of each
    kernel only the first configuration that is hot."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([archs, only, hot, one])],
        capture_output=True, text=True, cwd=ROOT, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [Report(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def check(reports: list[Report]) -> None:
    assert reports
    assert [problem for report in reports for problem in report.problems()] == []
    for report in reports:
        assert 0 < report.registers <= 255 and report.ptx_size > 500, report


def test_every_kernel_of_an_8b_model_s_step_compiles_everywhere() -> None:
    reports = compiled([80, 90, 100], hot=True, one=True)
    check(reports)
    kernels = {config.kernel.__name__ for config in configurations() if config.hot}
    assert {(report.kernel, report.arch) for report in reports} == {(k, a) for k in kernels for a in (80, 90, 100)}


@pytest.mark.slow
def test_the_step_of_an_8b_model_compiles_everywhere() -> None:
    check(compiled([80, 90, 100], hot=True))


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_every_configuration_compiles_everywhere(module: str) -> None:
    if list(configurations(module)):
        check(compiled([80, 90, 100], module, hot=False))


def test_every_kernel_has_a_hot_configuration_and_no_name_twice() -> None:
    table = [(config.kernel.__name__, config.name, config.hot) for config in configurations()]
    names = [row[:2] for row in table]
    assert len(set(names)) == len(names), sorted(name for name in names if names.count(name) > 1)
    kernels = {kernel for kernel, _, _ in table}
    assert kernels == {kernel for kernel, _, hot in table if hot}
    assert {"_rms_norm", "_gated", "_gather_rows"} <= kernels


def test_a_report_names_the_bound_that_is_broken() -> None:
    fits = Report(kernel="k", config="c", arch=90, registers=64, shared=1, spills=0, ptx_size=1, warps=4,
                  seconds=0.0, allowed_spills=0)  # fmt: skip
    assert fits.problems() == []
    broken = Report(kernel="k", config="c", arch=80, registers=255, shared=MAX_SHARED[80] + 1, spills=8, ptx_size=1,
                    warps=16, seconds=0.0, allowed_spills=0)  # fmt: skip
    assert len(broken.problems()) == 3
    assert all("sm_80" in problem for problem in broken.problems())
    assert "sm_80" in render([fits, broken]) and len(render([fits, broken]).splitlines()) == 3


def test_the_interpreter_has_nothing_to_compile() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        compile_all([90])
