"""Qwen 2 and 2.5: the shared decoder with biases on q, k and v, and a sliding window in the upper layers where it is
used."""

from __future__ import annotations

from engine.layers.linear import LayerLoader
from engine.models.blocks import DecoderModel, load_decoder
from engine.models.config import ModelConfig


def load(loader: LayerLoader, config: ModelConfig, positions: int) -> DecoderModel:
    """Build the model. positions: the longest context."""
    return load_decoder(loader, config, positions=positions)
