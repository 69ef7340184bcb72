"""DeepSeek-V3 and R1: latent attention, dense layers first, then experts chosen within groups beside a shared one.

Of a checkpoint's further layers, which guess the token after the next, nothing is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.layers.latent import HeadLinear, LatentAttention, LatentSizes
from engine.layers.linear import LayerLoader
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.models.blocks import FeedForward, load_decoder, load_layer, load_mlp
from engine.models.config import ModelConfig, Shapes
from engine.models.family import Family
from engine.models.fields import Fields, rotation, shared
from engine.models.moe import MoeConfig, expert_count, expert_shapes, load_sparse, routing
from engine.models.shapes import decoder_shapes, linear_shapes, mlp_shapes, norm_shapes
from engine.weights.errors import WeightsError
from kernels.scaled import dequantize_scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig(MoeConfig):
    """A DeepSeek-V3. num_kv_heads and head_dim are those of the cache: one head of latent and rotated key."""

    sizes: LatentSizes
    q_rank: int
    """Elements of the queries' latent; 0: queries come straight from the hidden row"""
    pairs: bool
    """Elements that turn together are neighbours in the checkpoint, not half of them apart"""
    shared_size: int
    """Inner size of the shared expert"""


def _read(fields: Fields) -> ModelConfig:
    common = shared(fields)
    sizes = LatentSizes(
        heads=common["num_heads"],
        rank=fields.integer("kv_lora_rank"),
        rope=fields.integer("qk_rope_head_dim"),
        nope=fields.integer("qk_nope_head_dim"),
        value=fields.integer("v_head_dim"),
    )
    q_rank = fields.integer("q_lora_rank", 0)
    if min(sizes.rank, sizes.rope, sizes.nope, sizes.value) < 1 or sizes.rank % 2 or sizes.rope % 2 or q_rank < 0:
        raise WeightsError(f"{fields.file}: {sizes} with q_lora_rank {q_rank} is out of range")
    first, step = fields.integer("first_k_dense_replace", 0), fields.integer("moe_layer_freq", 1)
    expert = fields.integer("moe_intermediate_size")
    cached = {"num_kv_heads": 1, "head_dim": sizes.rank + sizes.rope, "rotary_dim": sizes.rope, "shared_kv": True}
    return DeepseekConfig(
        **common | cached | {"attention_scale": _scale(fields, sizes), "output_bias": common["qkv_bias"]},
        routing=routing(
            fields,
            experts=expert_count(fields, "n_routed_experts", "num_local_experts"),
            top_k=fields.integer("num_experts_per_tok"),
            scoring="sigmoid",
            normalize=fields.flag("norm_topk_prob", True),
            groups=fields.integer("n_group", 1),
            top_groups=fields.integer("topk_group", 1),
            scale=fields.number("routed_scaling_factor", 1.0),
        ),
        expert_size=expert,
        sparse_layers=frozenset(n for n in range(common["num_layers"]) if n >= first and n % max(step, 1) == 0),
        sizes=sizes,
        q_rank=q_rank,
        pairs=fields.flag("rope_interleave", True),
        shared_size=expert * fields.integer("n_shared_experts", 0),
    )


def _scale(fields: Fields, sizes: LatentSizes) -> float:
    """Of the scores: YaRN's magnitude for all dimensions counts twice, once for the query and once for the key."""
    scaling = rotation(fields)
    weight, factor = scaling.number("mscale_all_dim", 0.0), scaling.number("factor", 1.0)
    magnitude = 0.1 * weight * math.log(factor) + 1.0 if weight and factor > 1 else 1.0
    return float(magnitude * magnitude * (sizes.nope + sizes.rope) ** -0.5)


