"""Long sequences cut along their keys: the work list, made on the device, and the merge of the parts.

One program per block of queries leaves a GPU idle when few sequences are long. `plan_splits` gives each sequence a
number of parts such that no part is longer than the average share of a GPU's programs, from the lengths as they lie on
the device: nothing is copied to the host and no grid depends on them. With a chunk of C = all blocks' keys / slots, the
items are at most blocks + slots, those of blocks that are split at most 2·slots, and such blocks at most slots, which
bounds grids and memory.

The work list, int32 [4, S + 1]: row 0, first item of each sequence; row 1, parts of each of its blocks; row 2, first
part of each sequence among all parts that are to be merged; row 3, first block among those that are.

Source of the idea of per-sequence part counts from lengths on the device: SGLang's Triton backend; of a chunk that
balances all of a batch: FlashInfer's scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.architecture import Architecture, architecture
from kernels.triton.attention_shape import (
    LATENT,
    AttentionShape,
    Tile,
    choose_tile,
    compiled_shapes,
    compiled_tiles,
    power_of_two,
)
from kernels.triton.configuration import POINTERS, Configuration
from kernels.triton.dot import narrow

MIN_CHUNK = 128
"""Keys of a part at least: below, merging costs more than it saves."""
WAVES = 2
"""Programs per multiprocessor that splitting aims at."""
MERGED_AT_ONCE = 16
"""Parts that a merging program holds at a time."""


@triton.jit
def find_row(starts, item, count, RISE: tl.constexpr, UNIT: tl.constexpr):
    """The last s in [0, count) with starts[s] // UNIT + RISE·s ≤ item, by binary search; item ≥ the value at 0."""
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // UNIT + RISE * middle <= item:
            low = middle
        else:
            high = middle
    return low


