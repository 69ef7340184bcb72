"""Phi 3, 3.5 and 4: the shared decoder with one tensor for q, k and v, one for gate and up, LongRoPE, and in Phi-4-mini
a rotation of three quarters of a head."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from engine.layers.attention import PagedAttention
from engine.layers.linear import LayerLoader
from engine.layers.mlp import GatedMLP
from engine.layers.rows import half_split_order, heads_order
from engine.models.blocks import load_decoder, load_layer
from engine.models.config import ModelConfig, Shapes
from engine.models.family import Family
from engine.models.fields import Fields, rotation, shared, windows
from engine.models.shapes import decoder_shapes, linear_shapes, norm_shapes

_SPELLINGS = ("su", "yarn")
"""What older configurations call LongRoPE."""


def _rotation(fields: Fields) -> dict[str, Any]:
    """The rotary parameters under LongRoPE's name, with the length that the model was trained at."""
    given = rotation(fields).data
    if given.get("rope_type", given.get("type", "default")) not in ("longrope", *_SPELLINGS):
        return given
    trained = {"original_max_position_embeddings": fields.integer("original_max_position_embeddings", 4096)}
    return trained | given | {"rope_type": "longrope"}


def _read(fields: Fields) -> ModelConfig:
    common = shared(fields.under({"rope_parameters": _rotation(fields)}))
    return ModelConfig(**common | windows(fields, range(common["num_layers"])))


def _layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return (
        norm_shapes(config, "input_layernorm", "post_attention_layernorm")
        | linear_shapes("self_attn.qkv_proj", q + 2 * kv, hidden)
        | linear_shapes("self_attn.o_proj", hidden, q)
        | linear_shapes("mlp.gate_up_proj", 2 * inner, hidden)
        | linear_shapes("mlp.down_proj", hidden, inner)
    )


def _attention(loader: LayerLoader, config: ModelConfig, layer: int, cos_sin: Tensor) -> PagedAttention:
    prefix = f"model.layers.{layer}.self_attn."
    turned = config.num_heads + config.num_kv_heads
    head = half_split_order(config.head_dim, config.turning)
    order = heads_order(head, turned, turned + config.num_kv_heads) if config.turning < config.head_dim else None
    qkv = loader.linear(f"{prefix}qkv_proj", orders=[order])
    return PagedAttention(loader.ops, config, layer, qkv, loader.linear(f"{prefix}o_proj"), cos_sin)


def _mlp(loader: LayerLoader, config: ModelConfig, layer: int) -> GatedMLP:
    prefix = f"model.layers.{layer}.mlp."
    gate_up, down = loader.linear(f"{prefix}gate_up_proj"), loader.linear(f"{prefix}down_proj")
    return GatedMLP(loader.ops, gate_up, down, config.activation)


FAMILY = Family(
    read=_read,
    load=partial(load_decoder, layer=partial(load_layer, attention=_attention, mlp=_mlp)),
    shapes=partial(decoder_shapes, layer=_layer_shapes),
)
