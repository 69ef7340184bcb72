"""Float matrices into fewer bytes, in plain torch: GGUF's blocks for CPUs, codes with scales for GPUs.

Four-bit codes are fitted in two rounds: the range of a block or group gives the first codes, least squares the scale
and minimum that suit those codes best, and these the final codes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.interface import BlockFormat, BlockQuantized, CodeFormat, ScaledWeight
from kernels.scaled import pack_nibbles

BLOCK = 32
INT4_GROUPS = (128, 64, BLOCK)
"""Inputs under one scale of int4 codes: the first of these that divides them."""
E4M3_MAX = 448.0
_HALF_MAX = 65_504.0
_CHUNK = 1 << 24
"""Elements that are quantised at a time: bounds the memory for intermediate results"""


def quantize_blocks(matrix: Tensor, format: BlockFormat) -> BlockQuantized:
    """A float matrix [N, K], K a multiple of 32, in blocks. Raises ValueError for another K."""
    inputs = matrix.shape[1]
    if inputs % BLOCK:
        raise ValueError(f"block formats need a multiple of {BLOCK} inputs, not {inputs}")
    encode = {"q8_0": _q8_0, "q4_0": _q4_0, "q4_1": _q4_1}[format]

    def blocks(piece: Tensor) -> Tensor:
        return encode(piece.to(torch.float32).reshape(piece.shape[0], -1, BLOCK)).reshape(piece.shape[0], -1)

    return BlockQuantized(_in_pieces(matrix, blocks), format, inputs)


def quantize_codes(matrix: Tensor, format: CodeFormat) -> ScaledWeight:
    """A float matrix [N, K] as codes: int8 and fp8 under a scale for each row, int4 under a scale and a zero for each
    group of INT4_GROUPS. Raises ValueError for mxfp4, or an odd K with int4."""
    if format == "int8":
        scales = _in_pieces(matrix, lambda piece: _largest(piece) / 127.0)
        codes = _in_pieces(matrix, lambda piece: _steps(piece, 127.0).round().to(torch.int8))
        return ScaledWeight(codes, scales, "int8", matrix.shape[1], matrix.shape[1], dtype=matrix.dtype)
    if format == "fp8":
        scales = _in_pieces(matrix, lambda piece: _largest(piece) / E4M3_MAX)
        codes = _in_pieces(matrix, lambda piece: _steps(piece, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8))
        codes = codes.view(torch.float8_e4m3fn)
        return ScaledWeight(codes, scales, "fp8", matrix.shape[1], matrix.shape[1], dtype=matrix.dtype)
    if format != "int4":
        raise ValueError(f"matrices are not quantised to {format!r}")
    return _int4(matrix)


def _in_pieces(matrix: Tensor, encode: Callable[[Tensor], Tensor]) -> Tensor:
    """encode of a few rows at a time, joined."""
    rows = max(1, _CHUNK // matrix.shape[1])
    return torch.cat([encode(matrix[first : first + rows]) for first in range(0, matrix.shape[0], rows)])


def _largest(rows: Tensor) -> Tensor:
    """float32 [N, 1], at least 1e-12: a row of zeros has a scale, too."""
    return rows.to(torch.float32).abs().amax(dim=1, keepdim=True).clamp(min=1e-12)


def _steps(rows: Tensor, most: float) -> Tensor:
    return (rows.to(torch.float32) / (_largest(rows) / most)).clamp(-most, most)


def _half(values: Tensor) -> Tensor:
    """Rounded to float16, as float32."""
    return values.clamp(-_HALF_MAX, _HALF_MAX).to(torch.float16).to(torch.float32)


def _bytes(values: Tensor) -> Tensor:
    """float32 [N, B, 1] → the bytes of float16, uint8 [N, B, 2]."""
    return values.to(torch.float16).contiguous().view(torch.uint8)


def _codes(x: Tensor, scale: Tensor, least: Tensor | float = 0.0) -> Tensor:
    """The nearest whole numbers of (x − least) / scale, 0 where the scale is."""
    return torch.where(scale == 0, 0.0, ((x - least) / scale).round())


def _q8_0(x: Tensor) -> Tensor:
    scale = _half(x.abs().amax(dim=2, keepdim=True) / 127.0)
    codes = _codes(x, scale).clamp(-127, 127).to(torch.int8)
    return torch.cat([_bytes(scale), codes.view(torch.uint8)], dim=2)


def _halves(codes: Tensor) -> Tensor:
    """GGUF's order: byte j holds codes j and j + 16 of its block."""
    codes = codes.to(torch.uint8)
    return codes[..., :16] | (codes[..., 16:] << 4)


