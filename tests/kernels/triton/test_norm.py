"""RMSNorm in the interpreter against its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.triton.norm import plan, rms_norm, rms_norm_quantized

# The interpreter cuts bfloat16 off where a GPU rounds: up to a unit in the last place, at each of two roundings
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-6, torch.float16: 1e-3}


def rows(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 999),
    count=st.integers(0, 5),
    width=st.sampled_from([1, 2, 63, 64, 65, 100, 576]),
    dtype=st.sampled_from(list(TOLERANCE)),
    residual=st.booleans(),
    heads=st.booleans(),
)
def test_rows_are_normalised_as_defined(
    seed: int, count: int, width: int, dtype: torch.dtype, residual: bool, heads: bool
) -> None:
    shape = (count, 2, width) if heads else (count, width)
    x, weight = rows(seed, shape, dtype), rows(seed + 1, (width,), dtype)
    mine = rows(seed + 2, shape, dtype) if residual else None
    theirs = None if mine is None else mine.clone()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-6, mine), reference.rms_norm(x, weight, 1e-6, theirs), rtol=tolerance, atol=tolerance
    )
    if mine is not None and theirs is not None:
        torch.testing.assert_close(mine, theirs, rtol=2.0**-7 if dtype == torch.bfloat16 else 0, atol=0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("residual", [False, True])
def test_quantised_rows_stand_for_the_normalised_ones(dtype: torch.dtype, residual: bool) -> None:
    x, weight = rows(3, (5, 100), torch.float32), rows(4, (100,), torch.float32)
    x[2] = 0
    streams = [rows(5, (5, 100), torch.float32) if residual else None for _ in range(2)]
    values, scales = rms_norm_quantized(x, weight, 1e-6, dtype, streams[0])
    wanted, wanted_scales = reference.rms_norm_quantized(x, weight, 1e-6, dtype, streams[1])
    torch.testing.assert_close(scales, wanted_scales, rtol=1e-5, atol=0)
    difference = (values.float() - wanted.float()).abs()
    # A value on the edge between two steps may round to either
    step = 1.0 if dtype == torch.int8 else wanted.float().abs() / 8 + 2**-9
    assert (difference <= step).all()
    assert (difference > 0).float().mean() < 0.02


def test_what_does_not_fit_is_refused() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="does not fit"):
        rms_norm(x, torch.zeros(7), 1e-6)
    with pytest.raises(ValueError, match="contiguous"):
        rms_norm(x, torch.zeros(8), 1e-6, torch.zeros(8, 2).T)
    with pytest.raises(ValueError, match="quantised to"):
        rms_norm_quantized(x, torch.zeros(8), 1e-6, torch.int16)
    with pytest.raises(ValueError, match="1 to 16384"):
        plan(16385)


@pytest.mark.slow
@pytest.mark.parametrize("width", [896, 2048, 3072, 4096, 5120, 8192, 16384])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_widths_of_known_models(width: int, dtype: torch.dtype) -> None:
    x, weight, stream = (rows(seed, (3, width), dtype) for seed in range(3))
    other, tolerance = stream.clone(), TOLERANCE[dtype]
    mine, wanted = rms_norm(x, weight[0], 1e-5, stream), reference.rms_norm(x, weight[0], 1e-5, other)
    torch.testing.assert_close(mine, wanted, rtol=tolerance, atol=tolerance)
