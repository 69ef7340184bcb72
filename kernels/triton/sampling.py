"""Choosing each row's next token on the device: the largest logit, or a draw by Gumbel-max after truncation.

logits float32 [R, V] contiguous, V up to 262,144; rows int32 [R] point into `SamplingRows` (−1 is padding); positions
int32 [R] are those of the tokens to be chosen. Two kernels: `_scan` runs over tiles of every row and leaves each tile's
largest logit, mass and best noisy score; `_choose`, one program a row, finishes from these. A greedy row reads its
logits once. A draw without truncation computes float32 scores of every token, and the host's float64 scores only in the
tiles whose best comes near the largest, so that the token is the one that `kernels.sampling` draws from equal logits.
A truncated row passes over its logits some ten times more (truncation.py).

The chosen token is written to the result and, where asked, into the token table that the next step reads and into the
row's counts. A row whose largest logit is not finite gives −1.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling_rows import COLUMNS, SamplingRows
from kernels.triton.configuration import Configuration
from kernels.triton.noise import gumbel, gumbel_estimate, noise_hash, noise_key
from kernels.triton.ordering import LARGEST_KEY, SMALLEST_KEY, order_key, pack, packed_id, packed_key, value_of
from kernels.triton.truncation import cut

TILE = 2048
"""Tokens of one program of the first kernel."""

MAX_VOCAB = 1 << 18

_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P = (tl.constexpr(column) for column in range(4))
_REPETITION, _FREQUENCY, _PRESENCE = (tl.constexpr(column) for column in range(4, 7))
_COLUMNS = tl.constexpr(COLUMNS)
_NO_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _scan(
    logits, rows, positions, parameters, seeds, packs, masses, scores, vocab,
    TILES: tl.constexpr, TILE: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    tile = tl.program_id(1)
    request = tl.load(rows + r)
    if request >= 0:
        ids = tile * TILE + tl.arange(0, TILE)
        x = tl.load(logits + r.to(tl.int64) * vocab + ids, mask=ids < vocab, other=float("-inf"))
        best = tl.max(pack(order_key(x), ids), axis=0)
        tl.store(packs + r * TILES + tile, best)
        if not GREEDY:
            temperature = tl.load(parameters + request * _COLUMNS + _TEMPERATURE)
            if temperature > 0.0:
                per_degree = (1.0 / temperature).to(tl.float32)
                largest = value_of(packed_key(best))
                # An infinite largest would make NaN of itself; such rows and tiles are recognised by their key
                largest = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)
                tl.store(masses + r * TILES + tile, tl.sum(tl.exp((x - largest) * per_degree), axis=0))
                low, high = noise_key(tl.load(seeds + request), tl.load(positions + r))
                estimate = x * per_degree + gumbel_estimate(noise_hash(ids, low, high))
                tl.store(scores + r * TILES + tile, tl.max(estimate, axis=0))


@triton.jit
def _draw_from(row, vocab, tile, key, room, floor, temperature, low, high, best, chosen, TILE: tl.constexpr):
    """The best float64 score of a tile's kept tokens against the best so far; and how much room is left."""
    ids = tile * TILE + tl.arange(0, TILE)
    x = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
    keys = order_key(x)
    equal = (keys == key).to(tl.int32)
    kept = (keys > key) | ((keys == key) & (tl.cumsum(equal, axis=0) <= room))
    wide = x.to(tl.float64)
    kept = kept & (wide >= floor) & (ids < vocab)
    score = tl.where(kept, wide / temperature + gumbel(noise_hash(ids, low, high)), float("-inf"))
    top = tl.max(score, axis=0)
    candidate = tl.min(tl.where(kept & (score == top), ids, _NO_ID), axis=0)
    better = top > best
    chosen = tl.where(better, candidate, chosen)
    return tl.where(better, top, best), chosen, room - tl.minimum(tl.sum(equal, axis=0), room)


