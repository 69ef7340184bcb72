"""Picks the family of a checkpoint and loads it. Families are imported only when needed."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from engine.batch import ForwardBatch, KVTensors
from engine.config import EngineConfig
from engine.distributed import Shard, ShardLoader
from engine.embedding import Embedder
from engine.layers.linear import LayerLoader
from engine.lora import Adapters, named
from engine.models.blocks import DecoderModel
from engine.models.config import ModelConfig
from engine.models.family import find_family, is_headless
from engine.weights.checkpoint import open_checkpoint
from engine.weights.errors import WeightsError
from engine.weights.pooling import DEFAULT, Embedding, read_embedding
from engine.weights.quantize import quantizer
from engine.weights.sources import ModelSource
from kernels.interface import Ops

_MAX_POSITIONS = 1 << 20
"""Longest rotary table that is built: with heads of 128 it takes 512 MiB."""

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CausalLM(Protocol):
    """A loaded model."""

    config: ModelConfig
    weight_bytes: int
    """Bytes of weights held, a tied matrix once."""
    packed: bool
    """True when matrices run in quantised blocks."""

    def forward(self, batch: ForwardBatch, kv: KVTensors) -> Tensor:
        """Write the step's keys and values into kv and return float32 logits [R, vocab] of batch.logit_rows."""
        ...


def load_model(source: ModelSource, config: EngineConfig, ops: Ops, shard: Shard | None = None) -> CausalLM:
    """Load a model for one device, or one rank's part of it. Raises WeightsError, naming file and tensor or field,
    before any tensor is read where it can.

    dtype "auto" leaves quantised matrices as they are and computes in float32 on a CPU; on a GPU GGUF's blocks become
    dense, and dense weights and activations take the checkpoint's own type. Any other dtype makes every weight dense in
    that type (activations stay float32 on CPUs). Then dense matrices are quantised, where `quantize` says so.
    """
    device = config.device if config.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    auto = config.dtype == "auto"
    checkpoint = open_checkpoint(source, packed=auto and device == "cpu", codes=auto)
    model = checkpoint.config
    how = _embedding(source, config, model)
    if how is not None and (config.max_loras or config.lora):
        raise WeightsError(f"{checkpoint.path}: lora, max_loras: a model that embeds takes no adapters")
    wanted = ("float32" if device == "cpu" else model.torch_dtype) if auto else config.dtype
    if config.quantize != "none" and auto and checkpoint.quantized:
        raise WeightsError(
            f"{checkpoint.path}: quantize {config.quantize!r}: the checkpoint is quantised already"
            f" ({checkpoint.quantized}); leave quantize out to run it as it is, or set dtype to make it dense first"
        )
    make = LayerLoader if shard is None else partial(ShardLoader, shard)
    loader = make(
        checkpoint,
        ops,
        dtype=_TYPES.get(wanted, torch.float32),
        device=device,
        fused=config.fused_steps and how is None and shard is None,
        quantize=quantizer(config.quantize, ops, device),
    )
    positions = min(model.max_position, config.max_context or _MAX_POSITIONS, _MAX_POSITIONS)
    # What the loaded model says it can do is what its rotary table covers
    served = dataclasses.replace(model, max_position=positions)
    if shard is not None:
        served = shard.config_of(served, checkpoint.path)
    loaded = find_family(model.architecture, checkpoint.path).load(loader, served, positions)
    if config.max_loras or config.lora:
        _take_adapters(loaded, loader, config, checkpoint.path)
    return loaded if how is None else Embedder(loaded, how)


def _take_adapters(model: CausalLM, loader: LayerLoader, config: EngineConfig, path: Path) -> None:
    """Make places for adapters, and load those that are named. Raises WeightsError."""
    if not isinstance(model, DecoderModel):
        raise WeightsError(f"{path}: lora, max_loras: adapters of {model.config.architecture} are not served")
    model.adapters = Adapters(
        loader.ops,
        [placed for placed in loader.linears if placed[1][0].name.startswith("model.layers.")],
        slots=max(config.max_loras, len(config.lora)),
        rank=config.max_lora_rank,
        dtype=torch.float32 if loader.device == "cpu" else loader.dtype,
        device=loader.device,
        deterministic=config.deterministic,
    )
    if loader.device != "cpu" or config.graphs == "on":
        model.adapters.pad()
    for name, folder in named(config.lora).items():
        model.adapters.load(name, Path(folder))


def _embedding(source: ModelSource, config: EngineConfig, model: ModelConfig) -> Embedding | None:
    """How texts are embedded, where that is the task. Raises WeightsError."""
    if config.task == "generate":
        if is_headless(model.architecture):
            raise WeightsError(f"{source.path}: {model.architecture} has no head: it embeds and does not generate")
        return None
    found = read_embedding(source)
    return found or (DEFAULT if config.task == "embed" or is_headless(model.architecture) else None)
