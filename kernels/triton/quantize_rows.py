"""Activations as e4m3 codes, each row under its own scale or each group of a row under one: what meets fp8 weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.configuration import ACTIVATIONS, POINTERS, Configuration
from kernels.triton.fp8 import encode_e4m3

BLOCK = 4096


@triton.jit
def _quantize_rows(x, codes, scales, K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, group): two passes where a group is longer than a block."""
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    first = group * GROUP
    last = tl.minimum(first + GROUP, K)
    lane = tl.arange(0, BLOCK)
    most = tl.zeros((BLOCK,), dtype=tl.float32)
    for at in range(first, last, BLOCK):
        most = tl.maximum(most, tl.abs(tl.load(x + row * K + at + lane, mask=at + lane < last, other=0).to(tl.float32)))
    scale = tl.div_rn(tl.maximum(tl.max(most, 0), 1e-12), 448.0)
    tl.store(scales + row * GROUPS + group, scale)
    for at in range(first, last, BLOCK):
        value = tl.load(x + row * K + at + lane, mask=at + lane < last, other=0).to(tl.float32)
        tl.store(codes + row * K + at + lane, encode_e4m3(tl.div_rn(value, scale)), mask=at + lane < last)


def quantize_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes float8_e4m3fn [M, K] of x and scales float32 [M, groups], as
    `kernels.reference_scaled.quantize_activations` defines them."""
    rows, inputs = x.shape
    group = min(group, inputs)
    groups = -(-inputs // group)
    codes = torch.empty(rows, inputs, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    if codes.numel():
        _quantize_rows[(rows, groups)](x.contiguous(), codes, scales, **_options(inputs, group))
    return codes.view(torch.float8_e4m3fn), scales


def _options(inputs: int, group: int) -> dict[str, int]:
    block = min(BLOCK, triton.next_power_of_2(group))
    return {"K": inputs, "GROUP": group, "BLOCK": block, "num_warps": max(1, min(8, block // 512))}


def configurations() -> Iterator[Configuration]:
    """Rows and groups of 128, of an 8B model's sizes."""
    for dtype in ACTIVATIONS:
        for inputs in (4096, 14336):
            for group in (inputs, 128):
                options = _options(inputs, group)
                warps = options.pop("num_warps")
                yield Configuration(
                    kernel=_quantize_rows,
                    name=f"{POINTERS[dtype][1:]} k{inputs} g{group}",
                    signature={"x": POINTERS[dtype], "codes": "*u8", "scales": "*fp32"},
                    constants=options,
                    num_warps=warps,
                    hot=dtype is torch.bfloat16 and inputs == 4096,
                )