@triton.jit
def _choose(
    logits, rows, positions, parameters, seeds, packs, masses, scores, counts, table, out, vocab, table_width,
    TILES: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    request = tl.load(rows + r)
    token = tl.full((), -1, tl.int32)
    if request >= 0:
        tiles = tl.arange(0, WIDTH)
        held = tl.load(packs + r * TILES + tiles, mask=tiles < TILES, other=-0x7FFFFFFFFFFFFFFF)
        best = tl.max(held, axis=0)
        largest_key = packed_key(best)
        if (largest_key < LARGEST_KEY) & (largest_key > SMALLEST_KEY):
            token = packed_id(best)
            if not GREEDY:
                parameter = parameters + request * _COLUMNS
                temperature = tl.load(parameter + _TEMPERATURE)
                if temperature > 0.0:
                    row = logits + r.to(tl.int64) * vocab
                    largest = value_of(largest_key)
                    top_k = tl.load(parameter + _TOP_K).to(tl.int32)
                    top_p = tl.load(parameter + _TOP_P).to(tl.float32)
                    min_p = tl.load(parameter + _MIN_P)
                    key = tl.full((), SMALLEST_KEY, tl.int32)
                    room = tl.full((), _NO_ID, tl.int32)
                    floor = tl.full((), float("-inf"), tl.float64)
                    # A tile is looked at when its key, or in a draw from all tokens its score, reaches a bound
                    wanted = tiles < TILES
                    if ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0) | (min_p > 0.0):
                        per_degree = (1.0 / temperature).to(tl.float32)
                        tile_largest = value_of(packed_key(held))
                        mass = tl.load(masses + r * TILES + tiles, mask=wanted, other=0.0)
                        finite = wanted & (packed_key(held) > SMALLEST_KEY)
                        tile_largest = tl.where(finite, tile_largest, largest)
                        scaled = mass * tl.exp((tile_largest - largest) * per_degree)
                        total = tl.sum(tl.where(finite, scaled, 0.0), axis=0)
                        key, room = cut(row, vocab, top_k, top_p, total, largest_key, largest, per_degree, TILE)
                        if min_p > 0.0:
                            floor = largest.to(tl.float64) + temperature * tl.log(min_p)
                        wanted = wanted & (packed_key(held) >= key)
                    else:
                        score = tl.load(scores + r * TILES + tiles, mask=wanted, other=float("-inf"))
                        bound = tl.max(score, axis=0)
                        wanted = wanted & (score >= bound - 1e-4 - 2e-6 * tl.abs(bound))
                    low, high = noise_key(tl.load(seeds + request), tl.load(positions + r))
                    top = tl.full((), float("-inf"), tl.float64)
                    tile = tl.min(tl.where(wanted, tiles, WIDTH), axis=0)
                    while tile < WIDTH:
                        top, token, room = _draw_from(
                            row, vocab, tile, key, room, floor, temperature, low, high, top, token, TILE
                        )
                        tile = tl.min(tl.where(wanted & (tiles > tile), tiles, WIDTH), axis=0)
                if counts is not None:
                    repetition = tl.load(parameter + _REPETITION)
                    other = tl.abs(tl.load(parameter + _FREQUENCY)) + tl.abs(tl.load(parameter + _PRESENCE))
                    if (repetition != 1.0) | (other > 0.0):
                        at = counts + request.to(tl.int64) * vocab + token
                        count = tl.load(at)
                        tl.store(at, tl.where((count & 0x3FFF) < 0x3FFF, count + 1, count).to(tl.int16))
        if table is not None:
            position = tl.load(positions + r)
            tl.store(table + request.to(tl.int64) * table_width + position, token, mask=position < table_width)
    tl.store(out + r, token)


def sample(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: SamplingRows | None = None,
    *,
    table: Tensor | None = None,
) -> Tensor:
    """The next token of each row, int32 [R]; −1 for padding and for rows that are not finite.

    state None: every row takes its largest logit (lowest id among equals) and nothing else is read. table int32
    [rows, context]: receives each token at its position. Raises ValueError for shapes that do not fit.
    """
    count, vocab = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous() or not 0 < vocab <= MAX_VOCAB:
        raise ValueError(f"contiguous float32 logits [R, 1 to {MAX_VOCAB}] are needed, not {list(logits.shape)}")
    if rows.shape != (count,) or positions.shape != (count,) or (state is not None and state.vocab_size != vocab):
        raise ValueError(f"{count} rows of {vocab} logits need as many rows and positions, and a state of that width")
    out = torch.empty(count, dtype=torch.int32, device=logits.device)
    if not count:
        return out
    tiles = -(-vocab // TILE)
    greedy = state is None
    packs = torch.empty(count, tiles, dtype=torch.int64, device=logits.device)
    sums = None if greedy else torch.empty(2, count, tiles, dtype=torch.float32, device=logits.device)
    arguments = (
        rows, positions, None if state is None else state.parameters, None if state is None else state.seeds, packs,
        None if sums is None else sums[0], None if sums is None else sums[1],
    )  # fmt: skip
    _scan[(count, tiles)](logits, *arguments, vocab, TILES=tiles, TILE=TILE, GREEDY=greedy, num_warps=4)
    _choose[(count,)](
        logits, *arguments, None if state is None else state.counts, table, out, vocab,
        0 if table is None else table.shape[1], TILES=tiles, WIDTH=max(2, triton.next_power_of_2(tiles)), TILE=TILE,
        GREEDY=greedy, num_warps=_warps(greedy),
    )  # fmt: skip
    return out


def _warps(greedy: bool) -> int:
    return 1 if greedy else 16


_VOCABULARIES = (32000, 49152, 128256, 151936, 262144)


def configurations() -> Iterator[Configuration]:
    """Known vocabularies, all greedy and mixed, with and without a token table."""
    for vocab in _VOCABULARIES:
        tiles = -(-vocab // TILE)
        constants = {"TILES": tiles, "TILE": TILE}
        for greedy in (True, False):
            state = {"parameters": "*fp64", "seeds": "*i64", "masses": "*fp32", "scores": "*fp32"}
            absent = dict.fromkeys(state, None) if greedy else {}
            signature = {"logits": "*fp32", "rows": "*i32", "positions": "*i32", "packs": "*i64", "vocab": "i32"}
            signature |= {} if greedy else state
            name = f"v{vocab} {'greedy' if greedy else 'mixed'}"
            yield Configuration(
                kernel=_scan,
                name=name,
                signature=signature,
                constants={**constants, **absent, "GREEDY": greedy},
                unaligned=("scores",),
                hot=vocab == 128256,
            )
            for table in (True, False):
                extra = {
                    "out": "*i32",
                    **({"table": "*i32"} if table else {}),
                    **({} if greedy else {"counts": "*i16"}),
                }
                missing = {**({} if table else {"table": None}), **({"counts": None} if greedy else {})}
                yield Configuration(
                    kernel=_choose,
                    name=f"{name}{' table' if table else ''}",
                    signature={**signature, **extra, "table_width": "i32"},
                    constants={
                        **constants, **absent, **missing, "GREEDY": greedy, "WIDTH": triton.next_power_of_2(tiles),
                    },
                    unaligned=("scores",),
                    num_warps=_warps(greedy),
                    hot=vocab == 128256 and table,
                )  # fmt: skip
