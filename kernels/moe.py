"""Mixture of experts: the operations that route tokens to experts and run the experts, and what they are given.

T tokens of a step, E experts, K experts for each token, H hidden size, I inner size of an expert. An expert is a gated
MLP. An implementation that has these operations runs the models that need them; all of this project's do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from kernels.interface import Activation, WeightPart

Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How experts are chosen by their scores. Among equal scores the expert of the lowest number comes first."""

    experts: int
    """E"""
    top_k: int
    """K"""
    scoring: Scoring = "softmax"
    """softmax: probabilities over all experts. sigmoid: each for itself (DeepSeek-V3, arXiv 2412.19437)"""
    normalize: bool = False
    """Weights of the chosen ones are divided by their sum; with softmax that is a softmax over the chosen alone"""
    groups: int = 1
    """Experts lie in this many groups of equal size; a group counts as its two best experts together …"""
    top_groups: int = 1
    """… and experts of this many groups are chosen from"""
    scale: float = 1.0
    """Factor on every weight"""

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that do not fit together."""
        if not 0 < self.top_k <= self.experts:
            raise ValueError(f"{self.top_k} of {self.experts} experts cannot be chosen")
        if self.groups < 1 or self.experts % self.groups or not 0 < self.top_groups <= self.groups:
            raise ValueError(f"{self.experts} experts in {self.groups} groups, {self.top_groups} of them chosen from")
        if self.top_groups * (self.experts // self.groups) < self.top_k:
            raise ValueError(f"{self.top_groups} of {self.groups} groups hold fewer than {self.top_k} experts")
        if self.groups > 1 and self.experts // self.groups < 2:
            raise ValueError(f"a group of {self.experts // self.groups} has no two best experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParts:
    """One expert's matrices as they come out of a checkpoint."""

    gate_up: Sequence[WeightPart]
    """Rows of the gate, then of up: [2·I, H] in all"""
    down: WeightPart
    """[H, I]"""
    gate_up_bias: Tensor | None = None
    """[2·I]"""
    down_bias: Tensor | None = None
    """[H]"""


class ExpertWeights(Protocol):
    """All experts of a layer in the layout that an implementation likes best."""

    @property
    def experts(self) -> int:
        """E."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        ...


@runtime_checkable
class ExpertOps(Protocol):
    """The operations of a mixture of experts."""

    def pack_experts(self, parts: Iterable[ExpertParts], experts: int) -> ExpertWeights:
        """Lay the experts of a layer out, taking them one by one. Raises ValueError for shapes that differ or another
        number than `experts`."""
        ...

    def route(self, logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [T, E] → the chosen experts int32 [T, K], best first, and their weights float32 [T, K].

        bias float32 [E] is added to the scores that experts are chosen by, not to their weights. A row depends on that
        row alone.
        """
        ...

    def run_experts(
        self, x: Tensor, weights: ExpertWeights, ids: Tensor, scales: Tensor, activation: Activation = "silu"
    ) -> Tensor:
        """Σ over k of scales[t, k] · down(activation(gate(x[t])) · up(x[t])) of expert ids[t, k] → [T, H] of x's type.

        x [T, H]; ids int32 [T, K], below E and distinct in a row, below 0 for none; scales float32 [T, K]. The sum runs
        over k in ascending order.
        """
        ...


def check_expert(part: ExpertParts, shape: tuple[int, int], found: tuple[int, int]) -> None:
    """Raise ValueError unless an expert's (gate_up rows, inputs) are those of the first, and down fits them.

    shape: (2·I, H) of the first; found: this one's.
    """
    if shape != found or shape[0] % 2:
        raise ValueError(f"experts of one layer are equal in shape: gate and up are {list(found)}, not {list(shape)}")
    for name, bias, size in (("gate_up", part.gate_up_bias, shape[0]), ("down", part.down_bias, shape[1])):
        if bias is not None and tuple(bias.shape) != (size,):
            raise ValueError(f"{name} bias must be [{size}], not {list(bias.shape)}")


def check_call(x: Tensor, hidden: int, ids: Tensor, scales: Tensor) -> None:
    """Raise ValueError where the arguments of `ExpertOps.run_experts` do not fit together."""
    if x.dim() != 2 or x.shape[1] != hidden:
        raise ValueError(f"experts need x of [T, {hidden}], not {list(x.shape)}")
    if ids.dim() != 2 or ids.shape[0] != x.shape[0] or ids.shape != scales.shape:
        raise ValueError(f"ids {list(ids.shape)} and scales {list(scales.shape)} do not fit {x.shape[0]} tokens")
