"""Checks of the kernels around a step's edges: its inputs, edits of logits, the choice of tokens, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.cases import Case, check_all, draw
from benchmarks.gpu.supervise import Context
from kernels import reference
from kernels.sampling import penalise_counts, penalise_repetition
from kernels.sampling_rows import SamplingRows
from kernels.step_layout import CARRIED, LOGITS, PAGES, SEQS, TOKENS, StepInputs, StepLayout
from kernels.triton.logits import rewrite
from kernels.triton.logprobs import TOP, logprobs
from kernels.triton.sampling import sample
from kernels.triton.step_inputs import step_inputs

KERNELS = ("sampling", "logits", "logprobs", "step_inputs")
SETTINGS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 1.2, "top_k": 50, "top_p": 0.95},
    {"temperature": 0.8, "min_p": 0.05},
)
ROUNDING = 3e-6
"""A cut of the mass that falls between two tokens to within this may fall on either side."""


def run(context: Context) -> None:
    """Check them all."""
    check_all(context, cases(context.device, context.tiny))


def cases(device: str, tiny: bool) -> Iterator[Case]:
    """Every case, in the vocabulary of an 8B model and in an odd one."""
    for vocab in (2100,) if tiny else (128256, 5001):
        for spread in (3.0,) if tiny else (0.1, 3.0):
            label = f"{vocab} tokens, logits of spread {spread}"
            yield Case("sampling", f"greedy, {label}", partial(_greedy, device, vocab, spread))
            yield Case("sampling", f"drawn, {label}", partial(_drawn, device, vocab, spread))
            yield Case("logprobs", label, partial(_logprobs, device, vocab, spread))
        yield Case("logits", f"{vocab} tokens", partial(_edited, device, vocab))
    for rows, steps in ((4, 20),) if tiny else ((4, 20), (256, 2048)):
        yield Case("step_inputs", f"{rows} sequences, {steps} tokens", partial(_gathered, device, rows, steps))


def _greedy(device: str, vocab: int, spread: float) -> None:
    logits = draw(20, 6, vocab, scale=spread)
    logits[3, 7] = logits[3].max()  # the lowest of two
    rows = torch.arange(6, dtype=torch.int32, device=device)
    assert sample(logits.to(device), rows, rows).tolist() == logits.numpy().argmax(axis=1).tolist()


def _drawn(device: str, vocab: int, spread: float) -> None:
    count = len(SETTINGS)
    logits = draw(21, count, vocab, scale=spread)
    state = SamplingRows(count, vocab, max_edits=4, device=device)
    for row, settings in enumerate(SETTINGS):
        state.admit(row, seed=row + 50, **settings)
    rows = torch.arange(count, dtype=torch.int32, device=device)
    table = torch.full((count, 20), 77, dtype=torch.int32, device=device)
    tokens = sample(logits.to(device), rows, rows, state, table=table).tolist()
    for row, settings in enumerate(SETTINGS):
        allowed = _draws(logits[row], row, dict(settings))
        assert tokens[row] in allowed, f"{settings}: token {tokens[row]} instead of {sorted(allowed)}"
    wanted = torch.full((count, 20), 77, dtype=torch.int32)
    wanted[range(count), range(count)] = torch.tensor(tokens, dtype=torch.int32)
    assert torch.equal(table.cpu(), wanted), "the token table holds something else than the tokens"


def _draws(row: Tensor, number: int, settings: dict[str, Any]) -> set[int]:
    if settings["temperature"] == 0.0:
        return {int(row.argmax())}
    top_p = settings.pop("top_p", 1.0)
    nearby = {min(1.0, top_p * factor) for factor in (1 - ROUNDING, 1.0, 1 + ROUNDING)} if top_p < 1.0 else {1.0}
    return {reference.sample(row, seed=number + 50, position=number, top_p=p, **settings) for p in nearby}


def _logprobs(device: str, vocab: int, spread: float) -> None:
    logits = draw(22, 3, vocab, scale=spread)
    state = SamplingRows(3, vocab, max_edits=4, device=device)
    for row, wanted in enumerate((20, None, 0)):
        state.admit(row, seed=0, logprobs=wanted)
    rows = torch.arange(3, dtype=torch.int32, device=device)
    tokens = torch.tensor([5, 6, 7], dtype=torch.int32, device=device)
    chosen, ids, values = (tensor.cpu() for tensor in logprobs(logits.to(device), rows, tokens, state))
    exact = torch.log_softmax(logits.double(), dim=1)
    top = torch.sort(exact, dim=1, descending=True, stable=True)
    assert not ids[1].any(), "a row that does not ask was looked at"
    for row in (0, 2):
        assert abs(float(chosen[row]) - float(exact[row, tokens[row]])) < 2e-5
        torch.testing.assert_close(values[row].double(), top.values[row, :TOP], atol=2e-5, rtol=0)
        assert ids[row].tolist() == top.indices[row, :TOP].tolist()


def _edited(device: str, vocab: int) -> None:
    """Penalties, bias and bans, the same bits as the host's."""
    logits = draw(23, 3, vocab, scale=4.0)
    state = SamplingRows(3, vocab, max_edits=300, device=device)
    prompt, output, bias = [1, 7, 2047], [7, 7, 9, vocab - 1], {0: -100.0, 7: 3.3, vocab - 1: 0.5}
    penalties = (1.3, 0.5, -0.25)
    state.admit(
        1, seed=0, repetition_penalty=penalties[0], frequency_penalty=penalties[1], presence_penalty=penalties[2],
        logit_bias=bias, banned=[2, 7], banned_until=10, prompt=prompt, output=output,
    )  # fmt: skip
    state.admit(0, seed=0)
    mine = logits.to(device, copy=True)
    rows = torch.tensor([1, -1, 0], dtype=torch.int32, device=device)
    positions = torch.tensor([9, 0, 0], dtype=torch.int32, device=device)
    rewrite(mine, rows, positions, state)
    wanted = logits.clone()
    row = wanted[0].numpy()  # shares the memory
    penalise_repetition(row, np.array(sorted({*prompt, *output}), dtype=np.int64), penalties[0])
    ids, counts = np.unique(np.array(output, dtype=np.int64), return_counts=True)
    penalise_counts(row, ids, counts.astype(np.float32), penalties[1], penalties[2])
    for token, value in bias.items():
        row[token] += np.float32(value)
    row[[2, 7]] = -np.inf
    assert torch.equal(mine.cpu(), wanted)


