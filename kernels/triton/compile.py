"""Compile every kernel in every configuration for GPUs that need not be there, and report what each takes of them.

    python -m kernels.triton.compile --arch 90 --only norm

Triton lowers to PTX and the assembler it brings makes the machine code, neither of which needs a device; registers and
stack come from the machine code by `cuobjdump`, shared memory from Triton. A stack frame means registers were spilled:
the kernels have no arrays that would need one otherwise.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.triton.configuration import Configuration

MODULES = (
    "norm",
    "activation",
    "embedding",
    "gather",
    "step_inputs",
    "gemm",
    "quantize_rows",
    "scaled_gemm",
    "moe_route",
    "moe",
    "logits",
    "sampling",
    "logprobs",
    "rope_cache",
    "attention_split",
    "attention",
)
"""Files of this folder that hold kernels."""

ARCHS = (80, 90, 100)
"""Compute capabilities 8.0 (Ampere), 9.0 (Hopper) and 10.0 (Blackwell)."""

MAX_SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory that one block may take, from the CUDA C++ Programming Guide, table "Technical
Specifications"."""

MAX_REGISTERS = 255
"""Of one thread, on all of them."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one kernel in one configuration takes on one architecture."""

    kernel: str
    config: str
    arch: int
    registers: int
    """Per thread"""
    shared: int
    """Bytes per block"""
    spills: int
    """Bytes of stack per thread"""
    ptx_size: int
    """Characters"""
    warps: int
    seconds: float
    """Taken by compiling, near 0 where Triton's cache had it"""
    allowed_spills: int

    def problems(self) -> list[str]:
        """What of the architecture's or the configuration's bounds is broken, in words."""
        found = []
        if self.shared > MAX_SHARED[self.arch]:
            found.append(f"{self.shared} bytes of shared memory of {MAX_SHARED[self.arch]}")
        if self.spills > self.allowed_spills:
            found.append(f"{self.spills} bytes spilled per thread, {self.allowed_spills} accepted")
        if self.registers * self.warps * 32 > 65536:
            found.append(f"{self.registers} registers in {self.warps} warps do not fit into 65536")
        return [f"{self.kernel} ({self.config}) on sm_{self.arch}: {problem}" for problem in found]


def configurations(only: str = "") -> Iterator[Configuration]:
    """Every configuration of every kernel, or of those whose file's or kernel's name contains `only`."""
    for module in MODULES:
        for config in importlib.import_module(f"kernels.triton.{module}").configurations():
            if only in module or only in config.kernel.__name__:
                yield config


def compile_all(
    archs: Iterable[int] = ARCHS, only: str = "", *, hot: bool = False, configs: Iterable[Configuration] | None = None
) -> list[Report]:
    """Compile and measure; hot: only what the every-day tests compile. configs: instead of the whole table.

    Raises RuntimeError under TRITON_INTERPRET, where there is nothing to compile, and whatever Triton raises for a
    kernel that does not compile.
    """
    if knobs.runtime.interpret:
        raise RuntimeError("kernels cannot be compiled while TRITON_INTERPRET is set")
    chosen = list(configurations(only) if configs is None else configs)
    return [
        compile_one(config, arch)
        for config in chosen
        for arch in archs
        if arch >= config.min_arch and (config.hot or not hot)
    ]


def compile_one(config: Configuration, arch: int) -> Report:
    """Compile one configuration for one architecture and measure the result."""
    begun = time.monotonic()
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": config.fp_fusion}
    compiled: Any = triton.compile(_source(config), target=GPUTarget("cuda", arch, 32), options=options)
    seconds = time.monotonic() - begun
    registers, stack = _resources(compiled.asm["cubin"])
    return Report(
        kernel=config.kernel.__name__,
        config=config.name,
        arch=arch,
        registers=registers,
        shared=compiled.metadata.shared,
        spills=stack,
        ptx_size=len(compiled.asm["ptx"]),
        warps=config.num_warps,
        seconds=seconds,
        allowed_spills=config.spills,
    )


def _source(config: Configuration) -> ASTSource:
    """The kernel with its argument types in order. Raises ValueError when they are not exactly the kernel's."""
    names = list(config.kernel.arg_names)
    given = {*config.signature, *config.constants}
    if given != set(names) or len(config.signature) + len(config.constants) != len(names):
        raise ValueError(f"{config.kernel.__name__} ({config.name}): {sorted(given ^ set(names))} do not fit")
    signature = {name: config.signature.get(name, "constexpr") for name in names}
    aligned = [
        name
        for name, kind in config.signature.items()
        if (kind.startswith("*") and name not in config.unaligned) or name in config.divisible
    ]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    return ASTSource(fn=config.kernel, signature=signature, constexprs=dict(config.constants), attrs=attributes)


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack and local memory) per thread of the machine code's one function."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump reported no resources: {text.stdout}{text.stderr}")
    registers, stack, local = (int(number) for number in found.groups())
    return registers, stack + local


def render(reports: Sequence[Report]) -> str:
    """A table, a line for each report."""
    head = ("kernel", "configuration", "arch", "warps", "registers", "shared", "spills", "PTX", "seconds")
    rows = [
        (r.kernel, r.config, f"sm_{r.arch}", str(r.warps), str(r.registers), str(r.shared), str(r.spills),
         str(r.ptx_size), f"{r.seconds:.2f}")
        for r in reports
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    return "\n".join(line.rstrip() for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 when a bound is broken."""
    parser = argparse.ArgumentParser(prog="kernels.triton.compile", description=__doc__)
    parser.add_argument("--arch", type=int, action="append", choices=sorted(MAX_SHARED), help="default: 80 90 100")
    parser.add_argument("--only", default="", help="part of a file's or kernel's name")
    parser.add_argument("--hot", action="store_true", help="only the configurations of an 8B bf16 model's step")
    chosen = parser.parse_args(arguments)
    reports = compile_all(chosen.arch or ARCHS, chosen.only, hot=chosen.hot)
    print(render(reports))
    problems = [problem for report in reports for problem in report.problems()]
    print("\n".join([f"{len(reports)} compiled, {len(problems)} problems", *problems]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
