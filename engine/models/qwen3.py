"""Qwen 3: the shared decoder with an RMSNorm over every head of q and k before the rotation, and heads of a size of
their own."""

from __future__ import annotations

from engine.models.blocks import load_decoder
from engine.models.config import ModelConfig
from engine.models.family import Family
from engine.models.fields import Fields, shared
from engine.models.qwen2 import upper_windows


def _read(fields: Fields) -> ModelConfig:
    own = {"output_bias": fields.flag("attention_bias", False), "qk_norm": True}
    return ModelConfig(**shared(fields) | own | upper_windows(fields))


FAMILY = Family(read=_read, load=load_decoder)
