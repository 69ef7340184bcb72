"""Linear layers over the kernels' packed weights; several projections of one input run as a single one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.layers.rows import take_rows
from engine.weights.checkpoint import Checkpoint
from engine.weights.quantize import Quantizer
from kernels.interface import FLOAT_TYPES, LinearWeight, Ops, ScaledWeight, WeightPart, rows_of


class Part(NamedTuple):
    """One matrix of several that run as one."""

    name: str
    """as checkpoints call it, without .weight"""
    rows: int
    order: Tensor | None
    """int64 [rows], places in the checkpoint of the rows as they lie here; None for as they are"""


class MergedLinear:
    """One matrix made of the rows of several: x [T, K] → [T, N₁ + N₂ + …], outputs in the order of the parts."""

    __slots__ = ("_linear", "adapted", "packed", "weight")

    def __init__(self, ops: Ops, parts: Sequence[WeightPart], bias: Tensor | None = None) -> None:
        """parts: [Nᵢ, K] each, floats or blocks. bias: float [N] or None."""
        self.weight: LinearWeight = ops.pack(parts, bias)
        self.packed = not all(isinstance(part, Tensor) for part in parts)
        self._linear = ops.linear
        self.adapted: Callable[[Tensor, Tensor], Tensor] | None = None
        """(x, result) → the result with what adapters add"""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] → [T, N]."""
        result = self._linear(x, self.weight)
        return result if self.adapted is None else self.adapted(x, result)


class LayerLoader:
    """Builds layers out of a checkpoint's tensors: on one device, in one type, counting what they hold."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        ops: Ops,
        *,
        dtype: torch.dtype,
        device: str,
        fused: bool = True,
        quantize: Quantizer | None = None,
    ) -> None:
        """dtype: type of dense weights, and of activations except on CPUs, where they are float32. quantize: what dense
        matrices become, norms and biases apart."""
        self.quantize = quantize
        self.checkpoint = checkpoint
        self.ops = ops
        self.fused = fused
        """Whole decoders may run as one operation"""
        self.dtype = dtype
        self.device = device
        self.weight_bytes = 0
        self.packed = False
        self.linears: list[tuple[MergedLinear, tuple[Part, ...]]] = []
        """What `linear` has made"""

    def part(self, name: str) -> WeightPart:
        """A matrix's rows as the kernels take them."""
        value = self.checkpoint.get(name)
        if isinstance(value, ScaledWeight):
            return value.to(self.device, self.dtype)
        if not isinstance(value, Tensor):
            return value.to(self.device)
        dense = value.to(self.device, self.dtype)
        return dense if self.quantize is None else self.quantize(name, dense)

    def vector(self, name: str, offset: float = 0.0) -> Tensor:
        """A norm's weight, in the activations' type; in float32 with an offset, which is added to it."""
        value = self.checkpoint.get(name)
        assert isinstance(value, Tensor) and value.dtype in FLOAT_TYPES
        kind = torch.float32 if offset or self.device == "cpu" else self.dtype
        value = value.to(self.device, kind).contiguous()
        if offset:
            value = value + offset
        self.weight_bytes += value.nbytes
        return value

    def linear(self, *names: str, bias: bool = False, orders: Sequence[Tensor | None] = ()) -> MergedLinear:
        """The matrices `name`.weight stacked in order, with their biases when asked. orders: of each one's rows, None
        for as they are."""
        parts, biases, placed = [], [], []
        for name, order in zip(names, orders or [None] * len(names), strict=True):
            part = self.part(f"{name}.weight")
            parts.append(part if order is None else take_rows(part, order))
            placed.append(Part(name, rows_of(part), order))
            if bias:
                value = self.checkpoint.get(f"{name}.bias")
                assert isinstance(value, Tensor)
                biases.append(value.float() if order is None else value.float()[order])
        layer = MergedLinear(self.ops, parts, torch.cat(biases).to(self.device) if bias else None)
        self.weight_bytes += layer.weight.nbytes
        self.packed |= layer.packed
        self.linears.append((layer, tuple(placed)))
        return layer
