"""Weights of codes with scales as the Triton implementation holds them: neighbours that are alike joined, dense ones
beside them, and rows of them as embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels.dense import DenseWeight
from kernels.interface import ScaledWeight, WeightPart, rows_of
from kernels.scaled import PACKED, dequantize_scaled, pack_nibbles
from kernels.triton.architecture import architecture
from kernels.triton.quantize_rows import quantize_rows
from kernels.triton.scaled_gemm import FP8_DOT_CAPABILITY, ScaledMatrix, multiplies, scaled_gemm


class PieceWeight:
    """Row-blocks of which at least one is codes with scales: the output is theirs beside each other."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: Sequence[DenseWeight | ScaledMatrix]) -> None:
        self.pieces = list(pieces)

    @property
    def in_features(self) -> int:
        """K."""
        return self.pieces[0].in_features

    @property
    def out_features(self) -> int:
        """N."""
        return sum(piece.out_features for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(piece.nbytes for piece in self.pieces)


def pack_pieces(parts: Sequence[WeightPart], bias: Tensor | None, dense: Callable[[WeightPart], Tensor]) -> PieceWeight:
    """Join neighbours of one layout. dense: a part as a matrix, for those that are no codes or whose groups the kernel
    does not take."""
    runs: list[list[WeightPart]] = []
    for part in parts:
        if runs and _alike(runs[-1][0], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    pieces: list[DenseWeight | ScaledMatrix] = []
    first = 0
    for run in runs:
        rows = sum(rows_of(part) for part in run)
        own = None if bias is None else bias[first : first + rows].contiguous()
        codes = [part for part in run if isinstance(part, ScaledWeight) and multiplies(part)]
        if codes:
            pieces.append(ScaledMatrix(_joined(codes), own))
        else:
            matrix = torch.cat([dense(part) for part in run])
            pieces.append(DenseWeight(matrix, None if own is None else own.to(matrix.dtype)))
        first += rows
    return PieceWeight(pieces)


def multiply(x: Tensor, weight: ScaledMatrix, *, activation_bits: int, deterministic: bool) -> Tensor:
    """x [M, K] · weightᵀ + bias → [M, N] of x's type. activation_bits 8: fp8 weights meet x in e4m3, where the device
    multiplies that. deterministic: the same tiles whatever M is."""
    tall = True if deterministic else None
    rounds = activation_bits == 8 and architecture(x.device).capability >= FP8_DOT_CAPABILITY
    if weight.part.format != "fp8" or not rounds:
        return scaled_gemm(x, weight, tall=tall)
    codes, scales = quantize_rows(x, weight.part.group)
    return scaled_gemm(codes, weight, x_scales=scales, out_type=x.dtype, tall=tall)


def embed_pieces(token_ids: Tensor, weight: PieceWeight, dense: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Rows int32 [T] of the weight, zeros for ids outside it. dense: (ids, matrix) → the same of a dense piece."""
    out, first = None, 0
    for piece in weight.pieces:
        ids = token_ids - first
        # Outside of its piece an id gives zeros
        rows = dense(ids, piece.matrix) if isinstance(piece, DenseWeight) else _rows(ids, piece)
        out = rows if out is None else out + rows
        first += piece.out_features
    assert out is not None
    return out


def _rows(ids: Tensor, weight: ScaledMatrix) -> Tensor:
    """Dequantised rows [T, K] in the type of the part."""
    part, count = weight.part, weight.out_features
    at = ids.clamp(0, count - 1).to(torch.int64)
    codes = weight.codes.view(torch.uint8)[at]
    if part.format in PACKED:
        halves = codes.reshape(len(at), -1, 1, weight.depth)
        inputs = torch.cat([halves & 15, halves >> 4], dim=2).reshape(len(at), -1)[:, : part.in_features]
        codes = pack_nibbles(inputs)
    rows = replace(
        part,
        codes=codes.view(weight.codes.dtype),
        scales=part.scales[at],
        zeros=None if part.zeros is None else part.zeros[at],
    )
    values = dequantize_scaled(rows).to(part.dtype)
    return torch.where(((ids >= 0) & (ids < count))[:, None], values, torch.zeros_like(values))


def _alike(first: WeightPart, other: WeightPart) -> bool:
    """Whether two parts lie in one matrix: both dense, or codes of one layout over inputs in one order."""
    if not isinstance(first, ScaledWeight) or not isinstance(other, ScaledWeight):
        return not isinstance(first, ScaledWeight) and not isinstance(other, ScaledWeight)
    orders = (first.order, other.order)
    ordered = orders[0] is orders[1] or (
        orders[0] is not None and orders[1] is not None and torch.equal(orders[0], orders[1])
    )
    layouts = [(part.format, part.group, part.scales.dtype, part.zeros is None) for part in (first, other)]
    return ordered and layouts[0] == layouts[1]


def _joined(parts: Sequence[ScaledWeight]) -> ScaledWeight:
    if len(parts) == 1:
        return parts[0]
    # Torch joins bytes, not 8-bit floats
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(parts[0].codes.dtype)
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return replace(
        parts[0],
        codes=codes,
        scales=torch.cat([part.scales for part in parts]),
        zeros=torch.cat(zeros) if zeros else None,
    )
