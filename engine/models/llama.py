"""Llama 2 and 3, SmolLM2 and everything else of LlamaForCausalLM: the shared decoder as it is, rotary scaling by
configuration."""

from __future__ import annotations

from engine.layers.linear import LayerLoader
from engine.models.blocks import DecoderModel, load_decoder
from engine.models.config import ModelConfig


def load(loader: LayerLoader, config: ModelConfig, positions: int) -> DecoderModel:
    """Build the model. positions: the longest context."""
    return load_decoder(loader, config, positions=positions)
