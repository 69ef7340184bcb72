"""Qwen 2 and 2.5: the shared decoder with biases on q, k and v, and a sliding window in the upper layers where it is
used."""

from __future__ import annotations

from typing import Any

from engine.models.blocks import load_decoder
from engine.models.config import ModelConfig
from engine.models.family import Family
from engine.models.fields import Fields, shared, windows

_WINDOW, _FULL_LAYERS = 4096, 28
"""Window, and number of layers below the windowed ones, where the file does not say."""


def upper_windows(fields: Fields) -> dict[str, Any]:
    """The windows of Qwen's models: off unless switched on, then as layer_types or max_window_layers say."""
    if not fields.flag("use_sliding_window", False):
        return {}
    lowest = fields.integer("max_window_layers", _FULL_LAYERS)
    return windows(fields, range(lowest, fields.integer("num_hidden_layers")), _WINDOW)


def _read(fields: Fields) -> ModelConfig:
    return ModelConfig(**shared(fields) | {"qkv_bias": True} | upper_windows(fields))


FAMILY = Family(read=_read, load=load_decoder)
