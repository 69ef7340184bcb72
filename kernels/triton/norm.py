"""RMSNorm (arXiv 1910.07467) of rows, with the residual stream added on the way and, when asked, a quantised result.

x, residual [..., H] contiguous in bfloat16, float16 or float32; weight [H] of any of them; one program a row, which
holds the whole row in registers: read x and the residual once, write the sum and the result once. Sums are float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.configuration import ACTIVATIONS, POINTERS, Configuration
from kernels.triton.fp8 import encode_e4m3

QUANTIZED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Types of a quantised result, with the magnitude that a row's largest element takes."""

MAX_WIDTH = 16384


@triton.jit
def _rms_norm(x, residual, weight, out, scales, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = row * WIDTH + columns
    values = tl.load(x + at, mask=inside, other=0.0)
    if residual is not None:
        held = tl.load(residual + at, mask=inside, other=0.0)
        # The stream is kept in its own type: what is normalised is what later layers read
        values = (held.to(tl.float32) + values.to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual + at, values, mask=inside)
    wide = values.to(tl.float32)
    scale = tl.math.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    normal = wide * scale * gain
    if LARGEST > 0:
        step = tl.maximum(tl.max(tl.abs(normal), axis=0), 1e-30) / LARGEST
        tl.store(scales + row, step)
        normal = tl.clamp(normal / step, -LARGEST, LARGEST)
        normal = encode_e4m3(normal) if LARGEST > 127 else tl.floor(normal + 0.5)
    tl.store(out + at, normal.to(out.dtype.element_ty), mask=inside)


def plan(width: int) -> tuple[int, int]:
    """(BLOCK, warps) for rows of `width`. Raises ValueError for rows that do not fit into registers."""
    if not 0 < width <= MAX_WIDTH:
        raise ValueError(f"rms_norm takes rows of 1 to {MAX_WIDTH} elements, not {width}")
    block = max(64, triton.next_power_of_2(width))
    return block, 4 if block <= 2048 else 8 if block <= 8192 else 16


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension; with residual: residual += x in place, and that sum
    is normalised. Raises ValueError for shapes that do not fit."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, weight, eps, residual, out, None, 0.0)
    return out


def rms_norm_quantized(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same, quantised by rows: (values of `dtype` [..., H], float32 scales [...]), normalised ≈ values · scale.

    dtype int8 or float8_e4m3fn. Raises ValueError for others.
    """
    if dtype not in QUANTIZED:
        raise ValueError(f"rows are quantised to int8 or float8_e4m3fn, not {dtype}")
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    # 8-bit floats are encoded by integer arithmetic: Ampere has no instruction for them
    stored = out if dtype == torch.int8 else out.view(torch.uint8)
    _launch(x, weight, eps, residual, stored, scales, QUANTIZED[dtype])
    return out, scales


def _launch(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, out: Tensor, scales: Tensor | None, largest: float
) -> None:
    width = x.shape[-1]
    if weight.shape != (width,) or (residual is not None and residual.shape != x.shape):
        raise ValueError(f"rms_norm of {list(x.shape)} does not fit weight {list(weight.shape)} or the residual")
    if residual is not None and not residual.is_contiguous():
        raise ValueError("the residual stream must be contiguous: it is added to in place")
    block, warps = plan(width)
    rows = x.numel() // width
    if rows:
        _rms_norm[(rows,)](
            x.contiguous(), residual, weight, out, scales, eps, WIDTH=width, BLOCK=block, LARGEST=largest,
            num_warps=warps,
        )  # fmt: skip


def configurations() -> Iterator[Configuration]:
    """Widths of known models (896 to 16,384) in each type, with and without residual and quantised results, and weights
    in float32 where they count from 1."""
    for dtype in ACTIVATIONS:
        for width in (576, 896, 2048, 3072, 4096, 5120, 8192, 16384):
            for residual in (True, False):
                hot = dtype is torch.bfloat16 and width == 4096
                yield _configuration(dtype, width, residual, dtype, 0.0, hot)
    for width in (2304, 5376):
        for residual in (True, False):
            yield _configuration(torch.bfloat16, width, residual, torch.bfloat16, 0.0, False, torch.float32)
    for width in (4096, 8192):
        for out, largest in QUANTIZED.items():
            stored = torch.int8 if out == torch.int8 else torch.uint8
            yield _configuration(torch.bfloat16, width, True, stored, largest, hot=width == 4096)


def _configuration(
    dtype: torch.dtype,
    width: int,
    residual: bool,
    out: torch.dtype,
    largest: float,
    hot: bool,
    weight: torch.dtype | None = None,
) -> Configuration:
    block, warps = plan(width)
    suffix = f"{' +residual' if residual else ''}{f' to {POINTERS[out][1:]}' if largest else ''}"
    suffix += "" if weight is None else f" by {POINTERS[weight][1:]}"
    signature = {"x": POINTERS[dtype], "weight": POINTERS[weight or dtype], "out": POINTERS[out], "eps": "fp32"}
    constants: dict[str, object] = {"WIDTH": width, "BLOCK": block, "LARGEST": largest}
    for name, present, kind in (("residual", residual, POINTERS[dtype]), ("scales", largest > 0, "*fp32")):
        if present:
            signature[name] = kind
        else:
            constants[name] = None
    return Configuration(
        kernel=_rms_norm,
        name=f"{POINTERS[dtype][1:]} h{width}{suffix}",
        signature=signature,
        constants=constants,
        num_warps=warps,
        hot=hot,
        # The assembler parks one pair of registers of the float32 row of 4,096; no step of a served model takes it
        spills=8 if dtype is torch.float32 else 0,
    )
