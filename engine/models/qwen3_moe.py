"""Qwen 3 with experts: Qwen 3's attention, and experts in all layers but those that the configuration sets apart."""

from __future__ import annotations

from functools import partial

from engine.models.blocks import load_decoder, load_layer
from engine.models.config import ModelConfig
from engine.models.family import Family
from engine.models.fields import Fields, shared
from engine.models.moe import MoeConfig, expert_count, load_moe, moe_shapes, routing
from engine.models.qwen2 import upper_windows
from engine.models.shapes import decoder_shapes
from engine.weights.errors import WeightsError


def _read(fields: Fields) -> ModelConfig:
    common = shared(fields)
    apart, step = fields.data.get("mlp_only_layers") or [], fields.integer("decoder_sparse_step", 1)
    if not isinstance(apart, list) or step < 1:
        raise WeightsError(f"{fields.file}: mlp_only_layers {apart!r} or decoder_sparse_step {step} is out of range")
    layers = range(common["num_layers"])
    return MoeConfig(
        **common | upper_windows(fields) | {"qk_norm": True, "output_bias": fields.flag("attention_bias", False)},
        routing=routing(
            fields,
            experts=expert_count(fields, "num_experts", "num_local_experts"),
            top_k=fields.integer("num_experts_per_tok", 8),
            normalize=fields.flag("norm_topk_prob", False),
        ),
        expert_size=fields.integer("moe_intermediate_size"),
        sparse_layers=frozenset(n for n in layers if n not in apart and (n + 1) % step == 0),
    )


FAMILY = Family(
    read=_read,
    load=partial(load_decoder, layer=partial(load_layer, mlp=load_moe)),
    shapes=partial(decoder_shapes, layer=moe_shapes),
)
