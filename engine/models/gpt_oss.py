"""gpt-oss: attention with sinks and windows in every other layer, biases everywhere, experts with a clamped SwiGLU.

Experts lie stacked in two tensors a layer: as floats [E, inputs, outputs], in MXFP4 checkpoints as codes [E, outputs,
inputs]; rows of gate and up take turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from engine.layers.attention import PagedAttention
from engine.layers.linear import LayerLoader
from engine.layers.moe import SparseMoe, load_experts
from engine.layers.rows import take_rows
from engine.models.blocks import load_decoder, load_layer
from engine.models.config import ModelConfig, Shapes
from engine.models.family import Family
from engine.models.fields import Fields, shared, windows
from engine.models.moe import MoeConfig, routing
from engine.models.shapes import attention_shapes, decoder_shapes, linear_shapes, norm_shapes
from engine.weights.errors import WeightsError
from kernels.interface import ScaledWeight, WeightPart
from kernels.moe import ExpertOps, ExpertParts

_WINDOW = 128
_ALPHA, _LIMIT = 1.702, 7.0
"""Of the activation "clamped_silu"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig(MoeConfig):
    """A gpt-oss."""

    rows_first: bool
    """Experts are stored with outputs before inputs, as MXFP4 is"""


def _read(fields: Fields) -> ModelConfig:
    common = shared(fields)
    for name, known in (("swiglu_alpha", _ALPHA), ("swiglu_limit", _LIMIT)):
        if fields.number(name, known) != known:
            raise WeightsError(f"{fields.file}: field {name!r} is {fields.number(name)}; only {known} is supported")
    layers = range(common["num_layers"])
    return GptOssConfig(
        **common | windows(fields, layers[::2], _WINDOW) | {"output_bias": common["qkv_bias"]},
        routing=routing(
            fields,
            experts=fields.integer("num_local_experts", 128),
            top_k=fields.integer("num_experts_per_tok", 4),
            normalize=True,
        ),
        expert_size=common["intermediate_size"],
        sparse_layers=frozenset(layers),
        rows_first=fields.nested("quantization_config").data.get("quant_method") == "mxfp4",
    )


def _layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    assert isinstance(config, GptOssConfig)
    experts, hidden, inner = config.routing.experts, config.hidden_size, config.expert_size
    gate_up, down = (hidden, 2 * inner), (inner, hidden)
    shapes = norm_shapes(config, "input_layernorm", "post_attention_layernorm") | attention_shapes(config, layer)
    shapes |= linear_shapes("mlp.router", experts, hidden, bias=True) | {"self_attn.sinks": (config.num_heads,)}
    for name, (inputs, outputs) in (("gate_up", gate_up), ("down", down)):
        matrix = (outputs, inputs) if config.rows_first else (inputs, outputs)
        shapes |= {f"mlp.experts.{name}_proj": (experts, *matrix), f"mlp.experts.{name}_proj_bias": (experts, outputs)}
    return shapes


def _attention(loader: LayerLoader, config: ModelConfig, layer: int, cos_sin: Tensor) -> PagedAttention:
    prefix = f"model.layers.{layer}.self_attn."
    qkv = loader.linear(*(f"{prefix}{name}_proj" for name in "qkv"), bias=config.qkv_bias)
    output = loader.linear(f"{prefix}o_proj", bias=config.output_bias)
    sinks = loader.vector(f"{prefix}sinks").float()
    return PagedAttention(loader.ops, config, layer, qkv, output, cos_sin, sinks=sinks)


def _experts(loader: LayerLoader, config: GptOssConfig, prefix: str) -> Iterator[ExpertParts]:
    """The experts of a layer, gate's rows before up's."""
    inner, hidden = config.expert_size, config.hidden_size
    stacks = [loader.checkpoint.get(f"{prefix}{name}_proj") for name in ("gate_up", "down")]
    biases = [cast(Tensor, loader.checkpoint.get(f"{prefix}{name}_proj_bias")) for name in ("gate_up", "down")]
    apart = torch.cat([torch.arange(0, 2 * inner, 2), torch.arange(1, 2 * inner, 2)])

    def rows(which: int, expert: int, order: Tensor) -> WeightPart:
        stack = stacks[which]
        if not isinstance(stack, Tensor) or stack.dim() == 2:  # all experts' rows, one below the other
            part = take_rows(stack, order + expert * order.shape[0])
            if isinstance(part, ScaledWeight):
                return replace(part, codes=part.codes.to(loader.device), scales=part.scales.to(loader.device))
            assert isinstance(part, Tensor)
            return part.to(loader.device, loader.dtype)
        dense = stack[expert].T[order].to(loader.device, loader.dtype)
        name = f"{prefix}{('gate_up', 'down')[which]}_proj"
        return dense if loader.quantize is None else loader.quantize(name, dense)

    for expert in range(config.routing.experts):
        yield ExpertParts(
            gate_up=[rows(0, expert, apart)],
            down=rows(1, expert, torch.arange(hidden)),
            gate_up_bias=biases[0][expert].float()[apart].to(loader.device),
            down_bias=biases[1][expert].float().to(loader.device),
        )


def _mlp(loader: LayerLoader, config: ModelConfig, layer: int) -> SparseMoe:
    assert isinstance(config, GptOssConfig) and isinstance(loader.ops, ExpertOps)
    prefix = f"model.layers.{layer}.mlp."
    router = loader.linear(f"{prefix}router", bias=True)
    experts = load_experts(loader, _experts(loader, config, f"{prefix}experts."), config.routing.experts)
    return SparseMoe(loader.ops, router, config.routing, experts, "clamped_silu")


FAMILY = Family(
    read=_read,
    load=partial(load_decoder, layer=partial(load_layer, attention=_attention, mlp=_mlp)),
    shapes=partial(decoder_shapes, layer=_layer_shapes),
)
