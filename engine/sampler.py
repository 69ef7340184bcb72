"""Logits → next tokens, each row by its own parameters. A row pays only for what its request asks.

Order of operations on a row: repetition penalty (prompt and output), frequency and presence penalties (output),
logit_bias, the mask of min_tokens; then the largest logit (temperature 0) or a draw (kernels.sampling).
Log-probabilities are those of the model itself: log-softmax of the row as the model gave it, before any of this, as
OpenAI reports them.

Rows are known by number, and what a row has generated is read from the token table, never from the request: the host
may be a step behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.request import Request
from engine.wire import TokenLogprobs
from kernels.sampling import (
    Ids,
    Row,
    RowSampler,
    argmax_rows,
    log_normaliser,
    penalise_counts,
    penalise_repetition,
    top_tokens,
)

BROKEN = -1
"""In place of a token: the row's logits are not finite."""


@dataclass(slots=True)
class Sampled:
    """Result of one step, in the order of the requests given."""

    tokens: list[int]
    """token ids, or BROKEN"""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """index in `tokens` → log-probabilities, for requests that want them"""
    vectors: Sequence[bytes] = ()
    """of an embedding model, in the place of tokens: float32, little-endian; empty for one that is not finite"""


class TokenCounts:
    """Distinct tokens of a growing sequence with their counts, in arrays that a row can be indexed with."""

    def __init__(self) -> None:
        self._slot: dict[int, int] = {}
        self._ids = np.empty(16, dtype=np.int64)
        self._counts = np.empty(16, dtype=np.float32)

    def add(self, tokens: Iterable[int]) -> None:
        """Count tokens."""
        for token in tokens:
            slot = self._slot.get(token)
            if slot is not None:
                self._counts[slot] += 1.0
                continue
            slot = self._slot[token] = len(self._slot)
            if slot == len(self._ids):
                self._ids = np.resize(self._ids, 2 * slot)
                self._counts = np.resize(self._counts, 2 * slot)
            self._ids[slot] = token
            self._counts[slot] = 1.0

    @property
    def ids(self) -> Ids:
        """int64 [distinct]"""
        return self._ids[: len(self._slot)]

    @property
    def counts(self) -> Row:
        """float32 [distinct]"""
        return self._counts[: len(self._slot)]


Tokens = npt.NDArray[np.int32]


class RowState:
    """What one request needs beside its row of logits. Built when it starts to run; follows from the request alone."""

    def __init__(self, request: Request) -> None:
        params = request.params
        self.logprobs = params.logprobs
        self._params = params
        self._seed = request.seed
        self._prompt_len = request.prompt_len
        self._bias_ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64)
        self._bias = np.fromiter(params.logit_bias.values(), dtype=np.float32)
        banned = {*params.stop_token_ids, *request.eos_ids} if params.min_tokens else set()
        self._banned = np.array(sorted(banned), dtype=np.int64)
        self._repeats = params.repetition_penalty != 1.0
        self._counts = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        self._rewrites = self._repeats or self._counts or bool(params.logit_bias)
        self._seen = TokenCounts()
        self._output = TokenCounts()
        if self._repeats:
            self._seen.add(set(request.tokens[: request.prompt_len]))
        self._count(request.tokens[request.prompt_len :])
        self._followed = len(request.tokens)

    def choose(self, sampler: RowSampler, row: Row, tokens: Tokens, position: int) -> int:
        """Return the token for `position` given its logits, or BROKEN. tokens: the row of the token table, which has
        every token before `position` that has been sampled since the request started to run."""
        params = self._params
        banned = position - self._prompt_len < params.min_tokens and self._banned.size > 0
        if self._rewrites or banned:
            row = self._rewritten(row, tokens, position, banned)
        if params.temperature == 0.0:
            return finite_argmax(row)
        return sampler.sample(
            row,
            temperature=params.temperature,
            seed=self._seed,
            position=position,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
        )

    def _count(self, new: Iterable[int]) -> None:
        if self._repeats:
            self._seen.add(new)
        if self._counts:
            self._output.add(new)

    def _rewritten(self, row: Row, tokens: Tokens, position: int, banned: bool) -> Row:
        row = row.copy()
        if self._repeats or self._counts:
            self._count(tokens[self._followed : position].tolist())
            self._followed = position
            if self._repeats:
                penalise_repetition(row, self._seen.ids, self._params.repetition_penalty)
            if self._counts:
                penalise_counts(
                    row,
                    self._output.ids,
                    self._output.counts,
                    self._params.frequency_penalty,
                    self._params.presence_penalty,
                )
        if self._bias_ids.size:
            row[self._bias_ids] += self._bias
        if banned:
            row[self._banned] = -np.inf
        return row


