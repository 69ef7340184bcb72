from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kernels
from engine.layers.linear import LayerLoader, MergedLinear
from engine.models.config import ModelConfig
from engine.weights.errors import WeightsError
from kernels.interface import BlockQuantized, WeightPart

OPS = kernels.table("cpu", "reference")


class Tensors:
    """A checkpoint that is a dictionary."""

    path = Path("memory")
    config: ModelConfig

    def __init__(self, **values: WeightPart) -> None:
        self._values = {name.replace("__", "."): value for name, value in values.items()}

    def get(self, name: str) -> WeightPart:
        if name not in self._values:
            raise WeightsError(f"memory: tensor {name!r} is missing")
        return self._values[name]


def test_merged_rows_come_out_in_order() -> None:
    first, second, x = torch.randn(3, 8), torch.randn(5, 8), torch.randn(2, 8)
    bias = torch.randn(8)
    layer = MergedLinear(OPS, [first, second], bias)
    torch.testing.assert_close(layer(x), torch.cat([x @ first.T, x @ second.T], dim=1) + bias)
    assert not layer.packed


def test_loader_stacks_matrices_and_biases_and_counts_bytes() -> None:
    a, b = torch.randn(3, 8, dtype=torch.bfloat16), torch.randn(5, 8, dtype=torch.float16)
    checkpoint = Tensors(
        a__weight=a, b__weight=b, a__bias=torch.ones(3), b__bias=torch.zeros(5), n__weight=torch.ones(8)
    )
    loader = LayerLoader(checkpoint, OPS, dtype=torch.float32, device="cpu")
    x = torch.randn(4, 8)
    expected = torch.cat([x @ a.float().T + 1, x @ b.float().T], dim=1)
    torch.testing.assert_close(loader.linear("a", "b", bias=True)(x), expected)
    assert loader.weight_bytes == 4 * (8 * 8 + 8)
    assert loader.vector("n.weight").dtype == torch.float32
    assert loader.weight_bytes == 4 * (8 * 8 + 8 + 8)
    assert not loader.packed
    with pytest.raises(WeightsError, match=r"'c\.weight' is missing"):
        loader.linear("c")


def test_blocks_stay_blocks() -> None:
    block = torch.zeros(2, 34, dtype=torch.uint8)
    block[:, 1] = 0x3C  # fp16 1.0
    block[:, 2:] = torch.arange(32, dtype=torch.uint8)
    loader = LayerLoader(Tensors(a__weight=BlockQuantized(block, "q8_0", 32)), OPS, dtype=torch.float32, device="cpu")
    layer = loader.linear("a")
    assert layer.packed and loader.packed
    x = torch.eye(32)
    torch.testing.assert_close(layer(x), torch.arange(32.0)[:, None].expand(32, 2))
