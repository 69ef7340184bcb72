"""What families with a mixture of experts share: their configuration, and the tensors of a layer with experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from engine.layers.linear import LayerLoader
from engine.layers.mlp import GatedMLP
from engine.layers.moe import SparseMoe, load_experts, separate_experts
from engine.models.blocks import FeedForward, load_mlp
from engine.models.config import ModelConfig, Shapes
from engine.models.fields import Fields
from engine.models.shapes import attention_shapes, linear_shapes, mlp_shapes, norm_shapes
from engine.weights.errors import WeightsError
from kernels.moe import ExpertOps, Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig(ModelConfig):
    """A decoder with experts in some layers."""

    routing: Routing
    expert_size: int
    """Inner size of an expert"""
    sparse_layers: frozenset[int]
    """Layers with experts; the others have an MLP of intermediate_size"""
    block: str = "mlp"
    """What a layer's feed-forward block is called"""
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """What an expert's gate, up and down are called"""


def routing(fields: Fields, **numbers: Any) -> Routing:
    """A Routing of what a configuration says. Raises WeightsError where the numbers do not fit together."""
    try:
        return Routing(**numbers)
    except ValueError as error:
        raise WeightsError(f"{fields.file}: {error}") from error


def expert_count(fields: Fields, *names: str) -> int:
    """Number of experts, by the first of these fields that the file has."""
    for name in names:
        if fields.data.get(name) is not None:
            return fields.integer(name)
    return fields.integer(names[0])


def moe_shapes(config: ModelConfig, layer: int) -> Shapes:
    """A layer of attention and either experts or an MLP."""
    assert isinstance(config, MoeConfig)
    shapes = norm_shapes(config, "input_layernorm", "post_attention_layernorm") | attention_shapes(config, layer)
    return shapes | (expert_shapes(config) if layer in config.sparse_layers else mlp_shapes(config, layer))


def expert_shapes(config: MoeConfig) -> Shapes:
    """Router and experts of a layer."""
    hidden, inner = config.hidden_size, config.expert_size
    shapes = linear_shapes(f"{config.block}.gate", config.routing.experts, hidden)
    gate, up, down = config.matrices
    for expert in range(config.routing.experts):
        prefix = f"{config.block}.experts.{expert}."
        shapes |= linear_shapes(f"{prefix}{gate}", inner, hidden) | linear_shapes(f"{prefix}{up}", inner, hidden)
        shapes |= linear_shapes(f"{prefix}{down}", hidden, inner)
    return shapes


def load_moe(loader: LayerLoader, config: ModelConfig, layer: int) -> FeedForward:
    """The layer's experts, or its MLP where it has none."""
    assert isinstance(config, MoeConfig)
    if layer not in config.sparse_layers:
        return load_mlp(loader, config, layer)
    return load_sparse(loader, config, layer)


def load_sparse(
    loader: LayerLoader, config: MoeConfig, layer: int, *, bias: str = "", shared: GatedMLP | None = None
) -> SparseMoe:
    """Router and experts of a layer. bias: the tensor, below the layer, that experts are also chosen by."""
    prefix = f"model.layers.{layer}.{config.block}."
    assert isinstance(loader.ops, ExpertOps)
    router = loader.linear(f"{prefix}gate")
    parts = separate_experts(loader, f"{prefix}experts.", config.matrices, config.routing.experts)
    experts = load_experts(loader, parts, config.routing.experts)
    chosen_by = None
    if bias:
        chosen_by = cast(Tensor, loader.checkpoint.get(f"{prefix}{bias}")).to(loader.device, torch.float32)
        loader.weight_bytes += chosen_by.nbytes
    return SparseMoe(loader.ops, router, config.routing, experts, config.activation, bias=chosen_by, shared=shared)
