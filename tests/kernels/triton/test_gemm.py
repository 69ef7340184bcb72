"""The skinny GEMM in the interpreter against torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.triton.gemm import Plan, plan, skinny_gemm

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2e-3}


@settings(max_examples=12)
@given(
    seed=st.integers(0, 99),
    rows=st.integers(0, 16),
    n=st.sampled_from([1, 31, 40, 96]),
    k=st.sampled_from([1, 30, 64, 100, 130]),
    dtype=st.sampled_from(list(TOLERANCE)),
    biased=st.booleans(),
    split=st.sampled_from([1, 2, 4]),
)
def test_products_are_torchs(
    seed: int, rows: int, n: int, k: int, dtype: torch.dtype, biased: bool, split: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(size, k, generator=generator).to(dtype) for size in (rows, n))
    bias = torch.randn(n, generator=generator) if biased else None
    wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    mine = skinny_gemm(x, weight, bias, chosen=Plan(32, 32, split))
    assert mine.dtype == dtype
    torch.testing.assert_close(mine.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 4)


@pytest.mark.parametrize("split", [1, 4])
def test_a_row_is_the_same_bits_whatever_is_beside_it(split: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(16, 200, generator=generator), torch.randn(70, 200, generator=generator)
    together = skinny_gemm(x, weight, chosen=Plan(32, 32, split))
    for row in (0, 7, 15):
        assert torch.equal(skinny_gemm(x[row : row + 1], weight, chosen=Plan(32, 32, split))[0], together[row])


def test_the_plan_fills_the_device_and_keeps_parts_deep() -> None:
    assert plan(128256, 4096, 132).split == 1
    assert plan(4096, 14336, 132) == Plan(32, 128, 4)
    for n, k in ((1, 64), (64, 8192), (4096, 4096), (28672, 8192)):
        how = plan(n, k, 132)
        assert how.split == 1 or k // how.split >= 4 * how.block_k


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="up to 16 rows"):
        skinny_gemm(torch.zeros(17, 4), torch.zeros(3, 4))
    with pytest.raises(ValueError, match="of one type"):
        skinny_gemm(torch.zeros(1, 4), torch.zeros(3, 4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="bias"):
        skinny_gemm(torch.zeros(1, 4), torch.zeros(3, 4), torch.zeros(4))
