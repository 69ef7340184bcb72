"""Routing of tokens to experts, and the sorting of tokens by expert, on the device.

`route`: a program chooses the experts of one row. Chosen ones are taken out one by one, the largest first and of equals
the lowest number, as `kernels.reference_moe.route` defines it.

`sort_pairs`: a pair is a token with one of its experts, pair p is (token p // K, its p % K-th). Two launches without
atomics, so that the order is the same every time: a program for each expert counts its pairs, then each writes the
numbers of its own behind those of the experts before it, and cuts them into blocks of at most BLOCK_M rows. How many
blocks there may be depends on the numbers of pairs and experts alone, so that one CUDA graph serves any routing; what
is left of the list says so. Idea of blocks that belong to one expert each: MegaBlocks (arXiv 2211.15841).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.moe import Routing
from kernels.triton.attention_shape import power_of_two
from kernels.triton.configuration import ACTIVATIONS, POINTERS, Configuration

CHUNK = 1024
"""Pairs that a program of the sorting looks at together."""


@triton.jit
def _first_of_largest(values, numbers, NONE: tl.constexpr):
    """The lowest number whose value is the largest."""
    return tl.min(tl.where(values == tl.max(values, 0), numbers, NONE), 0)


@triton.jit(do_not_specialize_on_alignment=["bias"])
def route_row(
    logits, bias, ids, weights, scale,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Program (row): logits [T, EXPERTS] → ids int32 [T, TOP_K], weights float32 [T, TOP_K]; bias float32 [EXPERTS]."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < EXPERTS
    nothing = float("-inf")
    score = tl.load(logits + row * EXPERTS + expert, mask=inside, other=nothing).to(tl.float32)
    top = tl.max(score, 0)
    if SIGMOID:
        small = tl.exp(-tl.abs(score))
        score = tl.where(score >= 0, 1.0, small) / (1.0 + small)
    by = score
    if bias is not None:
        by += tl.load(bias + expert, mask=inside, other=0.0)
    by = tl.where(inside, by, nothing)
    if GROUPS > 1:
        SIZE: tl.constexpr = EXPERTS // GROUPS
        group = expert // SIZE
        worth = tl.full([BLOCK], nothing, tl.float32)
        for g in tl.static_range(GROUPS):
            mine = tl.where(inside & (group == g), by, nothing)
            best = _first_of_largest(mine, expert, EXPERTS - 1)
            both = tl.max(mine, 0) + tl.max(tl.where(expert == best, nothing, mine), 0)
            worth = tl.where(inside & (group == g), both, worth)
        closed = by
        by = tl.full([BLOCK], nothing, tl.float32)
        for _ in tl.static_range(TOP_GROUPS):
            chosen_group = _first_of_largest(worth, expert, EXPERTS - 1) // SIZE
            by = tl.where(inside & (group == chosen_group), closed, by)
            worth = tl.where(group == chosen_group, nothing, worth)
    place = tl.arange(0, BLOCK_K)
    found = tl.zeros([BLOCK_K], tl.int32)
    weight = tl.full([BLOCK_K], 0.0 if SIGMOID else float("-inf"), tl.float32)
    for k in tl.static_range(TOP_K):
        best = _first_of_largest(by, expert, EXPERTS - 1)
        found = tl.where(place == k, best, found)
        weight = tl.where(place == k, tl.sum(tl.where(expert == best, tl.where(inside, score, 0.0), 0.0), 0), weight)
        by = tl.where(expert == best, nothing, by)
    if not SIGMOID:
        if NORMALIZE:
            top = tl.max(weight, 0)
        weight = tl.exp(weight - top)
        if not NORMALIZE:
            weight = weight / tl.sum(tl.exp(score - top), 0)
    if NORMALIZE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    tl.store(ids + row * TOP_K + place, found, mask=place < TOP_K)
    tl.store(weights + row * TOP_K + place, weight * scale, mask=place < TOP_K)


@triton.jit(do_not_specialize=["pairs"])
def count_pairs(ids, counts, pairs, CHUNK: tl.constexpr):
    """Program (expert): counts int32 [E] of its pairs among ids int32 [pairs]."""
    expert = tl.program_id(0)
    count = tl.zeros([CHUNK], tl.int32)
    for start in range(0, pairs, CHUNK):
        at = start + tl.arange(0, CHUNK)
        count += (tl.load(ids + at, mask=at < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(count, 0))


@triton.jit(do_not_specialize=["pairs", "max_blocks"])
def place_pairs(
    ids, counts, order, blocks, pairs, max_blocks,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (expert): writes its pairs' numbers into order int32 [pairs], and its blocks into blocks int32
    [3, max_blocks]: expert (−1: no block), first place in `order`, rows. The last expert ends the list."""
    expert = tl.program_id(0)
    other = tl.arange(0, BLOCK_E)
    count = tl.load(counts + other, mask=other < EXPERTS, other=0)
    cut = (count + BLOCK_M - 1) // BLOCK_M
    begin = tl.sum(tl.where(other < expert, count, 0), 0)
    block = tl.sum(tl.where(other < expert, cut, 0), 0)
    mine = tl.sum(tl.where(other == expert, count, 0), 0)
    at = begin
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        wanted = (tl.load(ids + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
        tl.store(order + at + tl.cumsum(wanted, 0) - 1, pair, mask=wanted > 0)
        at += tl.sum(wanted, 0)
    for done in range(0, mine, BLOCK_M):
        tl.store(blocks + block, expert)
        tl.store(blocks + max_blocks + block, begin + done)
        tl.store(blocks + 2 * max_blocks + block, tl.minimum(mine - done, BLOCK_M))
        block += 1
    if expert == EXPERTS - 1:
        for rest in range(block, max_blocks, CHUNK):
            empty = rest + tl.arange(0, CHUNK)
            tl.store(blocks + empty, -1, mask=empty < max_blocks)


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `kernels.moe.ExpertOps.route`. Raises ValueError for shapes that do not fit."""
    if logits.dim() != 2 or logits.shape[1] != routing.experts:
        raise ValueError(f"routing needs logits of [T, {routing.experts}], not {list(logits.shape)}")
    if bias is not None and (bias.shape != (routing.experts,) or bias.dtype != torch.float32):
        raise ValueError(f"the bias of the choice must be float32 [{routing.experts}]")
    shape = (logits.shape[0], routing.top_k)
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    if ids.numel():
        route_row[(shape[0],)](
            logits.contiguous(), bias, ids, weights, float(routing.scale), **_constants(routing), num_warps=1
        )
    return ids, weights


def _constants(routing: Routing) -> dict[str, int]:
    return {
        "EXPERTS": routing.experts,
        "BLOCK": power_of_two(routing.experts),
        "TOP_K": routing.top_k,
        "BLOCK_K": power_of_two(routing.top_k),
        "GROUPS": routing.groups,
        "TOP_GROUPS": routing.top_groups,
        "SIGMOID": routing.scoring == "sigmoid",
        "NORMALIZE": routing.normalize,
    }


@dataclass(frozen=True, slots=True)
class Sorted:
    """Pairs by expert, and the blocks of rows that belong to one expert each."""

    order: Tensor
    """int32 [pairs]: numbers of pairs; those without an expert are left out at the end, where nothing is written"""
    blocks: Tensor
    """int32 [3, max_blocks]"""

    @property
    def max_blocks(self) -> int:
        """Length of the list of blocks."""
        return int(self.blocks.shape[1])


def sort_pairs(ids: Tensor, experts: int, block_m: int) -> Sorted:
    """ids int32 [T, K], below 0 for none → pairs sorted by expert in blocks of up to block_m."""
    pairs = ids.numel()
    most = min(pairs, pairs // block_m + experts)
    counts = torch.empty(experts, dtype=torch.int32, device=ids.device)
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    blocks = torch.empty(3, most, dtype=torch.int32, device=ids.device)
    count_pairs[(experts,)](ids, counts, pairs, CHUNK=CHUNK, num_warps=4)
    place_pairs[(experts,)](
        ids, counts, order, blocks, pairs, most,
        EXPERTS=experts, BLOCK_E=power_of_two(experts), BLOCK_M=block_m, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    return Sorted(order, blocks)


ROUTINGS = {
    "mixtral 8x7b": Routing(experts=8, top_k=2, normalize=True),
    "qwen3 30b": Routing(experts=128, top_k=8, normalize=True),
    "qwen3 without normalisation": Routing(experts=128, top_k=8),
    "gpt-oss 20b": Routing(experts=32, top_k=4, normalize=True),
    "gpt-oss 120b": Routing(experts=128, top_k=4, normalize=True),
    "deepseek v3": Routing(
        experts=256, top_k=8, scoring="sigmoid", normalize=True, groups=8, top_groups=4, scale=2.5
    ),
}  # fmt: skip
"""Of known models."""


def configurations() -> Iterator[Configuration]:
    """Every known model's routing in every type, and the sorting for its number of experts."""
    for dtype in ACTIVATIONS:
        for name, routing in ROUTINGS.items():
            biased = routing.scoring == "sigmoid"
            yield Configuration(
                kernel=route_row,
                name=f"{POINTERS[dtype][1:]} {name}",
                signature={"logits": POINTERS[dtype], "ids": "*i32", "weights": "*fp32", "scale": "fp32"}
                | ({"bias": "*fp32"} if biased else {}),
                constants=_constants(routing) | ({} if biased else {"bias": None}),
                unaligned=("bias",) if biased else (),
                num_warps=1,
                hot=dtype is torch.bfloat16 and name in ("qwen3 30b", "deepseek v3"),
            )
    yield Configuration(
        kernel=count_pairs,
        name="any",
        signature={"ids": "*i32", "counts": "*i32", "pairs": "i32"},
        constants={"CHUNK": CHUNK},
        hot=True,
    )
    for experts in (8, 32, 128, 256):
        for block_m in (16, 32, 64, 128):
            yield Configuration(
                kernel=place_pairs,
                name=f"{experts} experts, {block_m} rows",
                signature=dict.fromkeys(("ids", "counts", "order", "blocks"), "*i32")
                | dict.fromkeys(("pairs", "max_blocks"), "i32"),
                constants={"EXPERTS": experts, "BLOCK_E": power_of_two(experts), "BLOCK_M": block_m, "CHUNK": CHUNK},
                hot=(experts, block_m) == (128, 16),
            )
