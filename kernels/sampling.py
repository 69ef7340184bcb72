"""Choosing the next token from a row of logits, in numpy on the host: every row by itself, so no row depends on
another.

Sampling is Gumbel-max: argmax(logit / temperature + g) has exactly the softmax distribution when the g are independent
Gumbel noise. Here g is a pure function of (seed, position, token id) through a 32-bit integer hash, so a draw has no
state: the same seed gives the same token whatever else is in the batch and however often the step is repeated.

The hash of a token: h = mix(mix'(id) ^ low, + high) with the xor-shift-multiply constants of lowbias32 (C. Wellons,
"Prospecting for hash functions", 2018); (low, high) is the 64-bit splitmix64 (Steele, Lea, Flood 2014) of seed and
position. g = −log(−log((h + ½) / 2³²)), which lies between −3.13 and 22.9.

Truncation, in this order: top_k keeps the k largest logits; top_p keeps the smallest prefix of what is left, most
probable first, whose renormalised mass reaches p; min_p drops tokens less probable than min_p times the most probable.
Equal logits are ordered by token id, lowest first.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64]
Hashes = npt.NDArray[np.uint32]

MIN_TEMPERATURE = 1e-5
"""Temperatures below are raised to this: the most probable token wins by any margin that a float32 logit can show."""

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_BLOCK = 64
_FEW = 64
_BINS, _BINS_PER_UNIT = 1024, 16
"""Of the histogram of scaled logits below the largest"""

# One token in 400 has noise above _RARE. The best of those, and of the largest logit, is a bound that a token without
# such noise reaches only with a large logit and noise that is not small either; the logarithms of all others are never
# taken.
_RARE = 6.0


def _hash_of(noise: float) -> np.uint32:
    """A hash below that of every token whose Gumbel noise is `noise` or more."""
    return np.uint32(max(0, math.floor(2.0**32 * math.exp(-math.exp(-noise))) - 2))


_RARE_HASH = _hash_of(_RARE)


def noise_key(seed: int, position: int) -> tuple[int, int]:
    """(low, high) 32-bit halves of the hash key of the token at `position` (0-based in its sequence). Any int is a
    seed."""
    key = _splitmix64((seed_state(seed) + position * _GOLDEN) & _MASK64)
    return key & 0xFFFFFFFF, key >> 32


def seed_state(seed: int) -> int:
    """What `noise_key` makes of a seed before it meets a position: 64 bits, which devices keep in a request's row."""
    return _splitmix64(seed & _MASK64)


def _splitmix64(x: int) -> int:
    x = (x + _GOLDEN) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def token_hashes(vocab_size: int) -> Hashes:
    """mix'(id) of every token id, uint32 [vocab]: the part of the noise that no request changes."""
    ids = np.arange(vocab_size, dtype=np.uint32)
    return _mix(ids, np.uint32(0))


def _mix(x: Hashes, addend: np.uint32) -> Hashes:
    x = x ^ (x >> np.uint32(16))
    x *= np.uint32(0x7FEB352D)
    x += addend
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


def noise_hashes(hashes: Hashes, key: tuple[int, int]) -> Hashes:
    """uint32 noise of tokens given their `token_hashes`."""
    return _mix(hashes ^ np.uint32(key[0]), np.uint32(key[1]))


def gumbel(noise: Hashes) -> Scores:
    """uint32 noise → Gumbel(0, 1) values, float64."""
    values: Scores = -np.log(-np.log((noise + 0.5) * 2.0**-32))
    return values


def argmax_rows(logits: npt.NDArray[np.float32]) -> Ids:
    """Largest logit of each row of [R, V], lowest id first among equals; int64 [R]."""
    best: Ids = logits.argmax(axis=1)
    return best


def log_normaliser(row: Row) -> float:
    """log Σ exp(row): a logit minus this is its log-probability."""
    largest = float(row.max())
    return largest + math.log(float(np.exp(row - np.float32(largest)).sum(dtype=np.float64)))


