"""Mixture of experts: a router that sends every token to some experts, and the experts, gated MLPs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

from torch import Tensor

from engine.layers.linear import LayerLoader, MergedLinear
from engine.layers.mlp import GatedMLP
from kernels.interface import Activation
from kernels.moe import ExpertOps, ExpertParts, ExpertWeights, Routing


class SparseMoe:
    """The weighted sum of a token's experts, and of a shared expert that every token meets where there is one."""

    __slots__ = ("_ops", "activation", "bias", "experts", "router", "routing", "shared")

    def __init__(
        self,
        ops: ExpertOps,
        router: MergedLinear,
        routing: Routing,
        experts: ExpertWeights,
        activation: str,
        *,
        bias: Tensor | None = None,
        shared: GatedMLP | None = None,
    ) -> None:
        """router: H → E. bias float32 [E]: added to the scores that experts are chosen by."""
        self._ops = ops
        self.router = router
        self.routing = routing
        self.experts = experts
        self.activation = cast(Activation, activation)
        self.bias = bias
        self.shared = shared

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] → [T, H]."""
        ids, scales = self._ops.route(self.router(x), self.routing, self.bias)
        out = self._ops.run_experts(x, self.experts, ids, scales, self.activation)
        return out if self.shared is None else out.add_(self.shared(x))


def load_experts(loader: LayerLoader, parts: Iterable[ExpertParts], experts: int) -> ExpertWeights:
    """Pack a layer's experts, counted among the weights. Raises WeightsError where a tensor cannot be read."""
    assert isinstance(loader.ops, ExpertOps), f"kernels {loader.ops.name!r} have no experts"

    def counted() -> Iterator[ExpertParts]:
        for part in parts:
            loader.packed |= not all(isinstance(matrix, Tensor) for matrix in (*part.gate_up, part.down))
            yield part

    packed = loader.ops.pack_experts(counted(), experts)
    loader.weight_bytes += packed.nbytes
    return packed


def separate_experts(
    loader: LayerLoader, prefix: str, names: tuple[str, str, str], experts: int
) -> Iterator[ExpertParts]:
    """Experts of checkpoints that keep every matrix by itself, as `prefix`N.NAME.weight. names: of gate, up, down."""
    gate, up, down = names
    for e in range(experts):
        yield ExpertParts(
            gate_up=[loader.part(f"{prefix}{e}.{gate}.weight"), loader.part(f"{prefix}{e}.{up}.weight")],
            down=loader.part(f"{prefix}{e}.{down}.weight"),
        )
