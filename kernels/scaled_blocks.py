"""Codes with scales as GGUF's blocks of 32, which is what the native CPU operations multiply.

Exact but for the rounding of scales (and of zero · scale) to float16: int8 without zeros → q8_0; int4 → q4_0, with
zeros q4_1; mxfp4 → q8_0, where powers of two need no rounding at all. Close, within 1/254 of a block's largest value:
fp8, int8 with zeros, and codes whose inputs are out of order or whose groups are no multiple of 32, all requantised to
q8_0. Inputs that are no multiple of 32, and scales over float16's range, become dense float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.interface import BlockFormat, BlockQuantized, ScaledWeight
from kernels.quantize import BLOCK, quantize_blocks
from kernels.scaled import centred, check_scaled, dequantize_scaled, nibbles, scales_of

_HALF_MAX = 65_504.0


def to_blocks(part: ScaledWeight) -> BlockQuantized | Tensor:
    """The part in the format that loses least at its size; float32 [N, K] where no block format takes it."""
    check_scaled(part)
    inputs, scales = part.in_features, scales_of(part)
    if inputs % BLOCK or not bool((scales.abs() < _HALF_MAX / BLOCK).all()):
        return dequantize_scaled(part)
    if part.order is not None or (part.group % BLOCK and part.group < inputs):
        return quantize_blocks(dequantize_scaled(part), "q8_0")
    if part.format == "int4":
        return _four_bits(part, _per_block(scales, part))
    if part.format == "mxfp4":
        return _blocks("q8_0", [_half(_per_block(scales, part) / 2)], _bytes_of(centred(part) * 2), inputs)
    if part.format == "int8" and (part.zeros is None or not bool(part.zeros.any())):
        return _blocks("q8_0", [_half(_per_block(scales, part))], _bytes_of(part.codes), inputs)
    return quantize_blocks(dequantize_scaled(part), "q8_0")


def _four_bits(part: ScaledWeight, scales: Tensor) -> BlockQuantized:
    codes = nibbles(part.codes).reshape(part.out_features, -1, BLOCK)
    halves = codes[..., :16] | (codes[..., 16:] << 4)
    if part.zeros is None:
        return _blocks("q4_0", [_half(scales)], halves, part.in_features)
    least = -_per_block(part.zeros.to(torch.float32), part) * scales
    return _blocks("q4_1", [_half(scales), _half(least)], halves, part.in_features)


def _per_block(groups: Tensor, part: ScaledWeight) -> Tensor:
    """[N, groups] → [N, K/32]."""
    blocks = part.in_features // BLOCK
    return groups.repeat_interleave(min(part.group, part.in_features) // BLOCK, dim=1)[:, :blocks]


def _bytes_of(codes: Tensor) -> Tensor:
    return codes.to(torch.int8).view(torch.uint8).reshape(codes.shape[0], -1, BLOCK)


def _half(values: Tensor) -> Tensor:
    """float32 [N, B] → the bytes of float16, uint8 [N, B, 2]."""
    return values.to(torch.float16)[..., None].view(torch.uint8)


def _blocks(format: BlockFormat, header: list[Tensor], codes: Tensor, inputs: int) -> BlockQuantized:
    return BlockQuantized(torch.cat([*header, codes], dim=2).reshape(codes.shape[0], -1), format, inputs)
