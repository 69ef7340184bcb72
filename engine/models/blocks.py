"""The decoder that every supported family is: pre-norm layers of paged attention and a gated MLP on a residual
stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.batch import ForwardBatch, KVTensors
from engine.layers.attention import PagedAttention
from engine.layers.embedding import TokenEmbedding
from engine.layers.linear import LayerLoader, MergedLinear
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.rotary import rotary_table
from engine.models.config import ModelConfig
from kernels.decoder import DecoderOps, DecoderProgram, DecoderSpec, LayerSpec

AttentionLoader = Callable[[LayerLoader, ModelConfig, int, Tensor], PagedAttention]
"""(loader, config, layer, cos_sin) → the layer's attention: what families differ in."""


class DecoderLayer:
    """Attention and MLP, each behind a norm; both add to the residual stream, the MLP's output at the next layer's
    norm."""

    __slots__ = ("attention", "attention_norm", "mlp", "mlp_norm")

    def __init__(self, attention_norm: RMSNorm, attention: PagedAttention, mlp_norm: RMSNorm, mlp: GatedMLP) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, kv: KVTensors) -> Tensor:
        """x [T, H]: output of the layer below (None at the first), not yet in residual [T, H]. Returns this layer's
        output."""
        hidden = self.attention_norm(residual) if x is None else self.attention_norm(x, residual)
        return self.mlp(self.mlp_norm(self.attention(hidden, batch, kv), residual))

    def last(
        self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, kv: KVTensors, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same for the top layer, where only `rows` int64 [R] matter after attention. Returns output and residual,
        [R, H]."""
        hidden = self.attention_norm(residual) if x is None else self.attention_norm(x, residual)
        mixed = self.attention(hidden, batch, kv, rows)
        residual = residual[rows]
        return self.mlp(self.mlp_norm(mixed, residual)), residual

    def spec(self) -> LayerSpec:
        """The layer's weights, for kernels that run whole decoders."""
        return LayerSpec(
            attention_norm=self.attention_norm.weight,
            qkv=self.attention.qkv.weight,
            q_norm=self.attention.q_norm,
            k_norm=self.attention.k_norm,
            output=self.attention.output.weight,
            mlp_norm=self.mlp_norm.weight,
            gate_up=self.mlp.gate_up.weight,
            down=self.mlp.down.weight,
            window=self.attention.window,
        )


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
        self._head = head

    def forward(self, batch: ForwardBatch, kv: KVTensors) -> Tensor:
        """Run one step: write the step's keys and values into their slots and return float32 logits [R, vocab] of
        logit_rows."""
        if self._program is not None:
            return self._program(
                batch.token_ids, batch.positions, batch.slots, batch.q_starts, batch.kv_lens, batch.page_table,
                batch.logit_rows, kv.keys, kv.values,
            )  # fmt: skip
        # Rows ascend, so as many rows as tokens means every row, in order: nothing to pick in a pure decode step
        return self.logits(self.hidden(batch, kv, every=batch.logit_rows.shape[0] == batch.num_tokens))

    def hidden(self, batch: ForwardBatch, kv: KVTensors, *, every: bool) -> Tensor:
        """The layers alone: write the step's keys and values and return the normalised rows [R, H] of logit_rows, where
        −1 stands for any row. every: the rows are the tokens, one by one."""
        residual = self._embedding(batch.token_ids)
        x: Tensor | None = None
        for layer in self._below:
            x = layer(x, residual, batch, kv)
        if every:
            x = self._top(x, residual, batch, kv)
        else:
            x, residual = self._top.last(x, residual, batch, kv, batch.logit_rows)
        return self._norm(x, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """The head alone: float32 logits [R, vocab] of rows that `hidden` returned."""
        return self._head(hidden).to(torch.float32)


def load_attention(loader: LayerLoader, config: ModelConfig, layer: int, cos_sin: Tensor) -> PagedAttention:
    """Attention as Llama has it, with biases where the configuration says so."""
    prefix = f"model.layers.{layer}.self_attn."
    qkv = loader.linear(*(f"{prefix}{name}_proj" for name in "qkv"), bias=config.qkv_bias)
    output = loader.linear(f"{prefix}o_proj", bias=config.output_bias)
    return PagedAttention(loader.ops, config, layer, qkv, output, cos_sin)


def load_decoder(
    loader: LayerLoader, config: ModelConfig, *, positions: int, attention: AttentionLoader = load_attention
) -> DecoderModel:
    """Build the model out of a checkpoint. positions: length of the rotary table, the longest context. Raises
    WeightsError."""
    ops, cos_sin = loader.ops, rotary_table(config, positions, loader.device)

    def norm(name: str) -> RMSNorm:
        return RMSNorm(ops, loader.vector(f"{name}.weight"), config.rms_eps)

    def layer(index: int) -> DecoderLayer:
        prefix = f"model.layers.{index}."
        mlp = GatedMLP(
            ops,
            loader.linear(f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj", bias=config.mlp_bias),
            loader.linear(f"{prefix}mlp.down_proj", bias=config.mlp_bias),
            config.activation,
        )
        return DecoderLayer(
            norm(f"{prefix}input_layernorm"),
            attention(loader, config, index, cos_sin),
            norm(f"{prefix}post_attention_layernorm"),
            mlp,
        )

    embedding = TokenEmbedding(ops, loader.linear("model.embed_tokens"))
    layers = [layer(index) for index in range(config.num_layers)]
    final = norm("model.norm")
    head = embedding.table if config.tie_embeddings else loader.linear("lm_head")
    program = None
    if loader.fused and isinstance(ops, DecoderOps):
        program = ops.decoder(
            DecoderSpec(
                embedding=embedding.table.weight,
                layers=[layer.spec() for layer in layers],
                norm=final.weight,
                head=head.weight,
                cos_sin=cos_sin,
                num_q_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                eps=config.rms_eps,
                scale=layers[0].attention.scale,
                activation=layers[0].mlp.activation,
            )
        )
    return DecoderModel(
        config,
        embedding,
        layers,
        final,
        head,
        program=program,
        weight_bytes=loader.weight_bytes,
        packed=loader.packed,
    )
