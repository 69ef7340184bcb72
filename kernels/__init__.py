"""The operations a model is made of, and the table that picks an implementation for a device.

`table(device, choice)` returns an object with the operations of `kernels.interface.Ops`. Implementations are
imported only when picked, so that an optional one never breaks the others.
"""

import logging
from pathlib import Path

from kernels.interface import BlockQuantized, LinearWeight, Ops, ScaledWeight, WeightPart

__all__ = ["BlockQuantized", "LinearWeight", "Ops", "ScaledWeight", "WeightPart", "table"]

_CHOICES = {"cpu": ("auto", "cpu", "reference", "triton"), "cuda": ("auto", "triton", "reference")}
_log = logging.getLogger(__name__)


def table(
    device: str = "cpu",
    choice: str = "auto",
    threads: int = 0,
    cache_dir: Path | None = None,
    activation_bits: int = 8,
    split: bool = True,
    deterministic: bool = False,
) -> Ops:
    """Return the operations for `device` ("cpu" or "cuda"); choice is auto | triton | cpu | reference.

    threads: CPU threads, 0 for all cores this process may use. cache_dir: where built kernels are kept; None is the
    user's cache folder. activation_bits: 8 or 16, what activations are rounded to where they meet packed weights on
    a CPU, or fp8 ones on a GPU that multiplies those. split: the triton kernels may cut long sequences along their
    keys. deterministic: they give a row the same bits whatever else is in the call, as the others always do. On CPUs
    without a working C compiler a warning is logged here and torch's own operations are used; on GPUs without Triton
    the reference, with a warning. On a CPU "triton" runs the kernels in Triton's interpreter, for tests:
    TRITON_INTERPRET=1 must be set before triton is imported. Raises ValueError for a choice that the device cannot run.
    """
    kind = device.partition(":")[0]
    if kind not in _CHOICES:
        raise ValueError(f"unknown device {device!r}; known: {', '.join(_CHOICES)}")
    if choice not in _CHOICES[kind]:
        raise ValueError(f"kernels {choice!r} do not run on {device!r}; choose from {', '.join(_CHOICES[kind])}")
    if threads < 0:
        raise ValueError(f"threads must be 0 (all cores) or more, not {threads}")
    if choice == "triton" or (kind == "cuda" and choice == "auto"):
        return _triton(kind, choice, split=split, deterministic=deterministic, activation_bits=activation_bits)
    return _reference() if choice == "reference" else _cpu(threads, cache_dir, activation_bits)


def _reference() -> Ops:
    from kernels.reference import ReferenceOps

    return ReferenceOps()


def _triton(kind: str, choice: str, *, split: bool, deterministic: bool, activation_bits: int) -> Ops:
    try:
        import triton
    except ModuleNotFoundError as error:
        if choice == "triton":
            raise ValueError("the triton kernels need the package triton, which is not installed") from error
        _log.warning("no package triton, running many times slower on the reference operations")
        return _reference()
    if kind == "cpu" and not triton.knobs.runtime.interpret:
        raise ValueError("the triton kernels run on a CPU only in the interpreter: set TRITON_INTERPRET=1")
    from kernels.triton.table import TritonOps

    return TritonOps(split=split, deterministic=deterministic, activation_bits=activation_bits)


def _cpu(threads: int, cache_dir: Path | None, activation_bits: int) -> Ops:
    from kernels.native_library import BuildError

    try:
        from kernels.cpu import CpuOps

        return CpuOps(threads, cache_dir, activation_bits=activation_bits)
    except BuildError as error:
        from kernels.fallback import TorchOps

        _log.warning("no native CPU kernels, running several times slower on torch's operations: %s", error)
        return TorchOps()