def top_tokens(row: Row, k: int) -> Ids:
    """Ids of the k largest logits, largest first, lowest id first among equals."""
    size = row.shape[0]
    blocks = size // _BLOCK
    if k < blocks:
        # The k-th largest of the blocks' maxima bounds the k-th largest logit from below.
        maxima = row[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
        bound = np.partition(maxima, blocks - k)[blocks - k]
        found = np.flatnonzero(row >= bound)
    else:
        found = np.arange(size)
    order = np.argsort(-row[found], kind="stable")
    return found[order[:k]]


def penalise_repetition(row: Row, seen: Ids, penalty: float) -> None:
    """In place: divide positive and multiply negative logits of the distinct tokens `seen` (CTRL, arXiv 1909.05858)."""
    values = row[seen]
    row[seen] = np.where(values > 0, values / np.float32(penalty), values * np.float32(penalty))


def penalise_counts(row: Row, ids: Ids, counts: Row, frequency: float, presence: float) -> None:
    """In place: subtract frequency × count + presence from the logits of the distinct tokens `ids`."""
    row[ids] -= np.float32(frequency) * counts + np.float32(presence)


class RowSampler:
    """Draws tokens from rows of `vocab_size` logits. Holds only what is the same for all rows."""

    def __init__(self, vocab_size: int) -> None:
        self._hashes = token_hashes(vocab_size)

    def sample(
        self,
        row: Row,
        *,
        temperature: float,
        seed: int,
        position: int,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ) -> int:
        """Token id drawn from softmax(row / temperature) after truncation, or −1 when the row holds no finite
        maximum."""
        largest = row.max()
        if not math.isfinite(largest):
            return -1
        temperature = max(temperature, MIN_TEMPERATURE)
        key = noise_key(seed, position)
        if 0 < top_k < row.shape[0] or top_p < 1.0 or min_p > 0.0:
            ids = kept_tokens(row, temperature, top_k, top_p, min_p)
            return _best(ids, _scores(row[ids], temperature, noise_hashes(self._hashes[ids], key)))
        return self._sample_all(row, float(largest), temperature, key)

    def _sample_all(self, row: Row, largest: float, temperature: float, key: tuple[int, int]) -> int:
        """The draw without truncation; the same as if every token's score were computed."""
        noise = noise_hashes(self._hashes, key)
        ids = np.append(np.flatnonzero(noise >= _RARE_HASH), row.argmax())
        scores = _scores(row[ids], temperature, noise[ids])
        bound = float(scores.max())
        needed = bound - largest / temperature
        if needed < _RARE:
            # The other tokens' noise is below _RARE: to reach the bound they need a logit and noise of at least this.
            logit = (bound - _RARE) * temperature
            likely = row >= np.float32(logit - 1e-5 * max(1.0, abs(logit)))
            more = np.flatnonzero(likely & (noise >= _hash_of(needed)))
            ids = np.append(ids, more)
            scores = np.append(scores, _scores(row[more], temperature, noise[more]))
        return _best(ids, scores)


def _scores(values: Row, temperature: float, noise: Hashes) -> Scores:
    scores: Scores = values.astype(np.float64) / temperature + gumbel(noise)
    return scores


def _best(ids: Ids, scores: Scores) -> int:
    """The id with the largest score, the lowest of equals."""
    return int(ids[scores == scores.max()].min())


def kept_tokens(row: Row, temperature: float, top_k: int, top_p: float, min_p: float) -> Ids:
    """Ids that survive the truncation, at least one, in no particular order. One filter is on; the maximum is
    finite."""
    largest = row.max()
    if 0 < top_k < row.shape[0]:
        ids = top_tokens(row, top_k)
        if top_p < 1.0:
            weights = _weights(row[ids], largest, temperature)
            ids = ids[: _nucleus(weights, top_p * float(weights.sum()))]
    elif top_p < 1.0:
        ids = _nucleus_of_all(row, largest, temperature, top_p)
    else:
        return np.flatnonzero(row >= largest + temperature * math.log(min_p))
    if min_p > 0.0:
        ids = ids[row[ids] >= largest + temperature * math.log(min_p)]
    return ids


def _nucleus_of_all(row: Row, largest: np.float32, temperature: float, top_p: float) -> Ids:
    """The smallest set of the most probable tokens that holds top_p of the whole mass.

    Mostly a few tokens: those are looked at first. Otherwise a histogram of the logits finds the bin in which the limit
    is reached, and only that bin is sorted.
    """
    below = (largest - row) * np.float32(1.0 / temperature)
    weights = np.exp(-below)
    mass = top_p * float(weights.sum(dtype=np.float64))
    few = top_tokens(row, min(_FEW, row.shape[0]))
    of_few = _weights(row[few], largest, temperature)
    if float(of_few.sum()) >= mass:
        return few[: _nucleus(of_few, mass)]
    bins = np.minimum(below * np.float32(_BINS_PER_UNIT), np.float32(_BINS - 1)).astype(np.intp)
    reached = np.cumsum(np.bincount(bins, weights=weights, minlength=_BINS))
    last = min(int(np.searchsorted(reached, mass)), _BINS - 1)
    edge = np.flatnonzero(bins == last)
    edge = edge[np.argsort(-row[edge], kind="stable")]
    missing = mass - (float(reached[last - 1]) if last else 0.0)
    edge = edge[: _nucleus(_weights(row[edge], largest, temperature), missing)]
    return np.concatenate((np.flatnonzero(bins < last), edge))


def _nucleus(weights: Scores, mass: float) -> int:
    """Length of the shortest prefix whose sum reaches mass: at least 1, all when rounding leaves the sum short of
    it."""
    below = int(np.searchsorted(np.cumsum(weights), mass))
    return min(below + 1, len(weights))


def _weights(values: Row, largest: np.float32, temperature: float) -> Scores:
    return np.exp((values.astype(np.float64) - float(largest)) / temperature)
