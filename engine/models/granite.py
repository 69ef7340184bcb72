"""Granite 3: Llama with factors on embeddings, scores, logits and what is added to the residual stream.

The last costs nothing: a stream in units of that factor takes what layers add as it is, and norms do not see the unit
where their epsilon is given in it, too.
"""

from __future__ import annotations

from engine.models.blocks import load_decoder
from engine.models.config import ModelConfig
from engine.models.family import Family
from engine.models.fields import Fields, shared
from engine.weights.errors import WeightsError


def _read(fields: Fields) -> ModelConfig:
    common, unit = shared(fields), fields.number("residual_multiplier", 1.0)
    if unit <= 0 or fields.number("logits_scaling", 1.0) <= 0:
        raise WeightsError(f"{fields.file}: residual_multiplier and logits_scaling should be positive")
    own = {
        "output_bias": common["qkv_bias"],
        "mlp_bias": fields.flag("mlp_bias", False),
        "rms_eps": common["rms_eps"] / unit**2,
        "embedding_scale": fields.number("embedding_multiplier", 1.0) / unit,
        "attention_scale": fields.number("attention_multiplier", 1.0),
        "logit_scale": 1.0 / fields.number("logits_scaling", 1.0),
    }
    return ModelConfig(**common | own)


FAMILY = Family(read=_read, load=load_decoder)
