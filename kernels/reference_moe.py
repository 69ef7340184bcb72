"""Mixture of experts in plain torch: the definition of correct for the operations of `kernels.moe`.

As in `kernels.reference` a row never depends on the other rows of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from kernels.dense import DenseWeight
from kernels.interface import Activation, LinearWeight
from kernels.moe import ExpertParts, ExpertWeights, Routing, check_call, check_expert
from kernels.reference import gated, linear, pack

Product = Callable[[Tensor, LinearWeight], Tensor]


class DenseExperts:
    """Experts as pairs of float32 matrices."""

    def __init__(self, gate_up: Sequence[DenseWeight], down: Sequence[DenseWeight]) -> None:
        """gate_up: H → 2·I each; down: I → H each."""
        self.gate_up = gate_up
        self.down = down

    @property
    def experts(self) -> int:
        """E."""
        return len(self.gate_up)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(weight.nbytes for weight in (*self.gate_up, *self.down))


def pack_experts(parts: Iterable[ExpertParts], experts: int) -> DenseExperts:
    """See `kernels.moe.ExpertOps.pack_experts`."""
    gate_up: list[DenseWeight] = []
    down: list[DenseWeight] = []
    for part in parts:
        gate_up.append(pack(part.gate_up, part.gate_up_bias))
        down.append(pack([part.down], part.down_bias))
        first, last = gate_up[0], gate_up[-1]
        shape = (first.out_features, first.in_features)
        check_expert(part, shape, (last.out_features, last.in_features))
        check_expert(part, shape, (2 * down[-1].in_features, down[-1].out_features))
    if len(gate_up) != experts:
        raise ValueError(f"{experts} experts are needed, not {len(gate_up)}")
    return DenseExperts(gate_up, down)


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `kernels.moe.ExpertOps.route`."""
    if logits.dim() != 2 or logits.shape[1] != routing.experts:
        raise ValueError(f"routing needs logits of [T, {routing.experts}], not {list(logits.shape)}")
    ids = torch.empty(logits.shape[0], routing.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(logits.shape[0], routing.top_k, dtype=torch.float32, device=logits.device)
    for t in range(logits.shape[0]):
        row = logits[t].to(torch.float32, copy=True)
        scores = torch.softmax(row, dim=0) if routing.scoring == "softmax" else torch.sigmoid(row)
        chosen_by = (scores if routing.scoring == "sigmoid" else row) + (0.0 if bias is None else bias)
        if routing.groups > 1:
            grouped = chosen_by.reshape(routing.groups, -1)
            best = torch.sort(grouped.topk(2).values.sum(dim=-1), descending=True, stable=True).indices
            hidden = torch.ones(routing.groups, dtype=torch.bool, device=row.device)
            hidden[best[: routing.top_groups]] = False
            chosen_by = grouped.masked_fill(hidden[:, None], float("-inf")).reshape(-1)
        chosen = torch.sort(chosen_by, descending=True, stable=True).indices[: routing.top_k]
        weight = scores[chosen]
        if routing.normalize and routing.scoring == "softmax":
            weight = torch.softmax(row[chosen], dim=0)
        elif routing.normalize:
            weight = weight / (weight.sum() + 1e-20)
        ids[t], weights[t] = chosen.to(torch.int32), weight * routing.scale
    return ids, weights


def run_experts(
    x: Tensor,
    weights: ExpertWeights,
    ids: Tensor,
    scales: Tensor,
    activation: Activation = "silu",
    product: Product | None = None,
) -> Tensor:
    """See `kernels.moe.ExpertOps.run_experts`; Σ in float32. product: what multiplies rows with a matrix, `linear`
    where it is left out."""
    if not isinstance(weights, DenseExperts):
        raise TypeError(f"these experts were packed by another implementation: {type(weights).__name__}")
    check_call(x, weights.gate_up[0].in_features, ids, scales)
    multiply: Callable[[Tensor, DenseWeight], Tensor] = product or linear
    parts = torch.zeros(*ids.shape, x.shape[1], dtype=torch.float32, device=x.device)
    for expert in sorted({number for number in ids.flatten().tolist() if number >= 0}):
        rows, places = torch.nonzero(ids == expert, as_tuple=True)
        inner = gated(multiply(x[rows].to(torch.float32), weights.gate_up[expert]), activation)
        parts[rows, places] = multiply(inner, weights.down[expert])
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for k in range(ids.shape[1]):
        total += scales[:, k, None] * parts[:, k]
    return total.to(x.dtype)
