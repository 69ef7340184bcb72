"""Weights in fewer bytes: every format's product against its exact values, and what it is timed on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.cases import CLOSE, Case, close, draw
from kernels.blocks import dequantize
from kernels.interface import ScaledWeight
from kernels.quantize import quantize_codes
from kernels.reference_scaled import dequantize_activations, quantize_activations
from kernels.triton.quantize_rows import quantize_rows
from kernels.triton.scaled_gemm import ScaledMatrix, scaled_gemm

KERNELS = ("scaled_gemm", "quantize_rows")
FORMATS = ("int8", "int4", "int4 without zeros", "fp8", "fp8 in blocks of 128", "mxfp4")
ROUNDED = ("fp8", "fp8 in blocks of 128")
"""Formats that also meet activations of 8 bits"""


def part(format: str, n: int, k: int, device: str = "cpu", seed: int = 0) -> ScaledWeight:
    """A random weight [n, k] of a format, of size 1/√k."""
    generator = torch.Generator(device=device).manual_seed(seed)
    if format == "mxfp4":
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator, device=device)
        scales = torch.randint(116, 122, (n, k // 32), dtype=torch.uint8, generator=generator, device=device)
        return ScaledWeight(codes, scales, "mxfp4", k, 32)
    matrix = torch.randn(n, k, generator=generator, device=device) * k**-0.5
    if format == "fp8 in blocks of 128":
        groups = matrix.reshape(n, -1, min(k, 128))
        scales = groups.abs().amax(2).clamp(min=1e-12) / 448.0
        fp8 = (groups / scales[..., None]).reshape(n, k).to(torch.float8_e4m3fn)
        return ScaledWeight(fp8, scales, "fp8", k, min(k, 128))
    found = quantize_codes(matrix, "fp8" if format == "fp8" else "int8" if format == "int8" else "int4")
    if format == "int4 without zeros":
        return ScaledWeight(found.codes, found.scales, "int4", k, found.group)
    return found


def cases(device: str, tiny: bool) -> Iterator[Case]:
    """Few and many rows, with a bias; then activations in 8 bits where the device multiplies those."""
    sizes = ((33, 128),) if tiny else ((6144, 4096), (4096, 14336), (1000, 1024))
    many = 17 if tiny else 65
    for n, k in sizes:
        for format in FORMATS:
            for dtype in CLOSE if not tiny and (n, k) == sizes[-1] else (torch.bfloat16,):
                for rows in (3,) if tiny and format in FORMATS[1:] else (1, 16, many):
                    label = f"{format} {dtype} [{rows}, {k}] × [{n}, {k}]"
                    yield Case("scaled_gemm", label, partial(_product, device, format, rows, n, k, dtype))
    n, k = sizes[0]
    for rows in (1, many):
        for group in (k, 128):
            yield Case("quantize_rows", f"[{rows}, {k}] by {group}", partial(_rounding, device, rows, k, group))
    if device == "cpu" or torch.cuda.get_device_capability() >= (8, 9):
        for format in ROUNDED:
            for rows in (1, many)[: 1 if tiny else 2]:
                label = f"{format} × e4m3 [{rows}, {k}] × [{n}, {k}]"
                yield Case("scaled_gemm", label, partial(_rounded_product, device, format, rows, n, k))


def _product(device: str, format: str, rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    weight, x, bias = part(format, n, k), draw(31, rows, k, dtype=dtype), draw(32, n, dtype=dtype)
    wanted = (x.float() @ dequantize(weight).T + bias.float()).to(dtype)
    got = scaled_gemm(x.to(device), ScaledMatrix(weight.to(device), bias.to(device)))
    close(got, wanted, max(CLOSE[dtype], 1e-4))


def _rounding(device: str, rows: int, k: int, group: int) -> None:
    x = draw(33, rows, k)
    codes, scales = quantize_rows(x.to(device), group)
    wanted, wanted_scales = quantize_activations(x, min(group, k))
    assert torch.equal(scales.cpu(), wanted_scales), "other scales"
    assert torch.equal(codes.cpu().view(torch.uint8), wanted.view(torch.uint8)), "other codes"


def _rounded_product(device: str, format: str, rows: int, n: int, k: int) -> None:
    weight, x = part(format, n, k), draw(34, rows, k)
    codes, scales = quantize_activations(x, weight.group)
    wanted = dequantize_activations(codes, scales, weight.group) @ dequantize(weight).T
    there = ScaledMatrix(weight.to(device), None)
    got = scaled_gemm(codes.to(device), there, x_scales=scales.to(device), out_type=torch.float32)
    close(got, wanted, 1e-3)


def matrix(format: str, n: int, k: int, device: str) -> ScaledMatrix:
    """A random weight of a format on the device."""
    return ScaledMatrix(part(format, n, k, device), None)


def timed(
    format: str, weight: ScaledMatrix, rows: int, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """(name, call) of one product: x as it is, then x rounded to 8 bits where the format has that."""
    device = weight.codes.device
    x = torch.randn(rows, weight.in_features, device=device).to(dtype)
    yield f"{format} product", partial(scaled_gemm, x, weight)
    if format in ROUNDED and (device.type == "cpu" or torch.cuda.get_device_capability() >= (8, 9)):
        codes, scales = quantize_rows(x, weight.part.group)
        yield f"{format} × e4m3 product", partial(scaled_gemm, codes, weight, x_scales=scales, out_type=dtype)
