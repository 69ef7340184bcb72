"""The decoder that most families are: layers of paged attention and a feed-forward block on a residual stream.

What families differ in goes in as functions that build a layer, its attention or its feed-forward block; the model
does not ask which family it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.batch import ForwardBatch, KVTensors
from engine.layers.attention import PagedAttention
from engine.layers.embedding import TokenEmbedding
from engine.layers.linear import LayerLoader, MergedLinear
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.rotary import rotary_tables
from engine.layers.rows import half_split_order, heads_order
from engine.lora import Adapters
from engine.models.config import ModelConfig
from kernels.decoder import DecoderOps, DecoderProgram, DecoderSpec, LayerSpec


class Attention(Protocol):
    """A layer's attention."""

    def __call__(self, x: Tensor, batch: ForwardBatch, kv: KVTensors, rows: Tensor | None = None) -> Tensor:
        """x [T, H] → [T, H]; what all T tokens leave behind enters the cache. rows int64 [R]: the output of these rows
        only."""
        ...


class FeedForward(Protocol):
    """A layer's feed-forward block: an MLP or a mixture of experts."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] → [T, H]."""
        ...


AttentionLoader = Callable[[LayerLoader, ModelConfig, int, Tensor], Attention]
"""(loader, config, layer, cos_sin) → the layer's attention."""
FeedForwardLoader = Callable[[LayerLoader, ModelConfig, int], FeedForward]
"""(loader, config, layer) → the layer's feed-forward block."""


