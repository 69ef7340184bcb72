"""Edits of logits and log-probabilities on the device, in the interpreter, against the host's sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sampling import log_normaliser, penalise_counts, penalise_repetition, top_tokens
from kernels.sampling_rows import SamplingRows
from kernels.triton.logits import rewrite
from kernels.triton.logprobs import TOP, logprobs
from kernels.triton.sampling import sample

VOCAB = 2100
TOKENS = st.lists(st.sampled_from([0, 1, 7, 2047, 2048, 2099]), max_size=12)


def host_edit(
    row: np.ndarray, prompt: list[int], output: list[int], penalties: tuple[float, float, float],
    bias: dict[int, float], banned: list[int],
) -> np.ndarray:  # fmt: skip
    """What the host's sampler makes of a row."""
    row = row.copy()
    repetition, frequency, presence = penalties
    if repetition != 1.0:
        penalise_repetition(row, np.array(sorted({*prompt, *output}), dtype=np.int64), repetition)
    ids, counts = np.unique(np.array(output, dtype=np.int64), return_counts=True)
    penalise_counts(row, ids, counts.astype(np.float32), frequency, presence)
    for token, value in bias.items():
        row[token] += np.float32(value)
    row[banned] = -np.inf
    return row


@settings(max_examples=25)
@given(
    seed=st.integers(0, 99),
    prompt=TOKENS,
    output=TOKENS,
    penalties=st.sampled_from([(1.0, 0.0, 0.0), (1.3, 0.0, 0.0), (0.7, 0.5, -0.25), (1.0, -1.1, 0.3), (1.0, 0.0, 2.0)]),
    bias=st.dictionaries(st.sampled_from([0, 5, 7, 2099]), st.sampled_from([-100.0, 0.5, 3.3])),
    banned=st.lists(st.sampled_from([0, 2, 7]), unique=True),
    early=st.booleans(),
)
def test_edits_are_the_hosts_to_the_bit(
    seed: int,
    prompt: list[int],
    output: list[int],
    penalties: tuple[float, float, float],
    bias: dict[int, float],
    banned: list[int],
    early: bool,
) -> None:
    logits = np.random.default_rng(seed).standard_normal((3, VOCAB)).astype(np.float32) * 4
    state = SamplingRows(2, VOCAB, max_edits=300)
    state.admit(
        1, seed=0, repetition_penalty=penalties[0], frequency_penalty=penalties[1], presence_penalty=penalties[2],
        logit_bias=bias, banned=banned, banned_until=10, prompt=prompt, output=output,
    )  # fmt: skip
    state.admit(0, seed=0)
    mine = torch.from_numpy(logits.copy())
    rows, positions = torch.tensor([1, -1, 0]).int(), torch.tensor([9 if early else 10, 0, 0]).int()
    rewrite(mine, rows, positions, state)
    wanted = host_edit(logits[0], prompt, output, penalties, bias, banned if early else [])
    np.testing.assert_array_equal(mine[0].numpy(), wanted)
    np.testing.assert_array_equal(mine[1:].numpy(), logits[1:], "rows that ask for nothing stay")


def test_a_chosen_token_is_counted_for_the_rows_that_need_it() -> None:
    state = SamplingRows(2, VOCAB, max_edits=1)
    state.admit(0, seed=1, temperature=0.0, frequency_penalty=0.5, prompt=[4])
    state.admit(1, seed=1, temperature=0.0)
    logits = torch.zeros(2, VOCAB)
    logits[:, 4] = 2.0
    rows = torch.tensor([0, 1]).int()
    for _ in range(3):
        assert sample(logits, rows, rows, state).tolist() == [4, 4]
    assert state.counts[0, 4] == (1 << 14) + 3 and int(state.counts[0].count_nonzero()) == 1
    assert not state.counts[1].any()
    rewrite(logits, rows, rows, state)
    assert logits[:, 4].tolist() == [0.5, 2.0]


@settings(max_examples=10)
@given(
    seed=st.integers(0, 999),
    size=st.sampled_from([1, 19, 20, 300, 2047, 2049, 4100]),
    scale=st.sampled_from([0.0, 1.0, 20.0]),
    levels=st.booleans(),
    masked=st.booleans(),
)
def test_log_probabilities_are_the_hosts(seed: int, size: int, scale: float, levels: bool, masked: bool) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((4, size)) * scale).astype(np.float32)
    logits = np.round(logits) if levels else logits
    if masked and size > 1:
        logits[0, 1:] = -np.inf
    tokens = rng.integers(0, size, 4).astype(np.int32)
    tokens[0] = 0
    tokens[3] = -1
    state = SamplingRows(3, size, max_edits=1)
    state.admit(0, seed=0, logprobs=20)
    state.admit(1, seed=0)
    state.admit(2, seed=0, logprobs=0)
    rows = torch.tensor([2, 1, 0, 0]).int()
    chosen, ids, values = logprobs(torch.from_numpy(logits), rows, torch.from_numpy(tokens), state)
    assert not chosen[1] and not ids[1].any() and not chosen[3], "rows that do not ask are left out"
    for i in (0, 2):
        normaliser = log_normaliser(logits[i])
        top = top_tokens(logits[i], min(TOP, size))
        assert chosen[i].item() == pytest.approx(float(logits[i, tokens[i]]) - normaliser, abs=2e-5)
        assert ids[i, : len(top)].tolist() == top.tolist()
        np.testing.assert_allclose(values[i, : len(top)].numpy(), logits[i, top] - normaliser, atol=2e-5)


def test_what_does_not_fit_is_refused() -> None:
    zero, state = torch.zeros(1, dtype=torch.int32), SamplingRows(1, 4, max_edits=2)
    with pytest.raises(ValueError, match="contiguous float32"):
        rewrite(torch.zeros(1, 5), zero, zero, state)
    with pytest.raises(ValueError, match="as many"):
        rewrite(torch.zeros(2, 4), zero, zero, state)
    with pytest.raises(ValueError, match="contiguous float32"):
        logprobs(torch.zeros(4, 1).T.double(), zero, zero, state)
    with pytest.raises(ValueError, match="as many"):
        logprobs(torch.zeros(2, 4), zero, zero, state)
    with pytest.raises(ValueError, match="room for 2"):
        state.admit(0, seed=0, logit_bias={1: 1.0, 2: 1.0}, banned=[3])
