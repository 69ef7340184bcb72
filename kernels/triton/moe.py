"""Grouped GEMM: every token meets the matrices of its own experts, all of them in one launch.

x [T, H] in bfloat16, float16 or float32; gate_up [E, 2·I, H] with the gate's rows first, down [E, H, I], of one type;
biases [E, 2·I] and [E, H] or None. Pairs of token and expert are sorted by expert in blocks, by
`kernels.triton.moe_route`, and a program multiplies one block with some rows of its expert's matrix: first gate and up,
with the activation on the way out, then down. A last kernel adds a token's results up, in the order of its list, so
that nothing depends on which program is first. Grids depend on T, K and E alone, and so does the tile, never on the
routing; programs past the last block end at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import Activation, WeightPart
from kernels.moe import ExpertParts, ExpertWeights, check_call, check_expert
from kernels.triton.activation import KINDS, gate_with
from kernels.triton.configuration import ACTIVATIONS, POINTERS, Configuration
from kernels.triton.dot import dot, narrow
from kernels.triton.moe_route import Sorted, sort_pairs

SUM_BLOCK = 1024


@triton.jit(do_not_specialize=["max_blocks"])
def gate_up_experts(
    x, weight, bias, order, blocks, out, max_blocks,
    TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, KIND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (block of rows, columns of gate and up): out [pairs, INNER], rows in the order of `order`."""
    block = tl.program_id(0)
    expert = tl.load(blocks + block).to(tl.int64)
    if expert < 0:
        return
    first = tl.load(blocks + max_blocks + block)
    row = tl.arange(0, BLOCK_M)
    live = row < tl.load(blocks + 2 * max_blocks + block)
    token = tl.load(order + first + row, mask=live, other=0) // TOP_K
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    x_at = x + token.to(tl.int64)[:, None] * HIDDEN + depth[None, :]
    gate_at = weight + expert * (2 * INNER * HIDDEN) + column.to(tl.int64)[None, :] * HIDDEN + depth[:, None]
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, HIDDEN, BLOCK_K):
        left = tl.load(x_at + k, mask=live[:, None] & (depth + k < HIDDEN)[None, :], other=0.0)
        wanted = (column < INNER)[None, :] & (depth + k < HIDDEN)[:, None]
        gate = dot(left, tl.load(gate_at + k, mask=wanted, other=0.0), gate, PRECISION="ieee")
        up = dot(left, tl.load(gate_at + INNER * HIDDEN + k, mask=wanted, other=0.0), up, PRECISION="ieee")
    if bias is not None:
        bias_at = bias + expert * (2 * INNER) + column
        gate += tl.load(bias_at, mask=column < INNER, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_at + INNER, mask=column < INNER, other=0.0).to(tl.float32)[None, :]
    out_at = out + (first + row).to(tl.int64)[:, None] * INNER + column[None, :]
    active = narrow(gate_with(gate, up, KIND), out.dtype.element_ty)
    tl.store(out_at, active, mask=live[:, None] & (column < INNER)[None, :])


