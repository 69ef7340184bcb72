"""The operations a model is made of, and the table that picks an implementation for a device.

`table(device, choice)` returns an object with the operations of `kernels.interface.Ops`. Implementations are imported only
when picked, so that an optional one never breaks the others.
"""

from kernels.interface import BlockQuantized, LinearWeight, Ops, WeightPart

__all__ = ["BlockQuantized", "LinearWeight", "Ops", "WeightPart", "table"]

_CHOICES = {"cpu": ("auto", "cpu", "reference"), "cuda": ("auto", "reference")}


def table(device: str = "cpu", choice: str = "auto", threads: int = 0) -> Ops:
    """Return the operations for `device` ("cpu" or "cuda"); choice is auto | triton | cpu | reference.

    threads: CPU threads, 0 for all cores. Raises ValueError for a choice that the device cannot run.
    """
    kind = device.partition(":")[0]
    if kind not in _CHOICES:
        raise ValueError(f"unknown device {device!r}; known: {', '.join(_CHOICES)}")
    if choice not in _CHOICES[kind]:
        raise ValueError(f"kernels {choice!r} do not run on {device!r}; choose from {', '.join(_CHOICES[kind])}")
    if threads < 0:
        raise ValueError(f"threads must be 0 (all cores) or more, not {threads}")
    from kernels.reference import ReferenceOps

    return ReferenceOps()
