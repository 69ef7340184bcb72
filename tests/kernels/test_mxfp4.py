"""MXFP4 against the format's definition, spelt out bit by bit."""

from __future__ import annotations

import pytest
import torch

from kernels.mxfp4 import dequantize_mxfp4, e8m0_values


def value_of(code: int) -> float:
    """e2m1 by its fields: one bit of sign, two of exponent with bias 1, one of fraction, subnormal at exponent 0."""
    exponent, fraction = code >> 1 & 3, code & 1
    size = fraction * 0.5 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1)
    return -size if code & 8 else size


def test_every_code_under_every_scale() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(255, 1, 1)
    codes = codes | (codes.flip(-1) << 4)
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    values = dequantize_mxfp4(codes, scales)
    assert values.shape == (255, 32)
    for e in (0, 1, 100, 127, 128, 254):
        wanted = [[value_of(i) * 2.0 ** (e - 127), value_of(15 - i) * 2.0 ** (e - 127)] for i in range(16)]
        assert torch.equal(values[e], torch.tensor(wanted, dtype=torch.float64).float().flatten())


def test_experts_keep_their_order_and_what_does_not_fit_is_refused() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (3, 5, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 130, (3, 5, 2), dtype=torch.uint8, generator=generator)
    values = dequantize_mxfp4(codes, scales)
    assert values.shape == (3, 5, 64)
    assert values[2, 4, 33] == value_of(int(codes[2, 4, 1, 0]) >> 4) * 2.0 ** (int(scales[2, 4, 1]) - 127)
    assert e8m0_values(torch.tensor([255], dtype=torch.uint8)).isnan().all()
    with pytest.raises(ValueError, match=r"MXFP4 is uint8 \[\.\.\., B, 16\]"):
        dequantize_mxfp4(codes[..., :8], scales)