def _q4_0(x: Tensor) -> Tensor:
    """The number of largest magnitude becomes code 0, which stands for −8; then the scale that fits best."""
    low, high = x.amin(dim=2, keepdim=True), x.amax(dim=2, keepdim=True)
    scale = torch.where(-low > high, low, high) / -8.0
    codes = _codes(x, scale).clamp(-8, 7)
    scale = _half((x * codes).sum(2, keepdim=True) / (codes * codes).sum(2, keepdim=True).clamp(min=1.0))
    return torch.cat([_bytes(scale), _halves(_codes(x, scale).clamp(-8, 7) + 8)], dim=2)


def _q4_1(x: Tensor) -> Tensor:
    scale, least = (_half(value) for value in _fitted(x))
    return torch.cat([_bytes(scale), _bytes(least), _halves(_codes(x, scale, least).clamp(0, 15))], dim=2)


def _fitted(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum of blocks [..., 32] for codes 0 to 15: of their range, then least squares."""
    least = x.amin(dim=-1, keepdim=True)
    scale = (x.amax(dim=-1, keepdim=True) - least) / 15.0
    codes = _codes(x, scale, least).clamp(0, 15)
    mean, middle = x.mean(-1, keepdim=True), codes.mean(-1, keepdim=True)
    spread = codes - middle
    variance = (spread * spread).sum(-1, keepdim=True)
    slope = torch.where(variance > 0, (spread * (x - mean)).sum(-1, keepdim=True) / variance.clamp(min=1e-9), scale)
    return slope, mean - slope * middle


def _int4(matrix: Tensor) -> ScaledWeight:
    rows, inputs = matrix.shape
    group = next((size for size in INT4_GROUPS if inputs % size == 0), 0)
    if not group:
        raise ValueError(f"int4 codes need a multiple of {BLOCK} inputs, not {inputs}")
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    step = max(1, _CHUNK // inputs)
    for first in range(0, rows, step):
        codes, scale, zero = _around_zero(
            matrix[first : first + step].to(torch.float32).reshape(-1, inputs // group, group)
        )
        found.append((pack_nibbles(codes.reshape(-1, inputs)), scale[..., 0], zero[..., 0].to(torch.int8)))
    codes, scales, zeros = (torch.cat(pieces) for pieces in zip(*found, strict=True))
    return ScaledWeight(codes, scales.to(torch.float16), "int4", inputs, group, zeros, dtype=matrix.dtype)


def _around_zero(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0 to 15, scale and zero, itself a code, of groups [..., G]: the range, which holds 0, gives the zero, least
    squares the scale."""
    least = x.amin(-1, keepdim=True).clamp(max=0.0)
    scale = ((x.amax(-1, keepdim=True).clamp(min=0.0) - least) / 15.0).clamp(min=1e-12)
    zero = (-least / scale).round().clamp(0, 15)
    codes = (_codes(x, scale) + zero).clamp(0, 15) - zero
    square = (codes * codes).sum(-1, keepdim=True)
    scale = _half(torch.where(square > 0, (x * codes).sum(-1, keepdim=True) / square.clamp(min=1.0), scale))
    return (_codes(x, scale) + zero).clamp(0, 15), scale, zero
