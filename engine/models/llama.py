"""Llama 2 and 3, SmolLM2 and everything else of LlamaForCausalLM: the shared decoder as it is, rotary scaling by
configuration."""

from __future__ import annotations

from engine.models.blocks import load_decoder
from engine.models.config import ModelConfig
from engine.models.family import Family
from engine.models.fields import Fields, shared


def _read(fields: Fields) -> ModelConfig:
    biases = {"output_bias": fields.flag("attention_bias", False), "mlp_bias": fields.flag("mlp_bias", False)}
    return ModelConfig(**shared(fields) | biases)


FAMILY = Family(read=_read, load=load_decoder)