@triton.jit(
    do_not_specialize=["num_seqs", "window", "slots", "min_chunk", "block_q"],
    do_not_specialize_on_alignment=["plan", "q_starts", "kv_lens"],
)
def make_plan(plan, q_starts, kv_lens, num_seqs, window, slots, min_chunk, block_q, BLOCK_S: tl.constexpr):
    """One program writes the whole work list."""
    s = tl.arange(0, BLOCK_S)
    live = s < num_seqs
    start = tl.load(q_starts + s, mask=live, other=0)
    q_len = tl.load(q_starts + s + 1, mask=live, other=0) - start
    span = tl.load(kv_lens + s, mask=live, other=0)
    if window > 0:
        span = tl.minimum(span, window + block_q)
    blocks = (q_len + block_q - 1) // block_q
    keys = tl.sum(blocks.to(tl.int64) * span)
    chunk = tl.maximum((keys + slots - 1) // slots, min_chunk).to(tl.int32)
    splits = tl.maximum((span + chunk - 1) // chunk, 1)
    items = blocks * splits
    is_split = splits > 1
    row = num_seqs + 1
    zero = tl.zeros([BLOCK_S], tl.int32)
    first = s == 0
    tl.store(plan + 1 + s, tl.cumsum(items, 0), mask=live)
    tl.store(plan + row + s, splits, mask=live)
    tl.store(plan + 2 * row + 1 + s, tl.cumsum(tl.where(is_split, items, 0), 0), mask=live)
    tl.store(plan + 3 * row + 1 + s, tl.cumsum(tl.where(is_split, blocks, 0), 0), mask=live)
    tl.store(plan + s, zero, mask=first)
    tl.store(plan + 2 * row + s, zero, mask=first)
    tl.store(plan + 3 * row + s, zero, mask=first)


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["q_starts", "plan"])
def merge(
    out, part_acc, part_stats, q_starts, plan, num_seqs,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program (split block, query row, head tile): the row's result from its parts, PARTS at a time, always in the same
    order."""
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    index = tl.program_id(0)
    row = tl.program_id(1)
    tile = tl.program_id(2)
    table_row = num_seqs + 1
    groups = plan + 3 * table_row
    if index >= tl.load(groups + num_seqs):
        return
    seq = find_row(groups, index, num_seqs, 0, 1)
    block = index - tl.load(groups + seq)
    q_start = tl.load(q_starts + seq)
    local = block * BLOCK_Q + row // HEADS
    head = (tile % HEAD_TILES) * HEADS + row % HEADS
    if (local >= tl.load(q_starts + seq + 1) - q_start) | (head >= GROUP):
        return
    splits = tl.load(plan + table_row + seq)
    part = tl.load(plan + 2 * table_row + seq) + block * splits
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    total = 0.0
    top = float("-inf")
    for begin in range(0, splits, PARTS):
        n = begin + tl.arange(0, PARTS)
        at = ((part + n) * tl.num_programs(2) + tile).to(tl.int64) * BLOCK_M + row
        tops = tl.load(part_stats + at * 2, mask=n < splits, other=float("-inf"))
        totals = tl.load(part_stats + at * 2 + 1, mask=n < splits, other=0.0)
        rows = tl.load(
            part_acc + at[:, None] * D + dims[None, :], mask=(n < splits)[:, None] & (dims < D)[None, :], other=0.0
        )
        higher = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(tops - base)
        shrink = tl.exp2(top - base)
        acc = acc * shrink + tl.sum(rows * weights[:, None], 0)
        total = total * shrink + tl.sum(totals * weights, 0)
        top = higher
    acc = acc / tl.where(total > 0.0, total, 1.0)
    at = ((q_start + local) * KV_HEADS + tile // HEAD_TILES).to(tl.int64) * (GROUP * D) + head * D
    tl.store(out + at + dims, narrow(acc, out.dtype.element_ty), mask=dims < D)


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """A work list on the device, good for every layer of a step with the same shape and window."""

    table: Tensor
    """int32 [4, S + 1], see the head of this file"""
    slots: int
    """Items that splitting may add"""
    block_q: int
    """Tokens of a block that the list was made for"""

    def parts(self, shape: AttentionShape, tile: Tile) -> tuple[Tensor, Tensor]:
        """Memory for parts that wait to be merged: float32 [2·slots, head tiles, BLOCK_M, D], and the largest score and
        sum of weights of each row, [2·slots, head tiles, BLOCK_M, 2]."""
        rows = (2 * self.slots, shape.kv_heads * shape.head_tiles(tile), tile.block_m)
        device = self.table.device
        acc = torch.empty(*rows, shape.head_dim, dtype=torch.float32, device=device)
        return acc, torch.empty(*rows, 2, dtype=torch.float32, device=device)


def plan_splits(
    q_starts: Tensor,
    kv_lens: Tensor,
    tokens: int,
    shape: AttentionShape,
    *,
    window: int = 0,
    decode: bool = False,
    arch: Architecture | None = None,
    min_chunk: int = MIN_CHUNK,
) -> SplitPlan:
    """The work list of a batch with `tokens` rows, padding included. q_starts int32 [S + 1], kv_lens int32 [S]."""
    arch = arch or architecture(q_starts.device)
    tile = choose_tile(arch, shape, tokens, decode=decode)
    slots = max(1, WAVES * arch.sms // (shape.kv_heads * shape.head_tiles(tile)))
    seqs = kv_lens.shape[0]
    table = torch.empty(4, seqs + 1, dtype=torch.int32, device=q_starts.device)
    block_q = tile.block_q(shape.group)
    make_plan[(1,)](
        table,
        q_starts,
        kv_lens,
        seqs,
        window,
        slots,
        min_chunk,
        block_q,
        BLOCK_S=max(16, power_of_two(seqs)),
        num_warps=4,
        num_stages=1,
    )
    return SplitPlan(table, slots, block_q)


def merge_parts(
    out: Tensor, acc: Tensor, stats: Tensor, plan: SplitPlan, q_starts: Tensor, shape: AttentionShape, tile: Tile
) -> None:
    """Write the rows of out [T, Hq·D] whose keys were split, from their parts."""
    rows = plan.block_q * tile.heads(shape.group)
    merge[(plan.slots, rows, shape.kv_heads * shape.head_tiles(tile))](
        out,
        acc,
        stats,
        q_starts,
        plan.table,
        q_starts.shape[0] - 1,
        **_merge_constants(shape, tile),
        num_warps=_merge_warps(shape),
        num_stages=1,
    )


def _merge_constants(shape: AttentionShape, tile: Tile) -> dict[str, int]:
    constants = tile.constants(shape)
    names = ("GROUP", "KV_HEADS", "D", "BLOCK_D", "BLOCK_M", "HEADS")
    return {name: constants[name] for name in names} | {"PARTS": MERGED_AT_ONCE}


def _merge_warps(shape: AttentionShape) -> int:
    return 4 if shape.block_d >= 128 else 2


def configurations() -> Iterator[Configuration]:
    """What the launches of both kernels compile to."""
    for seqs in (16, 32, 64, 128, 256, 512, 1024):
        yield Configuration(
            kernel=make_plan,
            name=f"{seqs} sequences",
            signature=dict.fromkeys(("plan", "q_starts", "kv_lens"), "*i32")
            | dict.fromkeys(("num_seqs", "window", "slots", "min_chunk", "block_q"), "i32"),
            constants={"BLOCK_S": seqs},
            unaligned=("plan", "q_starts", "kv_lens"),
            num_stages=1,
            hot=seqs == 256,
        )
    seen = set()
    for shape in (*compiled_shapes(), LATENT):
        for tile, min_arch in compiled_tiles(shape):
            constants = _merge_constants(shape, tile)
            name = f"{str(shape.q_dtype).removeprefix('torch.')} {' '.join(map(str, constants.values()))}"
            if name in seen:
                continue
            seen.add(name)
            yield Configuration(
                kernel=merge,
                name=name,
                signature={"out": POINTERS[shape.q_dtype], "num_seqs": "i32"}
                | dict.fromkeys(("part_acc", "part_stats"), "*fp32")
                | dict.fromkeys(("q_starts", "plan"), "*i32"),
                constants=constants,
                unaligned=("q_starts", "plan"),
                num_warps=_merge_warps(shape),
                num_stages=1,
                min_arch=min_arch,
                hot=name == "bfloat16 4 8 128 128 16 4 16",
            )