def _layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    assert isinstance(config, DeepseekConfig)
    s, hidden, bias = config.sizes, config.hidden_size, config.qkv_bias
    q = s.heads * (s.nope + s.rope)
    shapes = norm_shapes(config, "input_layernorm", "post_attention_layernorm")
    if config.q_rank:
        shapes |= linear_shapes("self_attn.q_a_proj", config.q_rank, hidden, bias=bias)
        shapes |= {"self_attn.q_a_layernorm.weight": (config.q_rank,)}
        shapes |= linear_shapes("self_attn.q_b_proj", q, config.q_rank)
    else:
        shapes |= linear_shapes("self_attn.q_proj", q, hidden)
    shapes |= linear_shapes("self_attn.kv_a_proj_with_mqa", s.rank + s.rope, hidden, bias=bias)
    shapes |= {"self_attn.kv_a_layernorm.weight": (s.rank,)}
    shapes |= linear_shapes("self_attn.kv_b_proj", s.heads * (s.nope + s.value), s.rank)
    shapes |= linear_shapes("self_attn.o_proj", hidden, s.heads * s.value, bias=bias)
    if layer not in config.sparse_layers:
        return shapes | mlp_shapes(config, layer)
    shapes |= expert_shapes(config) | {"mlp.gate.e_score_correction_bias": (config.routing.experts,)}
    if config.shared_size:
        shared_mlp = mlp_shapes(replace(config, intermediate_size=config.shared_size), layer)
        shapes |= {name.replace("mlp.", "mlp.shared_experts."): shape for name, shape in shared_mlp.items()}
    return shapes


def _attention(loader: LayerLoader, config: ModelConfig, layer: int, cos_sin: Tensor) -> LatentAttention:
    assert isinstance(config, DeepseekConfig)
    s, ops, prefix = config.sizes, loader.ops, f"model.layers.{layer}.self_attn."
    turn = torch.arange(s.rope).view(-1, 2).T.reshape(-1) if config.pairs else torch.arange(s.rope)
    head = torch.cat([torch.arange(s.nope), s.nope + turn])
    queries = (torch.arange(s.heads)[:, None] * (s.nope + s.rope) + head).reshape(-1)
    keys = torch.cat([torch.arange(s.rank), s.rank + turn])
    first, order = (f"{prefix}q_a_proj", None) if config.q_rank else (f"{prefix}q_proj", queries)
    down = loader.linear(first, f"{prefix}kv_a_proj_with_mqa", bias=config.qkv_bias, orders=[order, keys])
    up = _dense(loader, f"{prefix}kv_b_proj.weight").view(s.heads, s.nope + s.value, s.rank)
    into, out_of = HeadLinear(ops, up[:, : s.nope].transpose(1, 2)), HeadLinear(ops, up[:, s.nope :])
    loader.weight_bytes += into.nbytes + out_of.nbytes
    return LatentAttention(
        ops,
        config,
        layer,
        s,
        down=down,
        q_up=loader.linear(f"{prefix}q_b_proj", orders=[queries]) if config.q_rank else None,
        q_norm=_norm(loader, f"{prefix}q_a_layernorm") if config.q_rank else None,
        kv_norm=_norm(loader, f"{prefix}kv_a_layernorm"),
        into_latent=into,
        out_of_latent=out_of,
        output=loader.linear(f"{prefix}o_proj", bias=config.output_bias),
        cos_sin=cos_sin,
    )


def _norm(loader: LayerLoader, name: str) -> RMSNorm:
    # The norms of latents have the family's own epsilon, whatever the configuration says
    return RMSNorm(loader.ops, loader.vector(f"{name}.weight"), 1e-6)


def _dense(loader: LayerLoader, name: str) -> Tensor:
    """A matrix that is cut into heads, as floats: it is small, and its parts meet other rows than it was made for."""
    value: Any = loader.checkpoint.get(name)
    matrix = value if isinstance(value, Tensor) else dequantize_scaled(value)
    return matrix.to(loader.device, loader.dtype)


def _mlp(loader: LayerLoader, config: ModelConfig, layer: int) -> FeedForward:
    assert isinstance(config, DeepseekConfig)
    if layer not in config.sparse_layers:
        return load_mlp(loader, config, layer)
    prefix, shared_expert = f"model.layers.{layer}.mlp.shared_experts.", None
    if config.shared_size:
        gate_up = loader.linear(f"{prefix}gate_proj", f"{prefix}up_proj")
        shared_expert = GatedMLP(loader.ops, gate_up, loader.linear(f"{prefix}down_proj"), config.activation)
    return load_sparse(loader, config, layer, bias="gate.e_score_correction_bias", shared=shared_expert)


FAMILY = Family(
    read=_read,
    load=partial(load_decoder, layer=partial(load_layer, attention=_attention, mlp=_mlp)),
    shapes=partial(decoder_shapes, layer=_layer_shapes),
)
