"""SmolLM 3: Llama without a rotation in every fourth layer."""

from __future__ import annotations

from engine.models.blocks import load_decoder
from engine.models.config import ModelConfig
from engine.models.family import Family
from engine.models.fields import Fields, shared, windows
from engine.weights.errors import WeightsError

_INTERVAL = 4


def _read(fields: Fields) -> ModelConfig:
    common = shared(fields.over({"tie_word_embeddings": True}))
    layers, interval = range(common["num_layers"]), fields.integer("no_rope_layer_interval", _INTERVAL)
    # The file's list has a 1 for every layer that turns
    turning = fields.data.get("no_rope_layers") or [(layer + 1) % interval for layer in layers]
    if not isinstance(turning, list) or len(turning) != len(layers):
        raise WeightsError(f"{fields.file}: field 'no_rope_layers' should be a list of {len(layers)} flags")
    still = tuple(layer for layer in layers if not turning[layer])
    own = {"output_bias": common["qkv_bias"], "mlp_bias": fields.flag("mlp_bias", False), "unrotated_layers": still}
    return ModelConfig(**common | own | (windows(fields, still) if fields.flag("use_sliding_window", False) else {}))


FAMILY = Family(read=_read, load=load_decoder)
