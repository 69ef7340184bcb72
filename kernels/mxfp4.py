"""MXFP4: four-bit floats in blocks of 32 under a shared power of two, in plain torch.

An element is e2m1: a sign, 0, 0.5, 1, 1.5, 2, 3, 4 or 6. A block's scale is e8m0: byte e stands for 2^(e − 127). Two
elements share a byte, the first one in its low half. Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

MX_BLOCK = 32
"""Elements under one scale."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each code."""


def dequantize_mxfp4(codes: Tensor, scales: Tensor) -> Tensor:
    """Exactly the values of packed blocks: uint8 [..., B, 16] with scales uint8 [..., B] → float32 [..., 32·B].

    gpt-oss stores its experts so, `…_blocks` and `…_scales` [E, N, K/32(, 16)]: the result is [E, N, K], outputs before
    inputs, as every other weight here. Raises ValueError for shapes or types that do not fit.
    """
    if codes.dtype != torch.uint8 or scales.dtype != torch.uint8 or codes.shape != (*scales.shape, MX_BLOCK // 2):
        raise ValueError(
            f"MXFP4 is uint8 [..., B, {MX_BLOCK // 2}] with scales uint8 [..., B], not {codes.dtype}"
            f" {list(codes.shape)} with {scales.dtype} {list(scales.shape)}"
        )
    values = e2m1_values(codes) * e8m0_values(scales)[..., None]
    return values.reshape(*scales.shape[:-1], -1)


def e2m1_values(packed: Tensor) -> Tensor:
    """Two values of each byte, the low half first: uint8 [..., P] → float32 [..., 2·P]."""
    table = torch.tensor(E2M1, device=packed.device)
    pairs = torch.stack([packed & 15, packed >> 4], dim=-1).reshape(*packed.shape[:-1], -1)
    return table[pairs.to(torch.int32)]


def e8m0_values(exponents: Tensor) -> Tensor:
    """2^(e − 127) of each byte, float32; 255, which stands for no number, is NaN."""
    # The exponent's field of a float32; 2^-127 itself is a subnormal number
    bits = torch.where(exponents == 0, 1 << 22, exponents.to(torch.int32) << 23)
    return torch.where(exponents == 255, torch.nan, bits.view(torch.float32))
