"""Gated activations: SwiGLU and GeGLU (arXiv 2002.05202) of the packed projection gate | up.

gate_up [T, 2·I] contiguous in bfloat16, float16 or float32: the first I columns are the gate, the rest up. Returns
[T, I]. A program takes BLOCK columns of one row; arithmetic is float32. tanh-approximated GELU is
x·sigmoid(2·√(2/π)·(x + 0.044715·x³)), since 1 + tanh(u) = 2·sigmoid(2·u).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import Activation
from kernels.triton.configuration import ACTIVATIONS, POINTERS, Configuration

BLOCK = 1024
KINDS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "clamped_silu": 3}


@triton.jit
def _sigmoid(x):
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def gate_with(gate, up, KIND: tl.constexpr):
    """activation(gate) · up in float32, for an activation of KINDS."""
    if KIND == 3:
        gate = tl.minimum(gate, 7.0)
        active = gate * _sigmoid(1.702 * gate)
        up = tl.clamp(up, -7.0, 7.0) + 1.0
    elif KIND == 0:
        active = gate * _sigmoid(gate)
    elif KIND == 1:
        active = gate * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        active = 0.5 * gate * (1.0 + tl.math.erf(gate * 0.7071067811865476))
    return active * up


@triton.jit
def _gated(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = gate_up + row * (2 * WIDTH) + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, gate_with(gate, up, KIND).to(out.dtype.element_ty), mask=inside)


def gated(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """[T, 2·I] → activation(first half) · second half, [T, I]. Raises ValueError for an unknown activation or an odd
    width."""
    if activation not in KINDS:
        raise ValueError(f"unknown activation {activation!r}; known: {', '.join(KINDS)}")
    rows, width = gate_up.shape[0], gate_up.shape[-1] // 2
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate and up are packed as [T, 2·I], not {list(gate_up.shape)}")
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows and width:
        grid = (rows, triton.cdiv(width, BLOCK))
        _gated[grid](gate_up.contiguous(), out, WIDTH=width, BLOCK=BLOCK, KIND=KINDS[activation], num_warps=4)
    return out


def configurations() -> Iterator[Configuration]:
    """Each type and activation at the inner widths of known models."""
    for dtype in ACTIVATIONS:
        for activation, kind in KINDS.items():
            for width in (1536, 4864, 14336):
                yield Configuration(
                    kernel=_gated,
                    name=f"{POINTERS[dtype][1:]} {activation} i{width}",
                    signature={"gate_up": POINTERS[dtype], "out": POINTERS[dtype]},
                    constants={"WIDTH": width, "BLOCK": BLOCK, "KIND": kind},
                    hot=dtype is torch.bfloat16 and activation == "silu" and width == 14336,
                )
