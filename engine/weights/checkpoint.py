"""Checkpoint: named tensors and the configuration of a model, whatever file format they lie in."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from engine.models.config import ModelConfig, Shapes
from engine.weights.errors import WeightsError
from engine.weights.sources import ModelSource
from kernels.interface import WeightPart


class Checkpoint(Protocol):
    """An opened model whose configuration and table of tensors have been checked; tensors are read on demand."""

    path: Path
    config: ModelConfig
    quantized: str
    """How its matrices are quantised, in a word; empty where they are dense"""

    def get(self, name: str) -> WeightPart:
        """Return a tensor under its Hugging Face name: a float tensor as stored, or rows of quantised blocks or codes.
        Raises WeightsError."""
        ...


def open_checkpoint(source: ModelSource, *, packed: bool, codes: bool) -> Checkpoint:
    """Open a model and check everything that its headers tell: dimensions, tensors, shapes, sizes, formats. Raises
    WeightsError.

    packed: leave GGUF's quantised matrices in their blocks, codes: leave other quantised matrices as codes with scales,
    where kernels can run them; otherwise they come out as float32.
    """
    if source.kind == "gguf":
        from engine.weights.gguf import GGUFCheckpoint

        return GGUFCheckpoint(source.path, packed=packed)
    from engine.weights.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(source.path, codes=codes)


def check_shapes(file: Path, needed: Shapes, found: Shapes) -> None:
    """Raise WeightsError unless every tensor that is needed is there with the right shape."""
    for name, expected in needed.items():
        shape = found.get(name)
        if shape is None:
            raise WeightsError(f"{file}: tensor {name!r} is missing")
        if shape != expected:
            raise WeightsError(f"{file}: tensor {name!r} has shape {list(shape)}, should be {list(expected)}")
