"""Skinny GEMM: x [M, K] · weightᵀ + bias for 1 to 16 rows, where the time is that of reading the weight once.

x [M, K] contiguous, weight [N, K] contiguous, both bfloat16, float16 or float32; bias [N] or None; returns [M, N] of
x's type. A program multiplies BLOCK_N rows of the weight with all rows of x, held transposed and padded to 16 columns,
so that the long side of the tile is the weight's (tensor cores take 64 rows of it and 16 columns at once). Where N
alone gives too few programs to fill the device, K is split; the parts are float32 sums in a workspace that a second
kernel adds up in a fixed order. Blocks and split depend on (N, K) and the device, never on M: a row has the same bits
with 1 to 16 rows. Idea of splitting K: stream-K and split-K decompositions (arXiv 2301.03598).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.architecture import architecture
from kernels.triton.configuration import ACTIVATIONS, POINTERS, Configuration
from kernels.triton.dot import dot

MAX_ROWS = 16
REDUCE_BLOCK = 256
STAGES = 4


@triton.jit(do_not_specialize=["M"])
def _skinny_gemm(
    x, weight, bias, out, M,
    N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, 16)
    part: tl.constexpr = (K + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K) * BLOCK_K
    first = tl.program_id(1) * part
    depth = tl.arange(0, BLOCK_K)
    weight_at = weight + rows.to(tl.int64)[:, None] * K + depth[None, :]
    x_at = x + columns[None, :] * K + depth[:, None]
    acc = tl.zeros((BLOCK_N, 16), dtype=tl.float32)
    for k in range(first, tl.minimum(first + part, K), BLOCK_K):
        left = (rows[:, None] < N) & (depth[None, :] + k < K)
        right = (columns[None, :] < M) & (depth[:, None] + k < K)
        # The weight is read once and would only push what is read again out of the cache
        w = tl.load(weight_at + k, mask=left, other=0.0, eviction_policy="evict_first")
        acc = dot(w, tl.load(x_at + k, mask=right, other=0.0), acc, PRECISION="ieee")
    inside = (rows[:, None] < N) & (columns[None, :] < M)
    if SPLIT == 1:
        if bias is not None:
            acc += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
        tl.store(out + columns[None, :] * N + rows[:, None], acc.to(out.dtype.element_ty), mask=inside)
    else:
        at = (tl.program_id(1) * 16 + columns[None, :]) * N + rows[:, None]
        tl.store(out + at, acc, mask=inside)


@triton.jit
def add_parts(parts, bias, out, N: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr):
    """Program (row, block): the sum of float32 parts [SPLIT, 16, N], in order, and the bias."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(SPLIT):
        total += tl.load(parts + (part * 16 + row) * N + columns, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + columns, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Plan:
    """How one weight's shape is multiplied on one device."""

    block_n: int
    block_k: int
    split: int


def plan(n: int, k: int, sms: int, item_size: int = 2) -> Plan:
    """Blocks and split of a weight [n, k]: about two programs a multiprocessor, each part at least four blocks deep."""
    block_n = 64 if n >= 64 * sms else 32
    block_k = 256 // item_size
    programs = -(-n // block_n)
    split = 1
    while programs * split < 2 * sms and split < 16 and k // (2 * split) >= 4 * block_k:
        split *= 2
    return Plan(block_n, block_k, split)


def skinny_gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, chosen: Plan | None = None) -> Tensor:
    """x [M ≤ 16, K] · weightᵀ + bias → [M, N]. chosen: in place of `plan`. Raises ValueError for other shapes or types
    that differ."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.shape[0] > MAX_ROWS:
        raise ValueError(f"up to {MAX_ROWS} rows [M, K] meet a weight [N, K], not {list(x.shape)} {list(weight.shape)}")
    if x.dtype != weight.dtype or not weight.is_contiguous():
        raise ValueError(f"x and a contiguous weight are of one type, not {x.dtype} and {weight.dtype}")
    rows, (n, k) = x.shape[0], weight.shape
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias must be [{n}], not {list(bias.shape)}")
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    how = chosen or plan(n, k, architecture(x.device).sms, x.itemsize)
    target = out if how.split == 1 else torch.empty(how.split, 16, n, dtype=torch.float32, device=x.device)
    _skinny_gemm[(-(-n // how.block_n), how.split)](
        x.contiguous(), weight, bias if how.split == 1 else None, target, rows, N=n, K=k,
        BLOCK_N=how.block_n, BLOCK_K=how.block_k, SPLIT=how.split, num_warps=4, num_stages=STAGES,
    )  # fmt: skip
    if how.split > 1:
        grid = (rows, -(-n // REDUCE_BLOCK))
        add_parts[grid](target, bias, out, N=n, BLOCK=REDUCE_BLOCK, SPLIT=how.split, num_warps=4)
    return out


_SHAPES = (
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096),
    (1024, 1024), (960, 576), (576, 1536), (10240, 8192), (8192, 28672),
)  # fmt: skip
"""[N, K] of projections: an 8B model's first, then small and large ones'."""

_SMS = (132, 108, 148)
"""Multiprocessors of H100, A100 and B200: they decide where K is split."""


def configurations() -> Iterator[Configuration]:
    """Each projection of known models in each type, as planned for H100, A100 and B200."""
    seen: set[tuple[object, ...]] = set()
    for dtype in ACTIVATIONS:
        for n, k in _SHAPES:
            for sms in _SMS:
                how = plan(n, k, sms, dtype.itemsize)
                hot = dtype is torch.bfloat16 and (n, k) in _SHAPES[:5] and sms == _SMS[0]
                for key, config in (
                    ((dtype, n, k, how), _multiplication(dtype, n, k, how, hot)),
                    ((dtype, n, how.split), _addition(dtype, n, how, hot)),
                ):
                    if key not in seen and (config.kernel is _skinny_gemm or how.split > 1):
                        seen.add(key)
                        yield config
    for dtype in ACTIVATIONS:
        yield from _with_bias(dtype)


def _multiplication(dtype: torch.dtype, n: int, k: int, how: Plan, hot: bool) -> Configuration:
    kind = POINTERS[dtype]
    return Configuration(
        kernel=_skinny_gemm,
        name=f"{kind[1:]} n{n} k{k} block{how.block_n} split{how.split}",
        signature={"x": kind, "weight": kind, "out": kind if how.split == 1 else "*fp32", "M": "i32"},
        constants={
            "bias": None, "N": n, "K": k, "BLOCK_N": how.block_n, "BLOCK_K": how.block_k, "SPLIT": how.split,
        },
        num_stages=STAGES,
        hot=hot,
    )  # fmt: skip


def _addition(dtype: torch.dtype, n: int, how: Plan, hot: bool) -> Configuration:
    kind = POINTERS[dtype]
    return Configuration(
        kernel=add_parts,
        name=f"{kind[1:]} n{n} split{how.split}",
        signature={"parts": "*fp32", "out": kind},
        constants={"bias": None, "N": n, "BLOCK": REDUCE_BLOCK, "SPLIT": how.split},
        hot=hot,
    )


def _with_bias(dtype: torch.dtype) -> Iterator[Configuration]:
    """The projections of Qwen2 7B and 0.5B that have a bias, the second split."""
    for n, k, split in ((4608, 3584, 1), (1152, 896, 2)):
        kind, how = POINTERS[dtype], Plan(32, 256 // dtype.itemsize, split)
        plain = _multiplication(dtype, n, k, how, False) if split == 1 else _addition(dtype, n, how, False)
        constants = {name: value for name, value in plain.constants.items() if name != "bias"}
        yield replace(
            plain, name=f"{plain.name} bias", signature={**plain.signature, "bias": kind}, constants=constants
        )
