"""Qwen 3: the shared decoder with an RMSNorm over every head of q and k before the rotation, and heads of a size of
their own."""

from __future__ import annotations

from torch import Tensor

from engine.layers.attention import PagedAttention
from engine.layers.linear import LayerLoader
from engine.models.blocks import DecoderModel, load_decoder
from engine.models.config import ModelConfig


def load(loader: LayerLoader, config: ModelConfig, positions: int) -> DecoderModel:
    """Build the model. positions: the longest context."""
    return load_decoder(loader, config, positions=positions, attention=_load_attention)


def _load_attention(loader: LayerLoader, config: ModelConfig, layer: int, cos_sin: Tensor) -> PagedAttention:
    prefix = f"model.layers.{layer}.self_attn."
    qkv = loader.linear(*(f"{prefix}{name}_proj" for name in "qkv"), bias=config.qkv_bias)
    output = loader.linear(f"{prefix}o_proj", bias=config.output_bias)
    q_norm, k_norm = loader.vector(f"{prefix}q_norm.weight"), loader.vector(f"{prefix}k_norm.weight")
    return PagedAttention(loader.ops, config, layer, qkv, output, cos_sin, q_norm, k_norm)
