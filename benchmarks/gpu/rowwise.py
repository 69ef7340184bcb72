"""Checks of the kernels that work on rows: norms, activations, gathers, embedding and matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import get_args

import torch

from benchmarks.gpu import experts, scaled
from benchmarks.gpu.cases import CLOSE, FP8, Case, check_all, close, draw
from benchmarks.gpu.supervise import Context
from kernels import reference
from kernels.interface import Activation
from kernels.triton.activation import gated
from kernels.triton.embedding import embed
from kernels.triton.gather import gather_rows
from kernels.triton.gemm import skinny_gemm
from kernels.triton.norm import rms_norm, rms_norm_quantized
from kernels.triton.table import TritonOps

KERNELS = ("norm", "activation", "gather", "embedding", "gemm", *experts.KERNELS, *scaled.KERNELS)


def run(context: Context) -> None:
    """Check them all."""
    check_all(context, cases(context.device, context.tiny))


def cases(device: str, tiny: bool) -> Iterator[Case]:
    """Every case, the shapes of an 8B model first."""
    yield from _norms(device, (64, 100) if tiny else (4096, 576, 896, 8192, 16384))
    yield from _activations(device, 96 if tiny else 14336)
    yield from _gathers(device, 130 if tiny else 4096)
    sizes = ((96, 130), (40, 64)) if tiny else ((6144, 4096), (4096, 14336), (28672, 4096), (1000, 1030))
    yield from _products(device, sizes)
    yield from experts.cases(device, tiny)
    yield from scaled.cases(device, tiny)


def _norms(device: str, widths: tuple[int, ...]) -> Iterator[Case]:
    for width in widths:
        for dtype in CLOSE:
            for residual in (False, True):
                label = f"{dtype} width {width}{' residual' * residual}"
                yield Case("norm", label, partial(_norm, device, width, dtype, residual))
    for dtype in (torch.int8, FP8):
        yield Case("norm", f"to {dtype}", partial(_quantised, device, widths[0], dtype))


def _norm(device: str, width: int, dtype: torch.dtype, with_residual: bool) -> None:
    x, weight = draw(1, 5, width, dtype=dtype), draw(2, width, dtype=dtype)
    residual = draw(3, 5, width, dtype=dtype) if with_residual else None
    mine = None if residual is None else residual.to(device, copy=True)
    got = rms_norm(x.to(device), weight.to(device), 1e-5, mine)
    close(got, reference.rms_norm(x, weight, 1e-5, residual), CLOSE[dtype])
    if mine is not None and residual is not None:
        close(mine, residual, 2.0**-7 if dtype == torch.bfloat16 else 0.0)


def _quantised(device: str, width: int, dtype: torch.dtype) -> None:
    x, weight = draw(4, 5, width), draw(5, width)
    values, scales = rms_norm_quantized(x.to(device), weight.to(device), 1e-5, dtype)
    wanted, wanted_scales = reference.rms_norm_quantized(x, weight, 1e-5, dtype)
    torch.testing.assert_close(scales.cpu(), wanted_scales, rtol=1e-5, atol=0)
    difference = (values.cpu().float() - wanted.float()).abs()
    step = 1.0 if dtype == torch.int8 else wanted.float().abs() / 8 + 2**-9
    # A value between two steps may be rounded to either
    assert bool((difference <= step).all()), "more than one step apart"
    assert float((difference > 0).float().mean()) < 0.02, "more than 2 % of the values differ"


def _activations(device: str, width: int) -> Iterator[Case]:
    for dtype in CLOSE:
        for kind in get_args(Activation):
            yield Case("activation", f"{kind} {dtype}", partial(_activation, device, width, dtype, kind))


def _activation(device: str, width: int, dtype: torch.dtype, kind: Activation) -> None:
    packed = draw(6, 7, 2 * width, dtype=dtype)
    close(gated(packed.to(device), kind), reference.gated(packed, kind), CLOSE[dtype])


def _gathers(device: str, width: int) -> Iterator[Case]:
    for dtype in CLOSE:
        for index in (torch.int32, torch.int64):
            yield Case("gather", f"{dtype} by {index}", partial(_gather, device, width, dtype, index))
        yield Case("embedding", f"{dtype}", partial(_embedding, device, width, dtype))


def _gather(device: str, width: int, dtype: torch.dtype, index: torch.dtype) -> None:
    source = draw(7, 50, width, dtype=dtype)
    rows = torch.tensor([3, -1, 49, 50, 0, 2**31 - 1, 3], dtype=index)
    assert torch.equal(gather_rows(source.to(device), rows.to(device)).cpu(), reference.gather_rows(source, rows))


def _embedding(device: str, width: int, dtype: torch.dtype) -> None:
    table = draw(8, 300, width, dtype=dtype)
    ids = torch.tensor([5, 299, -1, 0], dtype=torch.int32)
    wanted = reference.embed(ids.clamp(min=0), reference.pack([table])).to(dtype)
    wanted[2] = 0
    assert torch.equal(embed(ids.to(device), table.to(device)).cpu(), wanted)


def _products(device: str, sizes: tuple[tuple[int, int], ...]) -> Iterator[Case]:
    for n, k in sizes:
        for dtype in CLOSE:
            if dtype != torch.bfloat16 and (n, k) != sizes[-1]:
                continue
            for rows in (1, 5, 16, 17):
                label = f"{dtype} [{rows}, {k}] × [{n}, {k}]"
                yield Case("gemm", label, partial(_product, device, rows, n, k, dtype))


def _product(device: str, rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Up to 16 rows by the skinny kernel with a bias; more by the table's own choice."""
    x, weight = draw(9, rows, k, dtype=dtype), draw(10, n, k, dtype=dtype, scale=k**-0.5)
    bias = draw(11, n, dtype=dtype)
    wanted = reference.linear(x, reference.pack([weight], bias))
    if rows <= 16:
        got = skinny_gemm(x.to(device), weight.to(device), bias.to(device))
    else:
        ops = TritonOps()
        got = ops.linear(x.to(device), ops.pack([weight.to(device)], bias.to(device)))
    close(got, wanted, max(CLOSE[dtype], 1e-4))
