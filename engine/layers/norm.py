"""RMSNorm with the residual stream added on the way."""

from __future__ import annotations

from torch import Tensor

from kernels.interface import Ops


class RMSNorm:
    """x / rms(x) · weight over the hidden dimension."""

    __slots__ = ("_rms_norm", "eps", "weight")

    def __init__(self, ops: Ops, weight: Tensor, eps: float) -> None:
        """weight [H]."""
        self.weight = weight
        self.eps = eps
        self._rms_norm = ops.rms_norm

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [T, H] → normalised [T, H]. With residual [T, H]: residual += x in place, and that sum is normalised."""
        return self._rms_norm(x, self.weight, self.eps, residual)
