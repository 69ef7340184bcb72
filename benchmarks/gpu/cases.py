"""Checks of kernels against their plain-torch definitions, many of them, counted by kernel.

Inputs are drawn on the CPU, where the definition runs; the kernel gets copies on the device. On a CPU the kernels run
in Triton's interpreter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.supervise import Context

CLOSE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest difference, absolute and relative, between results of one type that are of size 1."""
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison."""

    kernel: str
    """File of kernels/triton that it is about"""
    label: str
    run: Callable[[], None]
    """Raises AssertionError where kernel and definition differ"""


def close(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Raise AssertionError where a result on the device differs from the definition's by more than `tolerance`."""
    torch.testing.assert_close(got.cpu(), wanted, atol=tolerance, rtol=tolerance)


def check_all(context: Context, cases: Iterable[Case]) -> None:
    """Run the cases while there is time; one check and one row for each kernel.

    A fault of the device ends it: nothing that this process computes afterwards would mean anything.
    """
    counts: dict[str, list[Any]] = {}
    fault = ""
    for case in cases:
        ran, failures, took = counts.setdefault(case.kernel, [0, [], 0.0])
        if not context.deadline.allows(1.0):
            context.recorder.note(f"out of time before {case.kernel}: {case.label}")
            break
        began = time.perf_counter()
        try:
            with torch.inference_mode():
                case.run()
            if context.device == "cuda":
                torch.cuda.synchronize()
        except AssertionError as error:
            failures.append(f"{case.label}: {' '.join(str(error).split())[:300]}")
        except Exception as error:  # a kernel that does not compile or run is a finding; the next may
            failures.append(f"{case.label}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            if "CUDA error" in str(error):
                fault = failures[-1]
        counts[case.kernel] = [ran + 1, failures, took + time.perf_counter() - began]
        if fault:
            break
    for kernel, (ran, failures, took) in counts.items():
        context.recorder.check(f"{kernel} is as defined", not failures and ran > 0, "; ".join(failures[:5]))
        row = {"kernel": kernel, "cases": ran, "failed": len(failures), "seconds": took}
        context.recorder.row("Kernels against their definitions", row)
    if fault:
        raise RuntimeError(f"the device failed: {fault}")


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Normal numbers on the CPU."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)
