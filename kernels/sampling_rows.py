"""What the device keeps of each running request's sampling: parameters, edits of logits and token counts, in stable
rows that a step's rows point at.

Parameters are float64, in which every setting is exactly the number that the host's sampler computes with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from kernels.sampling import MIN_TEMPERATURE, seed_state

TEMPERATURE, TOP_K, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE, EDITS, BANNED_UNTIL, LOGPROBS = range(10)
"""Columns of `SamplingRows.parameters`"""

COLUMNS = 16
IN_PROMPT = 1 << 14
"""Bit of `SamplingRows.counts` of a token that occurs in the prompt; the bits below count the output, saturating."""

BANNED = 1 << 30
"""Bit of an edit's token id: the token is impossible before position BANNED_UNTIL."""


class SamplingRows:
    """Sampling state of `rows` requests over a vocabulary, on one device.

    A row's state changes only between steps, in the order of the device's stream.
    """

    def __init__(self, rows: int, vocab_size: int, *, max_edits: int = 1024, device: str = "cpu") -> None:
        """max_edits: most logit_bias entries and banned tokens of one request together. Memory: 2 bytes × rows ×
        vocabulary for counts, little else."""
        self.vocab_size = vocab_size
        self.max_edits = max_edits
        self.parameters: Tensor = torch.zeros(rows, COLUMNS, dtype=torch.float64, device=device)
        """float64 [rows, COLUMNS]"""
        self.seeds: Tensor = torch.zeros(rows, dtype=torch.int64, device=device)
        """int64 [rows]: `seed_state`, as signed numbers"""
        self.edit_ids: Tensor = torch.zeros(rows, max_edits, dtype=torch.int32, device=device)
        """int32 [rows, max_edits]: distinct token ids, with the bit BANNED where so"""
        self.edit_bias: Tensor = torch.zeros(rows, max_edits, dtype=torch.float32, device=device)
        """float32 [rows, max_edits]: what is added"""
        self.counts: Tensor = torch.zeros(rows, vocab_size, dtype=torch.int16, device=device)
        """int16 [rows, vocab]: kept only of rows with a penalty"""

    def admit(
        self,
        row: int,
        *,
        seed: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        banned: Iterable[int] = (),
        banned_until: int = 0,
        logprobs: int | None = None,
        prompt: Iterable[int] = (),
        output: Iterable[int] = (),
    ) -> None:
        """Write a request's row. banned: tokens that are impossible at positions before banned_until. prompt, output:
        tokens so far, looked at when a penalty asks for them. Raises ValueError for more edits than fit."""
        bias = dict(logit_bias or {})
        barred = set(banned)
        edits = sorted({*bias, *barred})
        if len(edits) > self.max_edits:
            raise ValueError(f"logit_bias has room for {self.max_edits} tokens, stop tokens included")
        values = [0.0] * COLUMNS
        values[TEMPERATURE] = 0.0 if temperature == 0.0 else max(temperature, MIN_TEMPERATURE)
        values[TOP_K] = float(min(top_k, self.vocab_size))
        values[TOP_P], values[MIN_P] = top_p, min_p
        values[REPETITION], values[FREQUENCY], values[PRESENCE] = (
            repetition_penalty, frequency_penalty, presence_penalty,
        )  # fmt: skip
        values[EDITS], values[BANNED_UNTIL] = float(len(edits)), float(banned_until)
        values[LOGPROBS] = -1.0 if logprobs is None else float(logprobs)
        _write(self.parameters[row], torch.tensor(values, dtype=torch.float64))
        state = seed_state(seed)
        self.seeds[row] = state - (1 << 64) if state >> 63 else state
        if edits:
            ids = [token | BANNED if token in barred else token for token in edits]
            _write(self.edit_ids[row, : len(edits)], torch.tensor(ids, dtype=torch.int32))
            added = torch.tensor([bias.get(token, 0.0) for token in edits], dtype=torch.float32)
            _write(self.edit_bias[row, : len(edits)], added)
        if repetition_penalty != 1.0 or frequency_penalty != 0.0 or presence_penalty != 0.0:
            self._count(row, prompt, output)

    def _count(self, row: int, prompt: Iterable[int], output: Iterable[int]) -> None:
        made = torch.bincount(torch.tensor([*output], dtype=torch.int64), minlength=self.vocab_size)
        made.clamp_(max=IN_PROMPT - 1)
        made[torch.tensor([*prompt], dtype=torch.int64)] |= IN_PROMPT
        _write(self.counts[row], made.to(torch.int16))


def _write(into: Tensor, values: Tensor) -> None:
    """Copy from the host, to a GPU in the order of its stream and without waiting for it."""
    on_gpu = into.device.type == "cuda"
    into.copy_(values.pin_memory() if on_gpu else values, non_blocking=on_gpu)
