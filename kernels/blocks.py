"""What weight parts stand for, in plain torch: checks and exact dequantisation of every format, and the sizes of GGUF's
blocks in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.interface import FLOAT_TYPES, BlockQuantized, ScaledWeight, WeightPart
from kernels.scaled import check_scaled, dequantize_scaled

BLOCK = 32
"""Elements of one block, along the input dimension."""

BLOCK_BYTES = {"q4_0": 18, "q4_1": 20, "q8_0": 34}
"""Bytes of one block in the file, scales included."""


def check_part(part: WeightPart) -> None:
    """Raise ValueError when a weight part's dtype, shape or bytes per row do not fit its format."""
    if isinstance(part, BlockQuantized):
        if part.format not in BLOCK_BYTES:
            raise ValueError(f"unknown block format {part.format!r}; known: {', '.join(BLOCK_BYTES)}")
        if part.in_features <= 0 or part.in_features % BLOCK:
            raise ValueError(f"block formats need a positive multiple of {BLOCK} inputs, not {part.in_features}")
        row_bytes = part.in_features // BLOCK * BLOCK_BYTES[part.format]
        if part.data.dtype != torch.uint8 or part.data.dim() != 2 or part.data.shape[1] != row_bytes:
            raise ValueError(
                f"{part.format} rows of {part.in_features} inputs are uint8 [N, {row_bytes}], "
                f"not {part.data.dtype} {list(part.data.shape)}"
            )
    elif isinstance(part, ScaledWeight):
        check_scaled(part)
    elif part.dim() != 2 or part.dtype not in FLOAT_TYPES:
        raise ValueError(f"a weight is [N, K] in float32, bfloat16 or float16, not {part.dtype} {list(part.shape)}")


def in_features(part: WeightPart) -> int:
    """K of a part."""
    return int(part.shape[1]) if isinstance(part, Tensor) else part.in_features


def dequantize(part: WeightPart) -> Tensor:
    """Return the part as float32 [N, K]: exactly the values that its codes stand for, rounded once to float32."""
    check_part(part)
    if isinstance(part, Tensor):
        return part.to(torch.float32)
    if isinstance(part, ScaledWeight):
        return dequantize_scaled(part)
    rows, blocks = part.out_features, part.in_features // BLOCK
    raw = part.data.reshape(rows, blocks, BLOCK_BYTES[part.format])
    d = _half(raw[..., 0:2])
    if part.format == "q8_0":
        values = raw[..., 2:].contiguous().view(torch.int8).to(torch.float32) * d
    elif part.format == "q4_0":
        values = (_nibbles(raw[..., 2:]) - 8.0) * d
    else:
        values = _nibbles(raw[..., 4:]) * d + _half(raw[..., 2:4])
    return values.reshape(rows, part.in_features)


def _half(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16).to(torch.float32)


def _nibbles(raw: Tensor) -> Tensor:
    return torch.cat([raw & 15, raw >> 4], dim=-1).to(torch.float32)
