"""Mixture of experts on a CPU: `kernels.moe` over the native library (kernels/native/moe.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from torch import Tensor

from kernels.cpu import ACTIVATIONS, CpuOps, PackedWeight, float_address, int_address, packed_weight
from kernels.interface import Activation
from kernels.moe import ExpertParts, ExpertWeights, Routing, check_call, check_expert
from kernels.native_structs import ExpertsArgs, RouteArgs

MAX_EXPERTS = 1024
"""HR_MAX_EXPERTS of headrace.h."""


class PackedExperts:
    """Every expert's two weights in the native layout, and the tables of their addresses."""

    def __init__(self, ops: CpuOps, parts: Iterable[ExpertParts], experts: int) -> None:
        """Raises ValueError for experts of different shapes or another number of them."""
        self._gate_up: list[PackedWeight] = []
        self._down: list[PackedWeight] = []
        for part in parts:
            self._gate_up.append(packed_weight(ops.pack(part.gate_up, part.gate_up_bias)))
            self._down.append(packed_weight(ops.pack([part.down], part.down_bias)))
            first, last, down = self._gate_up[0], self._gate_up[-1], self._down[-1]
            shape = (first.out_features, first.in_features)
            check_expert(part, shape, (last.out_features, last.in_features))
            check_expert(part, shape, (2 * down.in_features, down.out_features))
        if len(self._gate_up) != experts:
            raise ValueError(f"{experts} experts are needed, not {len(self._gate_up)}")
        self.experts = experts
        self.hidden = self._gate_up[0].in_features
        self.nbytes = sum(weight.nbytes for weight in (*self._gate_up, *self._down))
        table = ctypes.c_void_p * experts
        self.gate_up = table(*(weight.address for weight in self._gate_up))
        self.down = table(*(weight.address for weight in self._down))


def route(ops: CpuOps, logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `kernels.moe.ExpertOps.route`."""
    if logits.dim() != 2 or logits.shape[1] != routing.experts or routing.experts > MAX_EXPERTS:
        raise ValueError(f"routing needs logits of [T, {routing.experts} ≤ {MAX_EXPERTS}], not {list(logits.shape)}")
    if bias is not None and bias.shape != (routing.experts,):
        raise ValueError(f"the bias of the choice must be [{routing.experts}], not {list(bias.shape)}")
    ids = torch.empty(logits.shape[0], routing.top_k, dtype=torch.int32)
    weights = torch.empty(logits.shape[0], routing.top_k)
    args = RouteArgs(
        float_address(logits), None if bias is None else float_address(bias), ids.data_ptr(), weights.data_ptr(),
        logits.shape[0], routing.experts, routing.top_k, routing.groups, routing.top_groups,
        routing.scoring == "sigmoid", routing.normalize, routing.scale,
    )  # fmt: skip
    ops.call(ops.library.hr_route, ctypes.addressof(args))
    return ids, weights


def run_experts(
    ops: CpuOps, x: Tensor, weights: ExpertWeights, ids: Tensor, scales: Tensor, activation: Activation
) -> Tensor:
    """See `kernels.moe.ExpertOps.run_experts`."""
    if not isinstance(weights, PackedExperts):
        raise TypeError(f"these experts were packed by another implementation: {type(weights).__name__}")
    check_call(x, weights.hidden, ids, scales)
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
    out = torch.empty(x.shape)
    args = ExpertsArgs(
        float_address(x), int_address(ids), float_address(scales), ctypes.addressof(weights.gate_up),
        ctypes.addressof(weights.down), out.data_ptr(), x.shape[0], ids.shape[1], weights.experts,
        ACTIVATIONS[activation],
    )  # fmt: skip
    ops.call(ops.library.hr_experts, ctypes.addressof(args))
    return out
