"""Codes with scales behind the operations: joined, beside dense rows, as embeddings, in every setting."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.blocks import dequantize
from kernels.interface import ScaledWeight, WeightPart
from kernels.quantize import quantize_blocks
from kernels.triton.scaled_linear import PieceWeight
from kernels.triton.table import TritonOps
from tests.kernels.test_scaled import random_part


def parts_of_all_kinds() -> list[WeightPart]:
    g = torch.Generator().manual_seed(3)
    shuffled = random_part("int4", 7, 64, 32, zeros=True, order=True)
    return [
        random_part("int4", 6, 64, 32, zeros=True),
        random_part("int4", 5, 64, 32, zeros=True, seed=1),
        shuffled,
        replace(shuffled, order=shuffled.order.clone() if shuffled.order is not None else None),
        torch.randn(4, 64, generator=g),
        quantize_blocks(torch.randn(6, 64, generator=g), "q8_0"),
        random_part("int8", 9, 64, 64),
        random_part("int4", 3, 64, 16),
        random_part("mxfp4", 5, 64, 32),
        random_part("fp8", 5, 64, 64),
    ]


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_parts_of_all_kinds_in_one_weight(deterministic: bool) -> None:
    parts = parts_of_all_kinds()
    ops = TritonOps(deterministic=deterministic, activation_bits=16)
    values = torch.cat([dequantize(part) for part in parts])
    g = torch.Generator().manual_seed(4)
    x, bias = torch.randn(3, 64, generator=g), torch.randn(len(values), generator=g)
    weight = ops.pack(parts, bias)
    assert isinstance(weight, PieceWeight)
    # Neighbours are joined: two of int4, the two out of order, the dense ones, and the others by themselves
    assert [piece.out_features for piece in weight.pieces] == [11, 14, 10, 9, 3, 5, 5]
    assert (weight.in_features, weight.out_features) == (64, len(values))
    torch.testing.assert_close(ops.linear(x, weight), x @ values.T + bias, rtol=1e-5, atol=1e-4)
    ids = torch.tensor([0, 10, 12, 30, 40, 47, 50, len(values) - 1, -1, len(values)], dtype=torch.int32)
    wanted = torch.cat([values[ids[:-2].long()], torch.zeros(2, 64)])
    assert torch.equal(ops.embed(ids, weight), wanted)


def test_activations_meet_fp8_in_8_or_16_bits() -> None:
    part = random_part("fp8", 40, 128, 128)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(4))
    wanted = x @ dequantize(part).T
    found = {}
    for bits in (8, 16):
        ops = TritonOps(activation_bits=bits)
        error = (ops.linear(x, ops.pack([part])) - wanted).norm() / wanted.norm()
        found[bits] = float(error)
    assert found[16] < 1e-6 and 1e-3 < found[8] < 0.05


def test_rows_come_in_the_type_of_the_model() -> None:
    ops = TritonOps()
    part: ScaledWeight = random_part("int8", 9, 64, 64).to("cpu", torch.bfloat16)
    rows = ops.embed(torch.tensor([1, 2], dtype=torch.int32), ops.pack([part]))
    assert rows.dtype == torch.bfloat16
    torch.testing.assert_close(rows.float(), dequantize(part)[1:3], rtol=2.0**-8, atol=0)


def test_bytes_are_those_of_the_codes() -> None:
    ops = TritonOps()
    part = random_part("int4", 64, 128, 128, zeros=True)
    weight = ops.pack([part])
    assert weight.nbytes == 64 * (128 // 2 + 4 + 1)
    with pytest.raises(ValueError, match=r"linear needs x of \[T, 128\]"):
        ops.linear(torch.zeros(2, 64), weight)
