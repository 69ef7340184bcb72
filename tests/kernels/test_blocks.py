from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize
from gguf.quants import quantize
from hypothesis import given
from hypothesis import strategies as st

from kernels.blocks import BLOCK_BYTES
from kernels.blocks import dequantize as ours
from kernels.interface import BlockQuantized


@given(st.sampled_from(["q4_0", "q4_1", "q8_0"]), st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 5))
def test_values_equal_those_of_the_gguf_package(kind: str, seed: int, rows: int, blocks: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, 32 * blocks), dtype=np.float32) * np.float32(10.0 ** rng.integers(-3, 4))
    data = quantize(values, GGMLQuantizationType[kind.upper()])
    mine = ours(BlockQuantized(torch.from_numpy(data), kind, 32 * blocks))  # type: ignore[arg-type]
    assert np.array_equal(mine.numpy(), dequantize(data, GGMLQuantizationType[kind.upper()]))


def test_all_byte_patterns_of_quants_are_understood() -> None:
    block = torch.zeros(8, BLOCK_BYTES["q8_0"], dtype=torch.uint8)
    block[:, 0:2] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)
    block[:, 2:] = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    values = ours(BlockQuantized(block, "q8_0", 32)).flatten()
    assert values.tolist() == [*range(128), *range(-128, 0)]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (BlockQuantized(torch.zeros(2, 20, dtype=torch.uint8), "q4_0", 32), r"\[N, 18\]"),
        (BlockQuantized(torch.zeros(2, 18, dtype=torch.int8), "q4_0", 32), "uint8"),
        (BlockQuantized(torch.zeros(2, 18, dtype=torch.uint8), "q4_0", 33), "multiple of 32"),
        (BlockQuantized(torch.zeros(2, 18, dtype=torch.uint8), "q9_9", 32), "unknown block format"),  # type: ignore[arg-type]
        (torch.zeros(2, 32, dtype=torch.float64), "float32, bfloat16 or float16"),
        (torch.zeros(32), r"\[N, K\]"),
    ],
)
def test_parts_that_do_not_fit_their_format_are_refused(part: BlockQuantized, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ours(part)
