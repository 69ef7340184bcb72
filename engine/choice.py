"""Who chooses tokens from the logits of a padded step: kernels on the device, or the host's sampler.

Both write what they choose into the token table, from which the next step reads it.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.request import Request
from engine.runner import LOGPROBS, PLAIN
from engine.sampler import RowState, Sampled, Sampler
from engine.wire import TokenLogprobs
from kernels.sampling_rows import SamplingRows

Chosen = tuple[Tensor, ...]
"""Tokens int32 [R]; of a batch that asks for log-probabilities also float32 [R], int32 [R, 20] and float32 [R, 20];
nothing where the host knows them already"""


class Choice(Protocol):
    """Chooses the tokens of padded batches."""

    max_edits: int | None
    """Most entries of logit_bias and stop tokens of one request together; None: any number"""
    recordable: bool
    """True when `choose` may be part of a graph"""

    def state(self, request: Request) -> object:
        """What `install` needs of a request, as it is now."""
        ...

    def install(self, row: int, state: object | None) -> None:
        """A request has got this row. None: a plain one."""
        ...

    def choose(self, logits: Tensor, rows: Tensor, positions: Tensor, table: Tensor, kind: int) -> Chosen:
        """The tokens of request rows `rows` int32 [R] (−1: padding) at `positions` int32 [R]; they are written into
        `table`, too. logits float32 [R, vocab] may be changed."""
        ...

    def read(self, chosen: Chosen, asked: list[int | None]) -> Sampled:
        """What was chosen, from host memory, for as many rows as `asked`: how many alternatives each wants."""
        ...


class DeviceChoice:
    """Triton's sampling kernels. A plain batch runs the two that find largest logits, and nothing else."""

    recordable = True

    def __init__(self, rows: int, vocab_size: int, device: str) -> None:
        from kernels.triton.logits import rewrite
        from kernels.triton.logprobs import logprobs
        from kernels.triton.sampling import sample

        self._rewrite, self._sample, self._logprobs = rewrite, sample, logprobs
        self._rows = SamplingRows(rows, vocab_size, device=device)
        self.max_edits: int | None = self._rows.max_edits
        for row in range(rows):
            self._rows.admit(row, seed=0, temperature=0.0)
        self._plain = [True] * rows

    def state(self, request: Request) -> object:
        """The row's settings."""
        params = request.params
        tokens = request.tokens
        return {
            "seed": request.seed,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "frequency_penalty": params.frequency_penalty,
            "presence_penalty": params.presence_penalty,
            "logit_bias": params.logit_bias,
            "banned": {*params.stop_token_ids, *request.eos_ids} if params.min_tokens else (),
            "banned_until": request.prompt_len + params.min_tokens,
            "logprobs": params.logprobs,
            "prompt": tokens[: request.prompt_len],
            "output": tokens[request.prompt_len :],
        }

    def install(self, row: int, state: object | None) -> None:
        """Write the row. A plain one is written only over one that was not."""
        if state is not None:
            settings: Any = state
            self._rows.admit(row, **settings)
        elif not self._plain[row]:
            self._rows.admit(row, seed=0, temperature=0.0)
        self._plain[row] = state is None

    def choose(self, logits: Tensor, rows: Tensor, positions: Tensor, table: Tensor, kind: int) -> Chosen:
        """See `Choice`."""
        if kind == PLAIN:
            return (self._sample(logits, rows, positions, None, table=table),)
        # Log-probabilities are the model's own: of the logits before they are edited
        edited = logits.clone() if kind == LOGPROBS else logits
        self._rewrite(edited, rows, positions, self._rows)
        tokens = self._sample(edited, rows, positions, self._rows, table=table)
        if kind != LOGPROBS:
            return (tokens,)
        return (tokens, *self._logprobs(logits, rows, tokens, self._rows))

    def read(self, chosen: Chosen, asked: list[int | None]) -> Sampled:
        """See `Choice`."""
        tokens: list[int] = chosen[0][: len(asked)].tolist()
        sampled = Sampled(tokens)
        if len(chosen) == 1:
            return sampled
        for i, wanted in enumerate(asked):
            if wanted is not None and tokens[i] >= 0:
                ids, values = chosen[2][i, :wanted].tolist(), chosen[3][i, :wanted].tolist()
                sampled.logprobs[i] = TokenLogprobs(float(chosen[1][i]), list(zip(ids, values, strict=True)))
        return sampled


class HostChoice:
    """The host's sampler: logits are copied to the host, tokens back. The host waits for the step."""

    recordable = False
    max_edits: int | None = None

    def __init__(self, rows: int, vocab_size: int, context: int) -> None:
        self._sampler = Sampler(vocab_size, rows)
        self._tokens = np.zeros((rows, context), dtype=np.int32)
        self._sampled = Sampled([])

    def state(self, request: Request) -> object:
        """The row's settings."""
        return RowState(request)

    def install(self, row: int, state: object | None) -> None:
        """Keep the row's settings."""
        assert state is None or isinstance(state, RowState)
        self._sampler.install(row, state)

    def choose(self, logits: Tensor, rows: Tensor, positions: Tensor, table: Tensor, kind: int) -> Chosen:
        """See `Choice`."""
        wanted, at = rows.tolist(), positions.tolist()
        live = [row for row in wanted if row >= 0]
        at = at[: len(live)]
        self._sampled = Sampled([])
        if live:
            self._sampled = self._sampler.sample(logits[: len(live)].cpu(), live, at, self._tokens)
            tokens = torch.tensor(self._sampled.tokens, dtype=torch.int32)
            table[torch.tensor(live, device=table.device), torch.tensor(at, device=table.device)] = tokens.to(
                table.device
            )
        return ()

    def read(self, chosen: Chosen, asked: list[int | None]) -> Sampled:
        """See `Choice`."""
        return self._sampled
