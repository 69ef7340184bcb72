"""Mixtral: the shared decoder with experts in every layer; a token's weights are a softmax over its own experts."""

from __future__ import annotations

from functools import partial

from engine.models.blocks import load_decoder, load_layer
from engine.models.config import ModelConfig
from engine.models.family import Family
from engine.models.fields import Fields, shared, windows
from engine.models.moe import MoeConfig, load_moe, moe_shapes, routing
from engine.models.shapes import decoder_shapes


def _read(fields: Fields) -> ModelConfig:
    common = shared(fields)
    layers = range(common["num_layers"])
    return MoeConfig(
        **common | windows(fields, layers),
        routing=routing(
            fields,
            experts=fields.integer("num_local_experts", 8),
            top_k=fields.integer("num_experts_per_tok", 2),
            normalize=True,
        ),
        expert_size=common["intermediate_size"],
        sparse_layers=frozenset(layers),
        block="block_sparse_moe",
        matrices=("w1", "w3", "w2"),
    )


FAMILY = Family(
    read=_read,
    load=partial(load_decoder, layer=partial(load_layer, mlp=load_moe)),
    shapes=partial(decoder_shapes, layer=moe_shapes),
)
