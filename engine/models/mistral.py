"""Mistral: the shared decoder, with a sliding window in every layer where the checkpoint sets one (version 0.1
does)."""

from __future__ import annotations

from engine.models.blocks import load_decoder
from engine.models.config import ModelConfig
from engine.models.family import Family
from engine.models.fields import Fields, shared, windows

_WINDOW = 4096
"""What a configuration that leaves the field out means."""


def _read(fields: Fields) -> ModelConfig:
    common = shared(fields)
    return ModelConfig(**common | windows(fields, range(common["num_layers"]), _WINDOW))


FAMILY = Family(read=_read, load=load_decoder)
