"""The tensors that a checkpoint of a decoder must have, put together from the shapes of its parts."""

from __future__ import annotations

from collections.abc import Callable

from engine.models.config import ModelConfig, Shapes

LayerShapes = Callable[[ModelConfig, int], Shapes]
"""(configuration, layer) → the layer's tensors, named below model.layers.N."""


def attention_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Projections of q, k, v and the output, with biases and norms per head where the configuration says so."""
    q, kv, hidden = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.hidden_size
    shapes: Shapes = {}
    for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        shapes |= linear_shapes(f"self_attn.{name}", rows, hidden, bias=config.qkv_bias)
    if config.qk_norm:
        shapes |= dict.fromkeys(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), (config.head_dim,))
    return shapes | linear_shapes("self_attn.o_proj", hidden, q, bias=config.output_bias)


def mlp_shapes(config: ModelConfig, layer: int) -> Shapes:
    """gate, up and down."""
    inner, hidden = config.intermediate_size, config.hidden_size
    return (
        linear_shapes("mlp.gate_proj", inner, hidden, bias=config.mlp_bias)
        | linear_shapes("mlp.up_proj", inner, hidden, bias=config.mlp_bias)
        | linear_shapes("mlp.down_proj", hidden, inner, bias=config.mlp_bias)
    )


def norm_shapes(config: ModelConfig, *names: str) -> Shapes:
    """Norms over the hidden dimension."""
    return {f"{name}.weight": (config.hidden_size,) for name in names}


def linear_shapes(name: str, rows: int, columns: int, *, bias: bool = False) -> Shapes:
    """One matrix and its bias."""
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    """A pre-norm layer of attention and MLP."""
    norms = norm_shapes(config, "input_layernorm", "post_attention_layernorm")
    return norms | attention_shapes(config, layer) | mlp_shapes(config, layer)


def decoder_shapes(config: ModelConfig, layer: LayerShapes = layer_shapes) -> Shapes:
    """Embedding, layers, norm, and a head where it is not the embedding."""
    table = (config.vocab_size, config.hidden_size)
    shapes: Shapes = {"model.embed_tokens.weight": table}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer(config, index).items()}
    shapes |= norm_shapes(config, "model.norm")
    return shapes if config.tie_embeddings else shapes | {"lm_head.weight": table}
