"""The gated feed-forward layer: down(activation(gate(x)) · up(x)), gate and up in one projection."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from engine.layers.linear import MergedLinear
from kernels.interface import Activation, Ops


class GatedMLP:
    """SwiGLU or GeGLU."""

    __slots__ = ("_gated", "activation", "down", "gate_up")

    def __init__(self, ops: Ops, gate_up: MergedLinear, down: MergedLinear, activation: str) -> None:
        """gate_up: H → 2·I, down: I → H."""
        self.gate_up = gate_up
        self.down = down
        self.activation = cast(Activation, activation)
        self._gated = ops.gated

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] → [T, H]."""
        return self.down(self._gated(self.gate_up(x), self.activation))
