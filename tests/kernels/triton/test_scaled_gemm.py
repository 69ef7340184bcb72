"""The GEMM of codes with scales in the interpreter against exact dequantisation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.blocks import dequantize
from kernels.interface import CodeFormat
from kernels.quantize import quantize_codes
from kernels.reference_scaled import dequantize_activations, quantize_activations
from kernels.triton.quantize_rows import quantize_rows
from kernels.triton.scaled_gemm import Plan, ScaledMatrix, block_k, plan, scaled_gemm
from tests.kernels.test_scaled import random_part

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2e-3}


@settings(max_examples=6)
@given(
    seed=st.integers(0, 99),
    rows=st.sampled_from([0, 1, 5, 16, 17]),
    n=st.sampled_from([1, 31, 40, 96]),
    k=st.sampled_from([32, 64, 96, 160, 200]),
    group=st.sampled_from([32, 64, 96, 1000]),
    kind=st.sampled_from(["int8", "int4", "fp8", "mxfp4"]),
    dtype=st.sampled_from(list(TOLERANCE)),
    zeros=st.booleans(),
    order=st.booleans(),
    biased=st.booleans(),
    split=st.sampled_from([1, 2, 4]),
)
def test_products_are_those_of_the_exact_values(
    seed: int, rows: int, n: int, k: int, group: int, kind: CodeFormat, dtype: torch.dtype, zeros: bool, order: bool,
    biased: bool, split: int,
) -> None:  # fmt: skip
    group = 32 if kind == "mxfp4" else min(group, k)
    k = -(-k // 32) * 32 if kind == "mxfp4" else k
    part = random_part(kind, n, k, group, zeros=zeros and kind in ("int8", "int4"), order=order, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator).to(dtype)
    bias = torch.randn(n, generator=generator) if biased else None
    weight = ScaledMatrix(part, bias)
    how = Plan(32, 16, block_k(kind, k, group), split if rows <= 16 else 1, 4, 1)
    mine = scaled_gemm(x, weight, chosen=how)
    values = dequantize(part).double()
    wanted = x.double() @ values.T + (0 if bias is None else bias.double())
    size = (x.double().abs() @ values.abs().T).clamp(min=1e-3) if rows else wanted
    assert mine.dtype == dtype and mine.shape == wanted.shape
    assert ((mine.double() - wanted).abs() <= TOLERANCE[dtype] * (wanted.abs() + 1e-3) + 1e-6 * size).all()


@pytest.mark.parametrize(("rows", "group"), [(3, 128), (20, 256)])
def test_8_bit_activations_meet_fp8_weights(rows: int, group: int) -> None:
    part = random_part("fp8", 33, 256, group)
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows))
    codes, scales = quantize_rows(x, group)
    wanted_codes, wanted_scales = quantize_activations(x, group)
    assert torch.equal(codes.view(torch.uint8), wanted_codes.view(torch.uint8)) and torch.equal(scales, wanted_scales)
    mine = scaled_gemm(codes, ScaledMatrix(part, None), x_scales=scales, out_type=torch.float32)
    wanted = dequantize_activations(codes, scales, group) @ dequantize(part).T
    torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)
    plain = x @ dequantize(part).T
    assert (mine - plain).norm() < 0.05 * plain.norm()


@settings(max_examples=3)
@given(
    rows=st.integers(0, 2),
    inputs=st.sampled_from([1, 33, 4100]),
    group=st.sampled_from([8, 5000]),
    power=st.integers(-20, 6),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_activations_are_rounded_as_defined(rows: int, inputs: int, group: int, power: int, dtype: torch.dtype) -> None:
    group = max(group, inputs // 8)
    x = (torch.randn(rows, inputs, generator=torch.Generator().manual_seed(inputs)) * 10.0**power).to(dtype)
    x[:, :1] = 0
    codes, scales = quantize_rows(x, group)
    wanted_codes, wanted_scales = quantize_activations(x, min(group, inputs))
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(codes.view(torch.uint8), wanted_codes.view(torch.uint8))


SLOW = pytest.mark.slow


@pytest.mark.parametrize("kind", ["int4", pytest.param("int8", marks=SLOW), pytest.param("mxfp4", marks=SLOW)])
def test_a_row_is_the_same_bits_whatever_is_beside_it(kind: CodeFormat, exact_rows: None) -> None:
    weight = ScaledMatrix(random_part(kind, 33, 64, 32), None)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    together = scaled_gemm(x, weight)
    for row in (0, 15):
        assert torch.equal(scaled_gemm(x[row : row + 1], weight)[0], together[row])
    many = scaled_gemm(torch.cat([x, x, x]), weight)
    alone = scaled_gemm(x[:1], weight, tall=True)
    assert torch.equal(many[0], alone[0]) and torch.equal(many[32], alone[0])


def test_plans_stay_within_groups_and_fill_the_device() -> None:
    for group in (32, 64, 96, 128, 4096):
        deep = block_k("int4", 4096, group)
        assert group % deep == 0 and deep >= 32
    assert plan("int4", 4096, 14336, 128, 132, tall=False).split == 4
    assert plan("int8", 128256, 4096, 4096, 132, tall=False).split == 1
    assert plan("fp8", 4096, 4096, 128, 132, tall=True).split == 1


def test_what_does_not_fit_is_refused() -> None:
    weight = ScaledMatrix(quantize_codes(torch.randn(8, 64), "int8"), None)
    with pytest.raises(ValueError, match=r"x must be \[M, 64\]"):
        scaled_gemm(torch.zeros(2, 32), weight)
    with pytest.raises(ValueError, match="8-bit activations"):
        scaled_gemm(torch.zeros(2, 64).to(torch.float8_e4m3fn), weight)