class DecoderLayer:
    """Attention and feed-forward, each behind a norm; both add to the residual stream, the latter's output at the next
    layer's norm. Some families norm what comes out of each, too."""

    __slots__ = ("attention", "attention_norm", "attention_out_norm", "mlp", "mlp_norm", "mlp_out_norm")

    def __init__(
        self,
        attention_norm: RMSNorm,
        attention: Attention,
        mlp_norm: RMSNorm,
        mlp: FeedForward,
        *,
        attention_out_norm: RMSNorm | None = None,
        mlp_out_norm: RMSNorm | None = None,
    ) -> None:
        """attention_out_norm, mlp_out_norm: norms of the two outputs before they are added."""
        self.attention_norm = attention_norm
        self.attention = attention
        self.attention_out_norm = attention_out_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_out_norm = mlp_out_norm

    def __call__(self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, kv: KVTensors) -> Tensor:
        """x [T, H]: output of the layer below (None at the first), not yet in residual [T, H]. Returns this layer's
        output."""
        hidden = self.attention_norm(residual) if x is None else self.attention_norm(x, residual)
        return self._feed_forward(self.attention(hidden, batch, kv), residual)

    def last(
        self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, kv: KVTensors, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same for the top layer, where only `rows` int64 [R] matter after attention. Returns output and residual,
        [R, H]."""
        hidden = self.attention_norm(residual) if x is None else self.attention_norm(x, residual)
        mixed = self.attention(hidden, batch, kv, rows)
        residual = residual[rows]
        return self._feed_forward(mixed, residual), residual

    def _feed_forward(self, mixed: Tensor, residual: Tensor) -> Tensor:
        if self.attention_out_norm is not None:
            mixed = self.attention_out_norm(mixed)
        out = self.mlp(self.mlp_norm(mixed, residual))
        return out if self.mlp_out_norm is None else self.mlp_out_norm(out)

    def spec(self) -> LayerSpec | None:
        """The layer's weights, for kernels that run whole decoders; None where those cannot run this one."""
        attention, mlp = self.attention, self.mlp
        if not isinstance(attention, PagedAttention) or not isinstance(mlp, GatedMLP):
            return None
        if self.attention_out_norm is not None or self.mlp_out_norm is not None or attention.softcap:
            return None
        if attention.sinks is not None:
            return None
        return LayerSpec(
            attention_norm=self.attention_norm.weight,
            qkv=attention.qkv.weight,
            q_norm=attention.q_norm,
            k_norm=attention.k_norm,
            output=attention.output.weight,
            mlp_norm=self.mlp_norm.weight,
            gate_up=mlp.gate_up.weight,
            down=mlp.down.weight,
            window=attention.window,
        )


LayerBuilder = Callable[[LayerLoader, ModelConfig, int, Tensor], DecoderLayer]
"""(loader, config, layer, cos_sin) → the layer."""


class DecoderModel:
    """A causal language model over a paged cache."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: TokenEmbedding,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        head: MergedLinear,
        *,
        program: DecoderProgram | None = None,
        weight_bytes: int,
        packed: bool,
    ) -> None:
        """At least one layer. program: the same decoder in one operation, where the kernels have it; it takes the
        layers' place. weight_bytes, packed: what the runner and the metrics say about the weights."""
        self.config = config
        self.weight_bytes = weight_bytes
        self.packed = packed
        self._program = program
        self._embedding = embedding
        self._below = list(layers[:-1])
        self._top = layers[-1]
        self._norm = norm
        self.head = head
        self.adapters: Adapters | None = None
        """what requests may add to the layers' matrices"""

    def forward(self, batch: ForwardBatch, kv: KVTensors) -> Tensor:
        """Run one step: write the step's keys and values into their slots and return float32 logits [R, vocab] of
        logit_rows."""
        if self._program is not None and batch.adapters is None:
            return self._program(
                batch.token_ids, batch.positions, batch.slots, batch.q_starts, batch.kv_lens, batch.page_table,
                batch.logit_rows, kv.keys, kv.values,
            )  # fmt: skip
        # Rows ascend, so as many rows as tokens means every row, in order: nothing to pick in a pure decode step
        return self.logits(self.hidden(batch, kv, every=batch.logit_rows.shape[0] == batch.num_tokens))

    def hidden(self, batch: ForwardBatch, kv: KVTensors, *, every: bool) -> Tensor:
        """The layers alone: write the step's keys and values and return the normalised rows [R, H] of logit_rows, where
        −1 stands for any row. every: the rows are the tokens, one by one."""
        if self.adapters is not None:
            self.adapters.begin(batch.adapters)
        residual = self._embedding(batch.token_ids)
        if self.config.embedding_scale != 1.0:
            residual *= self.config.embedding_scale
        x: Tensor | None = None
        for layer in self._below:
            x = layer(x, residual, batch, kv)
        if every or batch.adapters is not None:
            x = self._top(x, residual, batch, kv)
            if not every:  # adapters go by all rows of a step
                x, residual = x[batch.logit_rows], residual[batch.logit_rows]
        else:
            x, residual = self._top.last(x, residual, batch, kv, batch.logit_rows)
        return self._norm(x, residual)

    @property
    def attentions(self) -> list[PagedAttention]:
        """The attention of each layer that attends over keys and values of heads."""
        layers = (layer.attention for layer in (*self._below, self._top))
        return [one for one in layers if isinstance(one, PagedAttention)]

    def logits(self, hidden: Tensor) -> Tensor:
        """The head alone: float32 logits [R, vocab] of rows that `hidden` returned."""
        logits = self.head(hidden).to(torch.float32)
        if self.config.logit_scale != 1.0:
            logits *= self.config.logit_scale
        cap = self.config.logit_softcap
        return logits if cap == 0 else logits.div_(cap).tanh_().mul_(cap)


def load_norm(loader: LayerLoader, config: ModelConfig, name: str) -> RMSNorm:
    """The norm whose weight is `name`.weight."""
    return RMSNorm(loader.ops, loader.vector(f"{name}.weight", config.norm_offset), config.rms_eps)


def load_attention(loader: LayerLoader, config: ModelConfig, layer: int, cos_sin: Tensor) -> PagedAttention:
    """Attention as Llama has it, with biases and norms per head where the configuration says so."""
    prefix = f"model.layers.{layer}.self_attn."
    names = [f"{prefix}{name}_proj" for name in "qkv"]
    head = half_split_order(config.head_dim, config.turning)
    turns = config.turning < config.head_dim
    orders = [heads_order(head, n, n) for n in (config.num_heads, config.num_kv_heads)] if turns else [None, None]
    qkv = loader.linear(*names, bias=config.qkv_bias, orders=[*orders, None])
    output = loader.linear(f"{prefix}o_proj", bias=config.output_bias)
    if not config.qk_norm:
        return PagedAttention(loader.ops, config, layer, qkv, output, cos_sin)
    norms = (loader.vector(f"{prefix}{name}_norm.weight", config.norm_offset)[head] for name in "qk")
    return PagedAttention(loader.ops, config, layer, qkv, output, cos_sin, *norms)


def load_mlp(loader: LayerLoader, config: ModelConfig, layer: int) -> GatedMLP:
    """The gated MLP of gate_proj, up_proj and down_proj."""
    prefix = f"model.layers.{layer}.mlp."
    gate_up = loader.linear(f"{prefix}gate_proj", f"{prefix}up_proj", bias=config.mlp_bias)
    return GatedMLP(loader.ops, gate_up, loader.linear(f"{prefix}down_proj", bias=config.mlp_bias), config.activation)


def load_layer(
    loader: LayerLoader,
    config: ModelConfig,
    layer: int,
    cos_sin: Tensor,
    *,
    attention: AttentionLoader = load_attention,
    mlp: FeedForwardLoader = load_mlp,
) -> DecoderLayer:
    """A pre-norm layer as Llama has it, of this attention and this feed-forward block."""
    prefix = f"model.layers.{layer}."
    return DecoderLayer(
        load_norm(loader, config, f"{prefix}input_layernorm"),
        attention(loader, config, layer, cos_sin),
        load_norm(loader, config, f"{prefix}post_attention_layernorm"),
        mlp(loader, config, layer),
    )


def load_normed_layer(
    loader: LayerLoader,
    config: ModelConfig,
    layer: int,
    cos_sin: Tensor,
    *,
    attention: AttentionLoader = load_attention,
    mlp: FeedForwardLoader = load_mlp,
) -> DecoderLayer:
    """A layer that norms what goes into attention and MLP and what comes out of them, as Gemma has it."""
    prefix = f"model.layers.{layer}."
    return DecoderLayer(
        load_norm(loader, config, f"{prefix}input_layernorm"),
        attention(loader, config, layer, cos_sin),
        load_norm(loader, config, f"{prefix}pre_feedforward_layernorm"),
        mlp(loader, config, layer),
        attention_out_norm=load_norm(loader, config, f"{prefix}post_attention_layernorm"),
        mlp_out_norm=load_norm(loader, config, f"{prefix}post_feedforward_layernorm"),
    )


def load_decoder(
    loader: LayerLoader, config: ModelConfig, positions: int, *, layer: LayerBuilder = load_layer
) -> DecoderModel:
    """Build the model out of a checkpoint. positions: length of the rotary table, the longest context. Raises
    WeightsError."""
    tables = rotary_tables(config, positions, loader.device)
    embedding = TokenEmbedding(loader.ops, loader.linear("model.embed_tokens"))
    layers = [layer(loader, config, index, cos_sin) for index, cos_sin in enumerate(tables)]
    norm = load_norm(loader, config, "model.norm")
    head = embedding.table if config.tie_embeddings else loader.linear("lm_head")
    return DecoderModel(
        config,
        embedding,
        layers,
        norm,
        head,
        program=_program(loader, config, embedding, layers, norm, head, tables),
        weight_bytes=loader.weight_bytes,
        packed=loader.packed,
    )


def _program(
    loader: LayerLoader,
    config: ModelConfig,
    embedding: TokenEmbedding,
    layers: Sequence[DecoderLayer],
    norm: RMSNorm,
    head: MergedLinear,
    tables: Sequence[Tensor],
) -> DecoderProgram | None:
    """The decoder as one operation, where it is wanted and the kernels can run all of it."""
    specs = [spec for spec in (layer.spec() for layer in layers) if spec is not None]
    attention, mlp = layers[0].attention, layers[0].mlp
    scaled = config.embedding_scale != 1.0 or config.logit_scale != 1.0 or config.logit_softcap != 0.0
    rotated_alike = all(table is tables[0] for table in tables)
    if not loader.fused or not isinstance(loader.ops, DecoderOps):
        return None
    if scaled or not rotated_alike or len(specs) < len(layers):
        return None
    assert isinstance(attention, PagedAttention) and isinstance(mlp, GatedMLP)
    return loader.ops.decoder(
        DecoderSpec(
            embedding=embedding.table.weight,
            layers=specs,
            norm=norm.weight,
            head=head.weight,
            cos_sin=tables[0],
            num_q_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_eps,
            scale=attention.scale,
            activation=mlp.activation,
        )
    )