def _gathered(device: str, max_seqs: int, max_tokens: int) -> None:
    """Half of the sequences decode what the token table holds, the others carry chunks of their prompts."""
    context, pages = 4096 if max_seqs > 8 else 64, 256 if max_seqs > 8 else 4
    seqs, chunk = max_seqs - 1, max(1, max_tokens // max_seqs - 1)
    layout = StepLayout(max_seqs, max_tokens, 8)
    buffer = layout.empty()
    query = carried = 0
    for s in range(seqs):
        count = 1 if s % 2 else chunk
        source = -1 if s % 2 else carried
        described = torch.tensor([s, query, 16 + s % 7, source], dtype=torch.int32)
        layout.seqs_of(buffer)[:, s] = described
        layout.logits_of(buffer)[s] = s
        query, carried = query + count, carried + (0 if s % 2 else count)
    layout.tokens_of(buffer)[:carried] = torch.arange(carried, dtype=torch.int32) + 5
    layout.pages_of(buffer)[:, 0] = torch.tensor([1, 1, 3], dtype=torch.int32)
    for place, number in ((SEQS, seqs), (TOKENS, query), (LOGITS, seqs), (PAGES, 1), (CARRIED, carried)):
        buffer[place] = number
    tables = [torch.arange(max_seqs * width, dtype=torch.int32).view(max_seqs, width) for width in (context, pages)]
    mine = [table.to(device, copy=True) for table in tables]
    there, here = StepInputs.allocate(layout, pages, device), StepInputs.allocate(layout, pages)
    step_inputs(buffer.to(device), layout, mine[0], mine[1], 16, there)
    reference.step_inputs(buffer, layout, tables[0], tables[1], 16, here)
    for name, got, wanted in zip(("token table", "page table"), mine, tables, strict=True):
        assert torch.equal(got.cpu(), wanted), name
    for field in fields(StepInputs):
        assert torch.equal(getattr(there, field.name).cpu(), getattr(here, field.name)), field.name
