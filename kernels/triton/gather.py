"""Rows of a matrix by number: the last tokens of a step before the LM head, and (embedding.py) rows of the vocabulary.

source [N, H] contiguous in bfloat16, float16 or float32; rows int32 or int64 [R]; returns [R, H]. A program copies
BLOCK columns of one row. A row outside [0, N) gives zeros and reads nothing, so that padding needs no valid number.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.configuration import ACTIVATIONS, POINTERS, Configuration

BLOCK = 1024


@triton.jit(do_not_specialize=["count"])
def _gather_rows(source, rows, out, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    target = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + target).to(tl.int64)
    readable = tl.where((row >= 0) & (row < count), WIDTH, 0)
    values = tl.load(source + row * WIDTH + columns, mask=columns < readable, other=0.0)
    tl.store(out + target * WIDTH + columns, values.to(out.dtype.element_ty), mask=columns < WIDTH)


def gather_rows(source: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """source[rows], zeros for rows outside [0, N). out [R, H]: memory for the result, of any float type. Raises
    ValueError for shapes that do not fit."""
    if source.dim() != 2 or not source.is_contiguous() or rows.dim() != 1:
        raise ValueError(f"rows [R] of contiguous [N, H] are gathered, not {list(rows.shape)} of {list(source.shape)}")
    shape = (rows.shape[0], source.shape[1])
    if out is None:
        out = torch.empty(shape, dtype=source.dtype, device=source.device)
    elif out.shape != shape or not out.is_contiguous():
        raise ValueError(f"the result is contiguous {list(shape)}, not {list(out.shape)}")
    if out.numel():
        grid = (shape[0], triton.cdiv(shape[1], BLOCK))
        _gather_rows[grid](source, rows, out, source.shape[0], WIDTH=shape[1], BLOCK=BLOCK, num_warps=4)
    return out


def configurations() -> Iterator[Configuration]:
    """Each type and index type at the hidden widths of known models."""
    for dtype in ACTIVATIONS:
        for index in (torch.int32, torch.int64):
            for width in (576, 4096, 8192):
                yield Configuration(
                    kernel=_gather_rows,
                    name=f"{POINTERS[dtype][1:]} {POINTERS[index][1:]} h{width}",
                    signature={
                        "source": POINTERS[dtype], "rows": POINTERS[index], "out": POINTERS[dtype], "count": "i32",
                    },
                    constants={"WIDTH": width, "BLOCK": BLOCK},
                    hot=dtype is torch.bfloat16 and width == 4096 and index is torch.int32,
                )  # fmt: skip