@triton.jit(do_not_specialize=["max_blocks"])
def down_experts(
    x, weight, bias, order, blocks, out, max_blocks,
    HIDDEN: tl.constexpr, INNER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (block of rows, columns): x [pairs, INNER] in the order of `order` → out [pairs, HIDDEN] by number."""
    block = tl.program_id(0)
    expert = tl.load(blocks + block).to(tl.int64)
    if expert < 0:
        return
    first = tl.load(blocks + max_blocks + block)
    row = tl.arange(0, BLOCK_M)
    live = row < tl.load(blocks + 2 * max_blocks + block)
    pair = tl.load(order + first + row, mask=live, other=0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    x_at = x + (first + row).to(tl.int64)[:, None] * INNER + depth[None, :]
    down_at = weight + expert * (HIDDEN * INNER) + column.to(tl.int64)[None, :] * INNER + depth[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, INNER, BLOCK_K):
        left = tl.load(x_at + k, mask=live[:, None] & (depth + k < INNER)[None, :], other=0.0)
        wanted = (column < HIDDEN)[None, :] & (depth + k < INNER)[:, None]
        acc = dot(left, tl.load(down_at + k, mask=wanted, other=0.0), acc, PRECISION="ieee")
    if bias is not None:
        acc += tl.load(bias + expert * HIDDEN + column, mask=column < HIDDEN, other=0.0).to(tl.float32)[None, :]
    out_at = out + pair.to(tl.int64)[:, None] * HIDDEN + column[None, :]
    tl.store(out_at, narrow(acc, out.dtype.element_ty), mask=live[:, None] & (column < HIDDEN)[None, :])


@triton.jit
def add_experts(parts, ids, scales, out, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Program (token, columns): out [T, HIDDEN] = Σ of scales [T, TOP_K] · parts [T, TOP_K, HIDDEN] in float32, without
    those whose id is below 0."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        width = tl.where(tl.load(ids + pair) >= 0, HIDDEN, 0)
        part = tl.load(parts + pair * HIDDEN + column, mask=column < width, other=0.0).to(tl.float32)
        total += tl.where(column < width, tl.load(scales + pair) * part, 0.0)
    tl.store(out + token * HIDDEN + column, narrow(total, out.dtype.element_ty), mask=column < HIDDEN)


@dataclass(frozen=True, slots=True)
class Tile:
    """How a block of rows meets a matrix: BLOCK_M, BLOCK_N, BLOCK_K, warps and stages."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int

    @property
    def constants(self) -> dict[str, int]:
        """Constants of the kernel."""
        return {"BLOCK_M": self.m, "BLOCK_N": self.n, "BLOCK_K": self.k}


def choose_tiles(pairs: int, experts: int, dtype: torch.dtype, *, deterministic: bool = False) -> tuple[Tile, Tile]:
    """Tiles of gate and up and of down, with the same rows, for `pairs` rows over `experts`: about as many rows as an
    expert gets on average. deterministic: the same tiles whatever the batch.

    Few rows wait for the weights: narrow columns keep many programs reading. Not measured on a GPU yet.
    """
    if dtype == torch.float32:
        return Tile(16, 32, 32, 4, 2), Tile(16, 32, 32, 4, 2)
    rows = pairs / experts
    if deterministic or 16 < rows <= 32:
        return Tile(32, 64, 64, 4, 3), Tile(32, 128, 64, 4, 3)
    if rows <= 16:
        return Tile(16, 32, 128, 4, 4), Tile(16, 64, 128, 4, 4)
    if rows <= 64:
        return Tile(64, 64, 64, 4, 3), Tile(64, 128, 64, 4, 3)
    return Tile(128, 64, 64, 8, 3), Tile(128, 128, 64, 8, 3)


class ExpertMatrices:
    """All experts of a layer on the device, stacked."""

    __slots__ = ("down", "down_bias", "gate_up", "gate_up_bias")

    def __init__(
        self, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None
    ) -> None:
        """gate_up [E, 2·I, H], down [E, H, I], gate_up_bias [E, 2·I], down_bias [E, H]."""
        self.gate_up = gate_up
        self.down = down
        self.gate_up_bias = gate_up_bias
        self.down_bias = down_bias

    @property
    def experts(self) -> int:
        """E."""
        return int(self.gate_up.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes held, biases included."""
        held = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return sum(tensor.nbytes for tensor in held if tensor is not None)


def pack_experts(parts: Iterable[ExpertParts], experts: int, matrix: Callable[[WeightPart], Tensor]) -> ExpertMatrices:
    """See `kernels.moe.ExpertOps.pack_experts`. matrix: a part as floats on the device. Memory for all is taken with
    the first expert, so that no more than one is there twice."""
    packed: ExpertMatrices | None = None
    count = 0
    for part in parts:
        gate_up = torch.cat([matrix(rows) for rows in part.gate_up])
        down = matrix(part.down)
        if packed is None:
            packed = _allocate(experts, gate_up, down, part)
        shape = (int(packed.gate_up.shape[1]), int(packed.gate_up.shape[2]))
        check_expert(part, shape, (gate_up.shape[0], gate_up.shape[1]))
        check_expert(part, shape, (2 * down.shape[1], down.shape[0]))
        if count == experts:
            raise ValueError(f"{experts} experts are needed, not more")
        packed.gate_up[count], packed.down[count] = gate_up, down
        for into, bias in ((packed.gate_up_bias, part.gate_up_bias), (packed.down_bias, part.down_bias)):
            if (into is None) != (bias is None):
                raise ValueError("either all experts of a layer have a bias or none has")
            if into is not None and bias is not None:
                into[count] = bias
        count += 1
    if packed is None or count != experts:
        raise ValueError(f"{experts} experts are needed, not {count}")
    return packed


def _allocate(experts: int, gate_up: Tensor, down: Tensor, part: ExpertParts) -> ExpertMatrices:
    def memory(like: Tensor, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(experts, *shape, dtype=gate_up.dtype, device=like.device)

    return ExpertMatrices(
        memory(gate_up, tuple(gate_up.shape)),
        memory(down, tuple(down.shape)),
        None if part.gate_up_bias is None else memory(gate_up, (gate_up.shape[0],)),
        None if part.down_bias is None else memory(down, (down.shape[0],)),
    )


def run_experts(
    x: Tensor,
    weights: ExpertWeights,
    ids: Tensor,
    scales: Tensor,
    activation: Activation = "silu",
    *,
    deterministic: bool = False,
    tiles: tuple[Tile, Tile] | None = None,
) -> Tensor:
    """See `kernels.moe.ExpertOps.run_experts`. deterministic: a row's bits depend on that row alone. tiles: in place of
    `choose_tiles`. Raises TypeError or ValueError for what does not fit."""
    if not isinstance(weights, ExpertMatrices):
        raise TypeError(f"these experts were packed by another implementation: {type(weights).__name__}")
    experts, hidden, inner = weights.down.shape
    check_call(x, hidden, ids, scales)
    if x.dtype != weights.gate_up.dtype:
        raise ValueError(f"x and the experts are of one type, not {x.dtype} and {weights.gate_up.dtype}")
    top_k, pairs = ids.shape[1], ids.numel()
    out = torch.empty_like(x)
    if not pairs:
        return out.zero_()
    first, second = tiles or choose_tiles(pairs, experts, x.dtype, deterministic=deterministic)
    plan: Sorted = sort_pairs(ids.contiguous(), experts, first.m)
    active = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    gate_up_experts[(plan.max_blocks, triton.cdiv(inner, first.n))](
        x.contiguous(), weights.gate_up, weights.gate_up_bias, plan.order, plan.blocks, active, plan.max_blocks,
        TOP_K=top_k, HIDDEN=hidden, INNER=inner, KIND=KINDS[activation], **first.constants,
        num_warps=first.num_warps, num_stages=first.num_stages,
    )  # fmt: skip
    parts = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    down_experts[(plan.max_blocks, triton.cdiv(hidden, second.n))](
        active, weights.down, weights.down_bias, plan.order, plan.blocks, parts, plan.max_blocks,
        HIDDEN=hidden, INNER=inner, **second.constants, num_warps=second.num_warps, num_stages=second.num_stages,
    )  # fmt: skip
    add_experts[(x.shape[0], triton.cdiv(hidden, SUM_BLOCK))](
        parts, ids, scales, out, HIDDEN=hidden, TOP_K=top_k, BLOCK=SUM_BLOCK, num_warps=4
    )
    return out


_LAYERS: dict[str, tuple[int, int, int, int, Activation]] = {
    "mixtral 8x7b": (8, 2, 4096, 14336, "silu"),
    "qwen3 30b": (128, 8, 2048, 768, "silu"),
    "gpt-oss 20b": (32, 4, 2880, 2880, "clamped_silu"),
    "deepseek v3": (256, 8, 7168, 2048, "silu"),
}
"""Experts, experts of a token, hidden and inner size, activation of known models."""


def configurations() -> Iterator[Configuration]:
    """Every known model's experts in every type, with every tile that a batch can have."""
    for dtype in ACTIVATIONS:
        for name, (experts, top_k, hidden, inner, activation) in _LAYERS.items():
            seen = set()
            for rows in (1, 32, 64, 128):
                tiles = choose_tiles(rows * experts, experts, dtype)
                if tiles not in seen:
                    seen.add(tiles)
                    yield from _products(dtype, name, tiles, top_k, hidden, inner, activation)
            kind = POINTERS[dtype]
            yield Configuration(
                kernel=add_experts,
                name=f"{kind[1:]} {name}",
                signature={"parts": kind, "ids": "*i32", "scales": "*fp32", "out": kind},
                constants={"HIDDEN": hidden, "TOP_K": top_k, "BLOCK": SUM_BLOCK},
                hot=dtype is torch.bfloat16 and name == "qwen3 30b",
            )


def _products(
    dtype: torch.dtype,
    name: str,
    tiles: tuple[Tile, Tile],
    top_k: int,
    hidden: int,
    inner: int,
    activation: Activation,
) -> Iterator[Configuration]:
    kind, biased = POINTERS[dtype], activation == "clamped_silu"
    pointers = dict.fromkeys(("x", "weight", "out", *(("bias",) if biased else ())), kind)
    signature = pointers | {"order": "*i32", "blocks": "*i32", "max_blocks": "i32"}
    shape = {"HIDDEN": hidden, "INNER": inner} | ({} if biased else {"bias": None})
    kernels: tuple[tuple[Any, Tile, dict[str, int]], ...] = (
        (gate_up_experts, tiles[0], {"TOP_K": top_k, "KIND": KINDS[activation]}),
        (down_experts, tiles[1], {}),
    )
    for kernel, tile, more in kernels:
        yield Configuration(
            kernel=kernel,
            name=f"{kind[1:]} {name} {tile.m}x{tile.n}x{tile.k}",
            signature=signature,
            constants=shape | more | tile.constants,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            hot=dtype is torch.bfloat16 and name == "qwen3 30b" and tile.m == 16,
        )
