"""The operations a model is made of, and the table that picks an implementation for a device.

`table(device, choice)` returns an object with the operations of `kernels.interface.Ops`. Implementations are imported only when
picked, so that an optional one never breaks the others.
"""

from kernels.interface import BlockQuantized, LinearWeight, Ops, WeightPart

__all__ = ["BlockQuantized", "LinearWeight", "Ops", "WeightPart", "table"]


def table(device: str = "cpu", choice: str = "auto", threads: int = 0) -> Ops:
    """Return the operations for `device` ("cpu" or "cuda"); choice is auto | triton | cpu | reference.

    threads: CPU threads, 0 for all cores. Raises ValueError for a choice that the device cannot run.
    """
    raise NotImplementedError
