"""Gemma 3, the text model: Gemma 2 with a norm over every head of q and k in the place of bounded scores, a window in
five of six layers, and another base of the rotation there. Also the text part of the models that see images."""

from __future__ import annotations

from functools import partial
from typing import Any

from engine.models.blocks import load_decoder, load_normed_layer
from engine.models.config import ModelConfig
from engine.models.family import Family
from engine.models.fields import Fields, rope, windows
from engine.models.gemma2 import gemma, normed_layer_shapes
from engine.models.shapes import decoder_shapes

_GLOBAL_THETA, _LOCAL_THETA, _PATTERN, _WINDOW = 1_000_000.0, 10_000.0, 6, 4096
_DEFAULTS = {"vocab_size": 262_208, "max_position_embeddings": 131_072}


def _rotations(fields: Fields) -> dict[str, Any]:
    """The rotations of both kinds of layers: in one object each, or in fields of their own."""
    kinds = fields.nested("rope_parameters")
    if not kinds.data:
        local = fields.number("rope_local_base_freq", _LOCAL_THETA)
        return rope(fields.over({"rope_theta": _GLOBAL_THETA})) | {"local_rope_theta": local}
    whole = {"rope_theta": _GLOBAL_THETA} | kinds.nested("full_attention").data
    limit = {"max_position_embeddings": fields.integer("max_position_embeddings")}
    local = kinds.nested("sliding_attention").number("rope_theta", _LOCAL_THETA)
    return rope(Fields(fields.file, limit | {"rope_parameters": whole})) | {"local_rope_theta": local}


def _read(fields: Fields) -> ModelConfig:
    text = fields.nested("text_config").data
    fields, common = gemma(fields.over(text).over(_DEFAULTS))
    pattern = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", _PATTERN))
    local = [layer for layer in range(common["num_layers"]) if (layer + 1) % pattern]
    return ModelConfig(**common | {"qk_norm": True} | windows(fields, local, _WINDOW) | _rotations(fields))


FAMILY = Family(
    read=_read,
    load=partial(load_decoder, layer=load_normed_layer),
    shapes=partial(decoder_shapes, layer=normed_layer_shapes),
)
