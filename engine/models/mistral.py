"""Mistral: the shared decoder, with a sliding window in every layer where the checkpoint sets one (version 0.1
does)."""

from __future__ import annotations

from engine.layers.linear import LayerLoader
from engine.models.blocks import DecoderModel, load_decoder
from engine.models.config import ModelConfig


def load(loader: LayerLoader, config: ModelConfig, positions: int) -> DecoderModel:
    """Build the model. positions: the longest context."""
    return load_decoder(loader, config, positions=positions)