def plain(request: Request) -> bool:
    """True for a request that always takes the largest logit and wants to know nothing else."""
    params = request.params
    return (
        params.greedy
        and params.min_tokens == 0
        and params.logprobs is None
        and params.repetition_penalty == 1.0
        and params.frequency_penalty == 0.0
        and params.presence_penalty == 0.0
        and not params.logit_bias
    )


class Sampler:
    """Chooses the tokens of a step on the host. Per-request state lives in rows, like everything the runner keeps."""

    def __init__(self, vocab_size: int, max_running: int) -> None:
        self._rows = RowSampler(vocab_size)
        self._states: list[RowState | None] = [None] * max_running
        self._asking: set[int] = set()
        """Rows with a state"""
        self._arange = np.arange(max_running)

    def install(self, row: int, state: RowState | None) -> None:
        """A request has got this row. None: a plain one."""
        self._states[row] = state
        if state is None:
            self._asking.discard(row)
        else:
            self._asking.add(row)

    def sample(
        self, logits: Tensor, rows: Sequence[int] | Tokens, positions: Sequence[int] | Tokens, table: Tokens
    ) -> Sampled:
        """Choose the tokens of request rows `rows` at `positions` from logits float32 [R, vocab], which stay as they
        are, and write them into the token table [rows, context]."""
        values: npt.NDArray[np.float32] = (logits if logits.device.type == "cpu" else logits.cpu()).numpy()
        if not self._asking or not any(states := [self._states[row] for row in rows]):
            best = argmax_rows(values)
            if len(best) > len(self._arange):
                self._arange = np.arange(len(best))
            finite = np.isfinite(values[self._arange[: len(best)], best])
            if not finite.all():
                best = np.where(finite, best, BROKEN)
            table[rows, positions] = best
            tokens: list[int] = best.tolist()
            return Sampled(tokens)
        sampled = Sampled([])
        for i, (state, request_row, position) in enumerate(zip(states, rows, map(int, positions), strict=True)):
            row = values[i]
            if state is None:
                sampled.tokens.append(finite_argmax(row))
                continue
            token = state.choose(self._rows, row, table[request_row], position)
            sampled.tokens.append(token)
            if state.logprobs is not None and token != BROKEN:
                sampled.logprobs[i] = logprobs_of(row, token, state.logprobs)
        table[rows, positions] = sampled.tokens
        return sampled


def finite_argmax(row: Row) -> int:
    """Id of the largest logit, lowest first among equals; BROKEN when it is not finite (a NaN counts as largest)."""
    token = int(row.argmax())
    return token if np.isfinite(row[token]) else BROKEN


def logprobs_of(row: Row, token: int, k: int) -> TokenLogprobs:
    """Natural-log probabilities of `token` and of the k most probable tokens under softmax(row)."""
    normaliser = log_normaliser(row)
    top = top_tokens(row, k) if k else np.empty(0, dtype=np.int64)
    pairs = [(int(i), float(row[i]) - normaliser) for i in top]
    return TokenLogprobs(float(row[token]) - normaliser, pairs)
