"""Log-probabilities of the rows that ask: of the chosen token and of the 20 most probable ones, under softmax(logits).

logits float32 [R, V] contiguous, as the model gave them, before edits; rows int32 [R] point into `SamplingRows`, whose
column LOGPROBS is −1 for requests that want none; tokens int32 [R] are the chosen ones. Every tile of a row hands its
20 largest logits, packed with their ids, to a second kernel that merges them: lowest id first among equals. A row that
does not ask costs a look at its parameters and gets zeros.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling_rows import COLUMNS, LOGPROBS, SamplingRows
from kernels.triton.configuration import Configuration
from kernels.triton.ordering import SMALLEST_KEY, order_key, pack, packed_id, packed_key, value_of
from kernels.triton.sampling import MAX_VOCAB

TILE = 2048
TOP = 20
"""Most alternatives that a request may ask for."""

_COLUMNS, _LOGPROBS = tl.constexpr(COLUMNS), tl.constexpr(LOGPROBS)
_NOTHING = tl.constexpr(-0x7FFFFFFFFFFFFFFF)


@triton.jit
def _top_of_tiles(
    logits, rows, parameters, packs, masses, vocab, TILES: tl.constexpr, TILE: tl.constexpr, TOP: tl.constexpr
):
    r = tl.program_id(0)
    tile = tl.program_id(1)
    request = tl.load(rows + r)
    asked = tl.load(parameters + tl.maximum(request, 0) * _COLUMNS + _LOGPROBS)
    if (request >= 0) & (asked >= 0.0):
        ids = tile * TILE + tl.arange(0, TILE)
        x = tl.load(logits + r.to(tl.int64) * vocab + ids, mask=ids < vocab, other=float("-inf"))
        packed = tl.where(ids < vocab, pack(order_key(x), ids), _NOTHING)
        for place in range(TOP):
            best = tl.max(packed, axis=0)
            tl.store(packs + (r * TILES + tile) * TOP + place, best)
            if place == 0:
                largest = value_of(packed_key(best))
                largest = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)
                tl.store(masses + r * TILES + tile, tl.sum(tl.exp(x - largest), axis=0))
            packed = tl.where(packed == best, _NOTHING, packed)


@triton.jit
def _merge(
    logits, rows, parameters, tokens, packs, masses, chosen, top_ids, top_logprobs, vocab,
    TILES: tl.constexpr, WIDTH: tl.constexpr, ENTRIES: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    request = tl.load(rows + r)
    token = tl.load(tokens + r)
    asked = tl.load(parameters + tl.maximum(request, 0) * _COLUMNS + _LOGPROBS)
    if (request >= 0) & (token >= 0) & (asked >= 0.0):
        tiles = tl.arange(0, WIDTH)
        inside = tiles < TILES
        first = tl.load(packs + (r * TILES + tiles) * TOP, mask=inside, other=_NOTHING)
        largest = value_of(packed_key(tl.max(first, axis=0)))
        of_tile = tl.where(inside, value_of(packed_key(first)), float("-inf"))
        of_tile = tl.where(of_tile > float("-inf"), of_tile, largest)
        mass = tl.load(masses + r * TILES + tiles, mask=inside, other=0.0)
        mass = tl.where(inside & (packed_key(first) > SMALLEST_KEY), mass, 0.0)
        normaliser = largest + tl.log(tl.sum(mass * tl.exp(of_tile - largest), axis=0))
        tl.store(chosen + r, tl.load(logits + r.to(tl.int64) * vocab + token) - normaliser)
        entries = tl.arange(0, ENTRIES)
        packed = tl.load(packs + r * (TILES * TOP) + entries, mask=entries < TILES * TOP, other=_NOTHING)
        for place in range(TOP):
            best = tl.max(packed, axis=0)
            tl.store(top_ids + r * TOP + place, packed_id(best))
            tl.store(top_logprobs + r * TOP + place, value_of(packed_key(best)) - normaliser)
            packed = tl.where(packed == best, _NOTHING, packed)


def logprobs(logits: Tensor, rows: Tensor, tokens: Tensor, state: SamplingRows) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probability of each token float32 [R], ids int32 [R, 20] and log-probabilities float32 [R, 20] of the most
    probable tokens, largest first), natural logarithms. Places past the vocabulary's size mean nothing. Raises
    ValueError for shapes that do not fit."""
    count, vocab = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous() or not 0 < vocab <= MAX_VOCAB:
        raise ValueError(f"contiguous float32 logits [R, 1 to {MAX_VOCAB}] are needed, not {list(logits.shape)}")
    if rows.shape != (count,) or tokens.shape != (count,):
        raise ValueError(f"{count} rows of logits need as many rows and tokens")
    device, tiles = logits.device, -(-vocab // TILE)
    packs = torch.empty(count, tiles, TOP, dtype=torch.int64, device=device)
    masses = torch.empty(count, tiles, dtype=torch.float32, device=device)
    chosen = torch.zeros(count, dtype=torch.float32, device=device)
    top_ids = torch.zeros(count, TOP, dtype=torch.int32, device=device)
    top_logprobs = torch.zeros(count, TOP, dtype=torch.float32, device=device)
    if count:
        _top_of_tiles[(count, tiles)](
            logits, rows, state.parameters, packs, masses, vocab, TILES=tiles, TILE=TILE, TOP=TOP, num_warps=4
        )
        _merge[(count,)](
            logits, rows, state.parameters, tokens, packs, masses, chosen, top_ids, top_logprobs, vocab, TILES=tiles,
            TOP=TOP, num_warps=4, **_widths(tiles),
        )  # fmt: skip
    return chosen, top_ids, top_logprobs


def _widths(tiles: int) -> dict[str, int]:
    """Powers of two that hold a row's tiles and their entries."""
    return {"WIDTH": max(2, triton.next_power_of_2(tiles)), "ENTRIES": triton.next_power_of_2(tiles * TOP)}


def configurations() -> Iterator[Configuration]:
    """Known vocabularies."""
    for vocab in (32000, 49152, 128256, 151936, 262144):
        tiles = -(-vocab // TILE)
        common = {
            "logits": "*fp32", "rows": "*i32", "parameters": "*fp64", "packs": "*i64", "masses": "*fp32",
            "vocab": "i32",
        }  # fmt: skip
        hot = vocab == 128256
        yield Configuration(
            kernel=_top_of_tiles,
            name=f"v{vocab}",
            signature=common,
            constants={"TILES": tiles, "TILE": TILE, "TOP": TOP},
            hot=hot,
        )
        results = {"tokens": "*i32", "chosen": "*fp32", "top_ids": "*i32", "top_logprobs": "*fp32"}
        yield Configuration(
            kernel=_merge,
            name=f"v{vocab}",
            signature={**common, **results},
            constants={"TILES": tiles, "TOP": TOP, **_widths(tiles)},
            hot=hot,
        )
