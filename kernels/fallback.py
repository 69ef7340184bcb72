"""The CPU implementation for machines without a C compiler: torch's own operations on dequantised float32 weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.dense import DenseWeight
from kernels.interface import LinearWeight
from kernels.reference import ReferenceOps

ROWS = 16


class TorchOps(ReferenceOps):
    """The reference, with linear layers in blocks of ROWS rows: always the same matrix shape, so that BLAS takes the
    same path for a row whatever else is in the call."""

    name = "torch"

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """x [T, K] · weightᵀ + bias → [T, N]."""
        if not isinstance(weight, DenseWeight):
            raise TypeError(f"this weight was packed by another implementation: {type(weight).__name__}")
        if x.dim() != 2 or x.shape[1] != weight.in_features:
            raise ValueError(f"linear needs x of [T, {weight.in_features}], not {list(x.shape)}")
        out = torch.empty(x.shape[0], weight.out_features)
        block = torch.zeros(ROWS, weight.in_features)
        for first in range(0, x.shape[0], ROWS):
            rows = x[first : first + ROWS]
            block[: rows.shape[0]] = rows
            out[first : first + ROWS] = functional.linear(block, weight.matrix, weight.bias)[: rows.shape[0]]
        return out
