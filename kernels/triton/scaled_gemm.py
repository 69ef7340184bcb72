"""GEMM of codes with scales: x [M, K] · weightᵀ + bias, the weight read in the bytes that it is stored in.

Codes become numbers of x's type in registers, exactly (int8, e4m3, e2m1 and a nibble less a zero all fit bfloat16 and
float16), meet x on the tensor cores, and the sum over a group takes the group's scale in float32: nothing is rounded
that the sum does not round. e4m3 weights may also meet activations that are e4m3 themselves, with a scale for each row
and group of x, which doubles the rate of products where the hardware has 8-bit ones (compute capability 8.9 and up).

The weight's side is the long one of a tile, as in `kernels.triton.gemm`. Up to 16 rows of x share a tile of 16 and
split K where N gives too few programs; more rows take tiles of 64. Four-bit codes are laid out anew when they are
packed: byte j of a block of BLOCK_K bytes holds elements j (low half) and j + BLOCK_K (high half) of 2·BLOCK_K, so that
either half is a run of inputs. Blocks and splits depend on the weight and the device alone: a row of up to 16 has the
same bits with 1 to 16 rows, one of more the same with any number of others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import CodeFormat, ScaledWeight
from kernels.scaled import PACKED, check_scaled, nibbles
from kernels.triton.architecture import architecture
from kernels.triton.configuration import POINTERS, Configuration
from kernels.triton.dot import dot, narrow
from kernels.triton.fp8 import decode_e4m3
from kernels.triton.gemm import MAX_ROWS, REDUCE_BLOCK, add_parts

INT8 = tl.constexpr(0)
INT4 = tl.constexpr(1)
FP8 = tl.constexpr(2)
MXFP4 = tl.constexpr(3)
KINDS: dict[CodeFormat, int] = {"int8": 0, "int4": 1, "fp8": 2, "mxfp4": 3}
FP8_DOT_CAPABILITY = 89
"""Compute capability from which tensor cores multiply e4m3."""
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
TALL_ROWS = 64


@triton.jit
def _numbers(codes, zeros, KIND: tl.constexpr, TYPE: tl.constexpr):
    """What codes stand for before their scale, over `_factor`, in TYPE: exact. codes: int8 or bytes, of four bits in
    the low half."""
    if KIND == FP8:
        value = decode_e4m3(codes).to(tl.float32)
    elif KIND == MXFP4:
        # The bits of e2m1 in those of float16 are the value over 2^14, subnormal numbers included
        wide = codes.to(tl.uint16)
        bits = ((wide & 8) << 12) | ((wide & 7) << 9)
        value = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = codes.to(tl.float32) - zeros
    return narrow(value, TYPE)


@triton.jit
def _factor(KIND: tl.constexpr):
    """What `_numbers` leaves out."""
    return 256.0 if KIND == FP8 else 16384.0 if KIND == MXFP4 else 1.0


@triton.jit
def _group_scale(scales, rows, group, N: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr):
    """float32 [BLOCK_N, 1] of one group."""
    scale = tl.load(scales + rows.to(tl.int64) * GROUPS + group, mask=rows < N, other=0)
    if KIND == MXFP4:
        exponent = scale.to(tl.uint32)
        scale = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
    return scale.to(tl.float32)[:, None]


@triton.jit
def _zeros(zeros, rows, group, N: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr):
    """float32 [BLOCK_N, 1]: a group's zeros, or the zero of codes that come without."""
    if zeros is None:
        zero = tl.zeros((rows.shape[0], 1), dtype=tl.float32) + (8.0 if KIND == INT4 else 0.0)
    else:
        held = tl.load(zeros + rows.to(tl.int64) * GROUPS + group, mask=rows < N, other=0)
        zero = held.to(tl.float32)[:, None]
    return zero


@triton.jit
def _products(w, x, acc, FP8_DOT: tl.constexpr, KIND: tl.constexpr):
    """acc + w·x, both bytes of e4m3 where FP8_DOT says so."""
    if not FP8_DOT:
        acc = dot(w, x, acc, PRECISION="ieee")
    elif _INTERPRETED:
        wide = decode_e4m3(w).to(tl.float32) * 256.0
        acc = tl.dot(wide, decode_e4m3(x).to(tl.float32) * 256.0, acc, input_precision="ieee")
    else:
        acc = tl.dot(w.to(tl.float8e4nv, bitcast=True), x.to(tl.float8e4nv, bitcast=True), acc)
    return acc


