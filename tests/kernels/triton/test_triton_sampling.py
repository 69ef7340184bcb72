"""The device's sampler in the interpreter: the same seed draws the token that the host's sampler draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.sampling import RowSampler
from kernels.sampling_rows import SamplingRows
from kernels.triton.sampling import sample

SIZES = [1, 2, 63, 300, 2048, 2049, 5000]


def random_row(seed: int, size: int, scale: float, levels: int | None = None) -> np.ndarray:
    """Logits; with `levels`, rounded so coarsely that many are equal."""
    row = np.random.default_rng(seed).standard_normal(size) * scale
    return (np.round(row * levels) / levels if levels else row).astype(np.float32)


def draw(row: np.ndarray, seed: int, position: int, **params: Any) -> int:
    state = SamplingRows(1, len(row), max_edits=4)
    state.admit(0, seed=seed, **params)
    zero = torch.zeros(1, dtype=torch.int32)
    return int(sample(torch.from_numpy(row)[None], zero, zero + position, state))


@settings(max_examples=30)
@given(
    seed=st.integers(0, 999),
    count=st.integers(0, 4),
    size=st.sampled_from(SIZES),
    levels=st.sampled_from([None, 1]),
    broken=st.sampled_from([None, np.nan, np.inf, -np.inf]),
)
def test_greedy_takes_the_lowest_of_the_largest(
    seed: int, count: int, size: int, levels: int | None, broken: float | None
) -> None:
    logits = random_row(seed, count * size, 3.0, levels).reshape(count, size)
    logits[logits == 0] = -0.0 if seed % 2 else 0.0
    expected = logits.argmax(axis=1).tolist() if count else []
    if broken is not None and count:
        logits[0] = broken if broken == -np.inf else logits[0]
        logits[0, seed % size] = broken
        expected[0] = -1 if broken != -np.inf else expected[0]
    if broken == -np.inf and count:
        expected[0] = -1
    rows = torch.arange(count, dtype=torch.int32)
    tokens = sample(torch.from_numpy(logits), rows, rows)
    assert tokens.tolist() == expected


@settings(max_examples=20)
@given(
    seed=st.integers(-(2**63), 2**64),
    position=st.sampled_from([0, 5, 131_071]),
    size=st.sampled_from(SIZES),
    scale=st.sampled_from([0.0, 0.1, 2.0, 10.0, 60.0]),
    levels=st.sampled_from([None, 2]),
    temperature=st.sampled_from([1e-6, 1e-3, 0.7, 1.0, 2.0]),
)
def test_a_plain_draw_is_the_hosts(
    seed: int, position: int, size: int, scale: float, levels: int | None, temperature: float
) -> None:
    row = random_row(seed % 1000, size, scale, levels)
    wanted = RowSampler(size).sample(row, temperature=temperature, seed=seed, position=position)
    assert draw(row, seed, position, temperature=temperature) == wanted


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**63),
    size=st.sampled_from(SIZES),
    scale=st.sampled_from([0.0, 0.1, 2.0, 10.0, 60.0]),
    levels=st.sampled_from([None, 1, 2]),
    temperature=st.sampled_from([1e-3, 0.2, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 40, 5000, 10**9]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-9]),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
)
def test_a_truncated_draw_is_the_references(
    seed: int, size: int, scale: float, levels: int | None, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = random_row(seed % 1000, size, scale, levels)
    token = draw(row, seed, 5, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    # A cut that falls between two tokens to within the rounding of float32 sums may fall on either side.
    cuts = {
        (p if p < 1.0 else top_p, min(m, 1.0))
        for p in (top_p * (1 + 3e-6), top_p, top_p * (1 - 3e-6))
        for m in (min_p * (1 + 1e-6), min_p, min_p * (1 - 1e-6))
    }
    logits = torch.from_numpy(row)
    assert token in {reference.sample(logits, temperature, seed, 5, top_k, p, m) for p, m in cuts}


def test_rows_are_independent_and_padding_is_left_alone() -> None:
    vocab, table = 3000, torch.full((6, 20), 77, dtype=torch.int32)
    state = SamplingRows(6, vocab, max_edits=4)
    settings_: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.2, "top_p": 0.7}, {"top_k": 4, "min_p": 0.1},
    ]  # fmt: skip
    logits = np.stack([random_row(i, vocab, 4.0) for i in range(6)])
    logits[5, 9] = np.nan
    for request, params in enumerate(settings_):
        state.admit(request, seed=request + 50, **params)
    rows, positions = torch.tensor([2, -1, 0, 3, 1, 0]), torch.tensor([4, 3, 0, 25, 7, 8])
    tokens = sample(torch.from_numpy(logits), rows.int(), positions.int(), state, table=table).tolist()
    assert tokens[1] == -1 and tokens[5] == -1
    assert tokens[2] == int(logits[2].argmax())
    for i in (0, 3, 4):
        assert tokens[i] == draw(logits[i], int(rows[i]) + 50, int(positions[i]), **settings_[int(rows[i])])
    written = {
        (int(r), int(p)): token for r, p, token in zip(rows, positions, tokens, strict=True) if r >= 0 and p < 20
    }
    expected = torch.full((6, 20), 77, dtype=torch.int32)
    for (row, position), token in written.items():
        expected[row, position] = token
    assert torch.equal(table, expected), "only the chosen tokens are written, each at its position"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_are_not_finite_are_reported(bad: float) -> None:
    row = np.zeros(10, dtype=np.float32)
    row[4] = bad
    assert draw(row, 0, 0, temperature=1.0) == -1
    assert draw(row, 0, 0, temperature=1.0, top_p=0.5) == -1
    assert draw(np.full(10, -np.inf, dtype=np.float32), 0, 0, temperature=1.0, top_k=2) == -1


def test_masked_tokens_are_never_drawn() -> None:
    row = np.full(200, -np.inf, dtype=np.float32)
    row[[3, 150]] = 1.0
    for params in ({}, {"top_k": 10}, {"top_p": 0.99}, {"min_p": 0.1}):
        state = SamplingRows(8, 200, max_edits=1)
        for seed in range(8):
            state.admit(seed, seed=seed, temperature=2.0, **params)
        rows = torch.arange(8, dtype=torch.int32)
        tokens = sample(torch.from_numpy(row).repeat(8, 1), rows, torch.zeros_like(rows), state)
        assert set(tokens.tolist()) == {3, 150}


def test_what_does_not_fit_is_refused() -> None:
    zero = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="contiguous float32"):
        sample(torch.zeros(1, 4, dtype=torch.float64), zero, zero)
    with pytest.raises(ValueError, match="as many rows"):
        sample(torch.zeros(2, 4), zero, zero)
    with pytest.raises(ValueError, match="as many rows"):
        sample(torch.zeros(1, 4), zero, zero, SamplingRows(1, 5, max_edits=1))


@pytest.mark.slow
@pytest.mark.parametrize("params", [{}, {"top_p": 0.95}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.05}], ids=str)
@pytest.mark.parametrize("vocab", [128_256, 262_144])
def test_large_vocabularies(vocab: int, params: dict[str, Any]) -> None:
    for seed, scale in ((1, 0.1), (2, 2.5), (3, 8.0)):
        row = random_row(seed, vocab, scale)
        nearby = {
            reference.sample(torch.from_numpy(row), 0.9, seed, 3, **{**params, "top_p": params.get("top_p", 1.0) * f})
            for f in ((1 - 3e-6), 1.0, (1 + 3e-6))
            if params.get("top_p", 1.0) * f <= 1.0
        }
        assert draw(row, seed, 3, temperature=0.9, **params) in nearby
