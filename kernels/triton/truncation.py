"""Where top-k and top-p cut a row of logits, without sorting it: multi-way bisection on the logit.

The k-th largest logit is the smallest t such that fewer than k logits are larger; the last logit of the nucleus is the
smallest t such that the larger ones hold less than p of the mass. Both are found among the 2³² float32 numbers, as
integers in the same order (ordering.py), by counting or summing above eight pivots in one pass over the row, which
leaves an eighth of the interval: eleven passes at most, about eight for top-p, whose interval starts at the logit
below which all tokens together hold less than 1 − p. Bisection in place of sorting is the idea of FlashInfer's sampling
kernels ("Sorting-Free GPU Kernels for LLM Sampling", 2025); here it is exact to the last logit, and among equals at the
cut the lowest ids stay.

Sums are float32 in a fixed order: a cut that falls within about 10⁻⁶ of the mass may be one token away from that of
exact arithmetic.
"""

import triton
import triton.language as tl

from kernels.triton.ordering import SMALLEST_KEY, order_key, value_of

PIVOTS = tl.constexpr(8)
"""Parts that one pass cuts the interval into."""


@triton.jit
def _weights(x, largest, per_degree, COUNT: tl.constexpr):
    """What a logit adds: one, or its probability over that of the largest."""
    return tl.full(x.shape, 1.0, tl.float32) if COUNT else tl.exp((x - largest) * per_degree)


@triton.jit
def search(row, vocab, low, high, target, largest, per_degree, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest key in [low, high] above which less than `target` is found (`high` when none is); int64 keys."""
    ways = tl.arange(0, PIVOTS)
    while low < high:
        step = (high - low + PIVOTS) // PIVOTS
        pivots = tl.minimum(low + step * (ways.to(tl.int64) + 1) - 1, high)
        pivot_keys = pivots.to(tl.int32)
        sums = tl.zeros((BLOCK, PIVOTS), dtype=tl.float32)
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
            weights = _weights(x, largest, per_degree, COUNT)
            above = order_key(x)[:, None] > pivot_keys[None, :]
            sums += tl.where(above, weights[:, None], 0.0)
        enough = tl.sum(sums, axis=0) >= target
        # Pivots ascend, so those with enough above them come first
        passed = tl.sum(enough.to(tl.int64), axis=0)
        low_next = tl.minimum(low + step * passed, high)
        high = tl.where(passed < PIVOTS, tl.minimum(low + step * (passed + 1) - 1, high), high)
        low = low_next
    return low


@triton.jit
def around(row, vocab, key, largest, per_degree, BLOCK: tl.constexpr):
    """(tokens above a key, their mass, tokens equal to it), the mass in units of the largest's."""
    count = tl.zeros((BLOCK,), dtype=tl.int32)
    mass = tl.zeros((BLOCK,), dtype=tl.float32)
    equal = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
        keys = order_key(x)
        count += (keys > key).to(tl.int32)
        mass += tl.where(keys > key, tl.exp((x - largest) * per_degree), 0.0)
        equal += (keys == key).to(tl.int32)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0), tl.sum(equal, axis=0)


@triton.jit
def cut(row, vocab, top_k, top_p, total, largest_key, largest, per_degree, BLOCK: tl.constexpr):
    """(key, room): tokens above the key stay, and of those equal to it the `room` lowest ids.

    top_k int32 (0 keeps all), top_p float32, total: Σ exp((x − largest)·per_degree), per_degree: 1 / temperature.
    """
    high = largest_key.to(tl.int64)
    low = tl.full((), SMALLEST_KEY, tl.int64)
    key = tl.full((), SMALLEST_KEY, tl.int32)
    room = tl.full((), 0x7FFFFFFF, tl.int32)
    mass = total
    if (top_k > 0) & (top_k < vocab):
        low = search(row, vocab, low, high, top_k.to(tl.float32), largest, per_degree, True, BLOCK)
        key = low.to(tl.int32)
        count, above, equal = around(row, vocab, key, largest, per_degree, BLOCK)
        room = tl.minimum(top_k - count, equal)
        x = value_of(key)
        mass = above + room.to(tl.float32) * tl.exp((x - largest) * per_degree)
    if top_p < 1.0:
        # All tokens below this logit hold less than 1 − p together
        bound = largest + tl.log(tl.maximum((1.0 - top_p) * total / vocab, 1e-30)) / per_degree
        bound = bound - 1e-3 * (1.0 / per_degree + tl.abs(bound))
        start = tl.maximum(low, tl.minimum(order_key(bound).to(tl.int64), high))
        target = mass * top_p
        found = search(row, vocab, start, high, target, largest, per_degree, False, BLOCK).to(tl.int32)
        count, above, equal = around(row, vocab, found, largest, per_degree, BLOCK)
        weight = tl.exp((value_of(found) - largest) * per_degree)
        missing = tl.ceil(tl.maximum(target - above, 0.0) / tl.maximum(weight, 1e-38))
        needed = tl.maximum(tl.minimum(missing, equal.to(tl.float32)), 1.0).to(tl.int32)
        room = tl.where(found == key, tl.minimum(room, needed), needed)
        key = found
    return key, room
