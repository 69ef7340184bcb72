"""Gemma 2: bounded scores and logits, a window in every other layer, norms before and after attention and MLP whose
weights count from 1, embeddings times √H, GeGLU."""

from __future__ import annotations

from functools import partial
from typing import Any

from engine.models.blocks import load_decoder, load_normed_layer
from engine.models.config import ModelConfig, Shapes
from engine.models.family import Family
from engine.models.fields import Fields, shared, windows
from engine.models.shapes import attention_shapes, decoder_shapes, mlp_shapes, norm_shapes
from engine.weights.errors import WeightsError

_DEFAULTS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True,
             "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}  # fmt: skip
"""What configurations of Gemma leave out."""
NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def gemma(fields: Fields) -> tuple[Fields, dict[str, Any]]:
    """The fields with Gemma's defaults, and what Gemma 2 and 3 read alike. Raises WeightsError."""
    fields = fields.over(_DEFAULTS)
    if fields.data.get("use_bidirectional_attention"):
        raise WeightsError(f"{fields.file}: field 'use_bidirectional_attention': only causal attention is supported")
    common = shared(fields.under({"hidden_act": fields.data["hidden_activation"]}))
    return fields, common | {
        "output_bias": common["qkv_bias"],
        "norm_offset": 1.0,
        "embedding_scale": common["hidden_size"] ** 0.5,
        "attention_scale": fields.number("query_pre_attn_scalar") ** -0.5,
        "logit_softcap": fields.number("final_logit_softcapping", 0.0),
    }


def normed_layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    """A layer with norms before and after attention and MLP."""
    return norm_shapes(config, *NORMS) | attention_shapes(config, layer) | mlp_shapes(config, layer)


def _read(fields: Fields) -> ModelConfig:
    fields, common = gemma(fields.over({"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}))
    cap = {"attention_softcap": fields.number("attn_logit_softcapping", 0.0)}
    return ModelConfig(**common | cap | windows(fields, range(0, common["num_layers"], 2), 4096))


FAMILY = Family(
    read=_read,
    load=partial(load_decoder, layer=load_normed_layer),
    shapes=partial(decoder_shapes, layer=normed_layer_shapes),
)