@triton.jit
def _scaled_half(
    acc, w, x, scales, x_scales, rows, columns, group, M,
    N: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, FP8_DOT: tl.constexpr,
):  # fmt: skip
    """acc + (w·x) under the scales of one group, or plain where a row has one scale for all."""
    if GROUPS == 1:
        acc = _products(w, x, acc, FP8_DOT, KIND)
    else:
        part = _products(w, x, tl.zeros_like(acc), FP8_DOT, KIND)
        scale = _group_scale(scales, rows, group, N, GROUPS, KIND)
        if FP8_DOT:
            scale = scale * tl.load(x_scales + columns * GROUPS + group, mask=columns < M, other=0.0)[None, :]
        acc += part * scale
    return acc


@triton.jit(do_not_specialize=["M"])
def _scaled_gemm(
    x, x_scales, codes, scales, zeros, bias, out, M,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, FP8_DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    TWO: tl.constexpr = KIND % 2 == 1  # INT4 and MXFP4
    STEP: tl.constexpr = 2 * BLOCK_K if TWO else BLOCK_K
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    STRIDE: tl.constexpr = (K + STEP - 1) // STEP * BLOCK_K if TWO else K
    PART: tl.constexpr = (K + SPLIT * STEP - 1) // (SPLIT * STEP) * STEP
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    depth = tl.arange(0, BLOCK_K)
    first = tl.program_id(1) * PART
    codes_at = codes + rows.to(tl.int64)[:, None] * STRIDE + depth[None, :]
    x_at = x + columns.to(tl.int64)[None, :] * K + depth[:, None]
    kind = x.dtype.element_ty
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k in range(first, tl.minimum(first + PART, K), STEP):
        inside = (columns[None, :] < M) & (depth[:, None] + k < K)
        right = tl.load(x_at + k, mask=inside, other=0)
        group = k // GROUP
        if TWO:
            # The last block is filled up
            w = tl.load(codes_at + k // 2, mask=rows[:, None] < N, other=0, eviction_policy="evict_first")
            low = _numbers(w & 15, _zeros(zeros, rows, group, N, GROUPS, KIND), KIND, kind)
            acc = _scaled_half(acc, low, right, scales, x_scales, rows, columns, group, M, N, GROUPS, KIND, FP8_DOT)
            beside = (columns[None, :] < M) & (depth[:, None] + k + BLOCK_K < K)
            right = tl.load(x_at + k + BLOCK_K, mask=beside, other=0)
            # Past the end of K there is no group, and x is 0
            group = tl.minimum((k + BLOCK_K) // GROUP, GROUPS - 1)
            high = _numbers(w >> 4, _zeros(zeros, rows, group, N, GROUPS, KIND), KIND, kind)
            acc = _scaled_half(acc, high, right, scales, x_scales, rows, columns, group, M, N, GROUPS, KIND, FP8_DOT)
        else:
            left = (rows[:, None] < N) & (depth[None, :] + k < K)
            w = tl.load(codes_at + k, mask=left, other=0, eviction_policy="evict_first")
            if not FP8_DOT:
                w = _numbers(w, _zeros(zeros, rows, group, N, GROUPS, KIND), KIND, kind)
            acc = _scaled_half(acc, w, right, scales, x_scales, rows, columns, group, M, N, GROUPS, KIND, FP8_DOT)
    if GROUPS == 1:
        acc = acc * _group_scale(scales, rows, 0, N, GROUPS, KIND)
        if FP8_DOT:
            acc = acc * tl.load(x_scales + columns, mask=columns < M, other=0.0)[None, :]
    if not FP8_DOT:
        acc = acc * _factor(KIND)
    held = (rows[:, None] < N) & (columns[None, :] < M)
    if SPLIT == 1:
        if bias is not None:
            acc += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
        at = columns.to(tl.int64)[None, :] * N + rows[:, None]
        tl.store(out + at, narrow(acc, out.dtype.element_ty), mask=held)
    else:
        tl.store(out + (tl.program_id(1) * 16 + columns[None, :]) * N + rows[:, None], acc, mask=held)


@dataclass(frozen=True, slots=True)
class Plan:
    """How one weight is multiplied with few or many rows on one device."""

    block_n: int
    block_m: int
    block_k: int
    split: int
    warps: int
    stages: int


def block_k(kind: CodeFormat, inputs: int, group: int) -> int:
    """Inputs of one product, half of them those of a block of four-bit codes: within one group."""
    most = 64 if kind in PACKED else 128
    if group >= inputs:
        return most
    return next(size for size in (128, 64, 32) if size <= most and group % size == 0)


def plan(kind: CodeFormat, n: int, k: int, group: int, sms: int, *, tall: bool) -> Plan:
    """Blocks and split of a weight [n, k]."""
    deep = block_k(kind, k, group)
    if tall:
        return Plan(128, TALL_ROWS, min(deep, 64), 1, 8, 3)
    block_n = 64 if n >= 64 * sms else 32
    split = 1
    while -(-n // block_n) * split < 2 * sms and split < 16 and k // (2 * split) >= 4 * 2 * deep:
        split *= 2
    return Plan(block_n, 16, deep, split, 4, 4)


class ScaledMatrix:
    """A ScaledWeight on the device as the kernel reads it, with its bias or None."""

    __slots__ = ("_part", "bias", "codes", "depth")

    def __init__(self, part: ScaledWeight, bias: Tensor | None) -> None:
        """part: as `multiplies` takes it."""
        check_scaled(part)
        packed = part.format in PACKED
        # Four-bit codes are held once, in the kernel's layout
        self._part = replace(part, codes=part.codes[:, :0]) if packed else part
        self.bias = None if bias is None else bias.contiguous()
        # The halves of a block are laid out for one depth, so that few and many rows read the same bytes
        self.depth = min(block_k(part.format, part.in_features, part.group), 64)
        self.codes = _interleaved(part, self.depth) if packed else part.codes.contiguous()

    @property
    def part(self) -> ScaledWeight:
        """What it was made of, less its codes where they have four bits."""
        return self._part

    @property
    def in_features(self) -> int:
        """K."""
        return self._part.in_features

    @property
    def out_features(self) -> int:
        """N."""
        return int(self.codes.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes held, scales, zeros, order and bias included."""
        others = (self._part.scales, self._part.zeros, self._part.order, self.bias)
        return self.codes.nbytes + sum(tensor.nbytes for tensor in others if tensor is not None)


def multiplies(part: ScaledWeight) -> bool:
    """Whether the kernel takes a weight's groups: multiples of 32 inputs, or one for all."""
    return part.group >= part.in_features or part.group % 32 == 0


def _interleaved(part: ScaledWeight, depth: int) -> Tensor:
    """Four-bit codes with both halves of a byte `depth` inputs apart, filled up to whole blocks."""
    codes = nibbles(part.codes)
    fill = -codes.shape[1] % (2 * depth)
    blocks = torch.nn.functional.pad(codes, (0, fill)).reshape(codes.shape[0], -1, 2, depth)
    return (blocks[:, :, 0] | (blocks[:, :, 1] << 4)).reshape(codes.shape[0], -1).contiguous()


def scaled_gemm(
    x: Tensor, weight: ScaledMatrix, *, x_scales: Tensor | None = None, out_type: torch.dtype | None = None,
    tall: bool | None = None, chosen: Plan | None = None,
) -> Tensor:  # fmt: skip
    """x [M, K] · weightᵀ + bias → [M, N] of x's type, or out_type.

    x_scales float32 [M, groups]: x holds e4m3 codes under these, the weight is fp8. tall: tiles for many rows whatever
    M is; None: by M. chosen: in place of `plan`. Raises ValueError for shapes that do not fit.
    """
    part, rows = weight.part, x.shape[0]
    if x.dim() != 2 or x.shape[1] != part.in_features:
        raise ValueError(f"x must be [M, {part.in_features}], not {list(x.shape)}")
    if (x_scales is None) != (x.dtype != torch.float8_e4m3fn) or (x_scales is not None and part.format != "fp8"):
        raise ValueError("8-bit activations come with their scales and meet fp8 weights")
    many = rows > MAX_ROWS if tall is None else tall
    n, k = weight.out_features, part.in_features
    how = chosen or plan(part.format, n, k, part.group, architecture(x.device).sms, tall=many)
    out = torch.empty(rows, n, dtype=out_type or x.dtype, device=x.device)
    if not out.numel():
        return out
    target = out if how.split == 1 else torch.empty(how.split, 16, n, dtype=torch.float32, device=x.device)
    ordered = x.contiguous() if part.order is None else x[:, part.order]
    fp8_dot = x_scales is not None
    _scaled_gemm[(-(-n // how.block_n), how.split, -(-rows // how.block_m))](
        ordered.view(torch.uint8) if fp8_dot else ordered, x_scales,
        weight.codes.view(torch.uint8) if part.format == "fp8" else weight.codes, part.scales, part.zeros,
        weight.bias if how.split == 1 else None, target, rows,
        N=n, K=k, GROUP=min(part.group, k), KIND=KINDS[part.format], FP8_DOT=fp8_dot,
        BLOCK_N=how.block_n, BLOCK_M=how.block_m, BLOCK_K=weight.depth if part.format in PACKED else how.block_k,
        SPLIT=how.split, num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
    if how.split > 1:
        add_parts[(rows, -(-n // REDUCE_BLOCK))](
            target, weight.bias, out, N=n, BLOCK=REDUCE_BLOCK, SPLIT=how.split, num_warps=4
        )
    return out


_SHAPES = ((4096, 4096), (28672, 4096), (960, 576))
"""[N, K] of projections: two of an 8B model, with K split and without, and a small one's."""
_FORMATS: tuple[tuple[CodeFormat, int, bool, bool], ...] = (
    ("int4", 128, True, False), ("int4", 128, False, False), ("int4", 32, True, False), ("int8", 0, False, False),
    ("fp8", 0, False, False), ("fp8", 0, False, True), ("fp8", 128, False, False), ("fp8", 128, False, True),
    ("mxfp4", 32, False, False), ("int8", 128, True, False),
)  # fmt: skip
"""Format, group (0: rows), zeros, 8-bit activations."""
_SMS = 132


def configurations() -> Iterator[Configuration]:
    """Each format for few and many rows, on the projections of an 8B model as planned for an H100."""
    for format, group, zeros, activations in _FORMATS:
        for n, k in _SHAPES:
            if group and k % group:
                continue
            for tall in (False, True):
                for dtype in (torch.bfloat16, torch.float16):
                    if dtype is torch.bfloat16 or (n, k) == _SHAPES[0]:
                        yield _configuration(format, n, k, group or k, zeros, activations, tall, dtype)


def _configuration(
    format: CodeFormat, n: int, k: int, group: int, zeros: bool, activations: bool, tall: bool, dtype: torch.dtype
) -> Configuration:
    how = plan(format, n, k, group, _SMS, tall=tall)
    kind, packed = POINTERS[dtype], format in PACKED
    signature = {"x": "*u8" if activations else kind, "out": kind if how.split == 1 else "*fp32", "M": "i32"}
    signature["codes"] = "*i8" if format == "int8" else "*u8"
    signature["scales"] = {"mxfp4": "*u8", "int4": "*fp16"}.get(format, "*fp32")
    constants: dict[str, Any] = {"bias": None}
    for given, name, pointer in ((zeros, "zeros", "*i8"), (activations, "x_scales", "*fp32")):
        if given:
            signature[name] = pointer
        else:
            constants[name] = None
    constants |= {
        "N": n, "K": k, "GROUP": group, "KIND": KINDS[format], "FP8_DOT": activations, "BLOCK_N": how.block_n,
        "BLOCK_M": how.block_m, "BLOCK_K": min(block_k(format, k, group), 64) if packed else how.block_k,
        "SPLIT": how.split,
    }  # fmt: skip
    name = f"{format} g{group}{' zeros' * zeros}{' w8a8' * activations} {kind[1:]} n{n} k{k}{' tall' * tall}"
    return Configuration(
        kernel=_scaled_gemm, name=name, signature=signature, constants=constants, num_warps=how.warps,
        num_stages=how.stages, min_arch=FP8_DOT_CAPABILITY if activations else 80,
        hot=(n, k) == _SHAPES[0] and dtype is torch.bfloat16,
        # On Blackwell the assembler puts 8 bytes on the stack beside 72 registers
        spills=8 if format == "int8" and zeros else 0,
    )  # fmt: skip
