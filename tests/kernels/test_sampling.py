"""Sampling of rows against the plain-torch definition, and the statistics of its noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.sampling import (
    RowSampler,
    argmax_rows,
    gumbel,
    kept_tokens,
    log_normaliser,
    noise_hashes,
    noise_key,
    penalise_counts,
    penalise_repetition,
    token_hashes,
    top_tokens,
)

VOCAB = 49152


def random_row(seed: int, size: int, scale: float, levels: int | None = None) -> np.ndarray:
    """Logits; with `levels`, rounded so coarsely that many are equal."""
    row = np.random.default_rng(seed).standard_normal(size) * scale
    return (np.round(row * levels) / levels if levels else row).astype(np.float32)


def test_noise_is_the_references_noise() -> None:
    hashes = token_hashes(VOCAB)
    for seed, position in ((0, 0), (1, 7), (-5, 3), (2**63 - 1, 100_000), (2**70, 1)):
        mine = gumbel(noise_hashes(hashes, noise_key(seed, position)))
        theirs = reference.gumbel_noise(seed, position, torch.arange(VOCAB))
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-12)


def test_noise_is_uniform_and_uncorrelated() -> None:
    hashes = token_hashes(VOCAB)
    base = noise_hashes(hashes, noise_key(1, 1))
    assert len(np.unique(base)) == VOCAB  # a bijection of 32 bits, for each key
    keys = [(1, 2), (2, 1), (1, 1 << 20), (1 << 32, 1), (0, 1), (3, 1)]
    for key in keys:
        noise = noise_hashes(hashes, noise_key(*key))
        for shift in (0, 12, 24):
            counts = np.bincount((noise >> shift) & 255, minlength=256)
            chi2 = float(((counts - VOCAB / 256) ** 2 / (VOCAB / 256)).sum())
            assert 150 < chi2 < 380, (key, shift, chi2)  # 255 degrees of freedom: 6 standard deviations
        correlation = np.corrcoef(noise.astype(float), base.astype(float))[0, 1]
        assert abs(correlation) < 5 / np.sqrt(VOCAB), key


def test_noise_of_one_token_over_positions_and_seeds_is_uniform() -> None:
    token = token_hashes(10)[3:4]
    for keys in ([(5, i) for i in range(20_000)], [(i, 5) for i in range(20_000)]):
        values = np.array([int(noise_hashes(token, noise_key(*key))[0]) for key in keys])
        counts = np.bincount(values >> 24, minlength=256)
        chi2 = float(((counts - 20_000 / 256) ** 2 / (20_000 / 256)).sum())
        assert 150 < chi2 < 380


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (2.0, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.3, 0, 0.8, 0.0),
        (1.0, 7, 0.9, 0.1),
    ],
)
def test_draws_have_the_distribution_of_the_truncated_softmax(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = random_row(4, 24, 2.0)
    kept = reference.kept_tokens(torch.from_numpy(row), temperature, top_k, top_p, min_p).numpy()
    expected = np.zeros(24)
    expected[kept] = torch.softmax(torch.from_numpy(row[kept]).double() / temperature, 0).numpy()
    sampler = RowSampler(24)
    draws = 20_000
    counts = np.bincount(
        [
            sampler.sample(row, temperature=temperature, seed=s, position=9, top_k=top_k, top_p=top_p, min_p=min_p)
            for s in range(draws)
        ],
        minlength=24,
    )
    assert counts[expected == 0].sum() == 0
    likely = expected * draws >= 5
    chi2 = float(((counts[likely] - expected[likely] * draws) ** 2 / (expected[likely] * draws)).sum())
    freedom = int(likely.sum()) - 1
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom) + 5


@settings(max_examples=300)
@given(
    seed=st.integers(-(2**63), 2**63),
    size=st.sampled_from([1, 2, 63, 64, 65, 300, 5000]),
    scale=st.sampled_from([0.0, 0.1, 2.0, 10.0, 60.0]),
    levels=st.sampled_from([None, 1, 2]),
    temperature=st.sampled_from([1e-3, 0.2, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 40, 5000, 10**9]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-9]),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
)
def test_every_draw_is_the_references_draw(
    seed: int,
    size: int,
    scale: float,
    levels: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    row = random_row(seed % 1000, size, scale, levels)
    token = RowSampler(size).sample(
        row, temperature=temperature, seed=seed, position=5, top_k=top_k, top_p=top_p, min_p=min_p
    )
    # A cut that falls between two tokens to within rounding may fall on either side.
    cuts = {
        (p if p < 1.0 else top_p, min(m, 1.0))
        for p in (top_p * (1 + 1e-6), top_p, top_p * (1 - 1e-6))
        for m in (min_p * (1 + 1e-6), min_p, min_p * (1 - 1e-6))
    }
    logits = torch.from_numpy(row)
    tokens = {reference.sample(logits, temperature, seed, 5, top_k, p, m) for p, m in cuts}
    assert token in tokens


@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("temperature", [0.05, 0.7, 2.0])
def test_the_full_vocabulary_is_drawn_from_without_taking_every_logarithm(scale: float, temperature: float) -> None:
    sampler = RowSampler(VOCAB)
    row = random_row(8, VOCAB, scale)
    for seed in range(12):
        wanted = reference.sample(torch.from_numpy(row), temperature, seed, seed)
        assert sampler.sample(row, temperature=temperature, seed=seed, position=seed) == wanted


def test_unlikely_tokens_are_drawn_as_often_as_they_should_be() -> None:
    # 4,000 tokens that lie far below the first one hold 9 % of the mass together: all of it is rare noise.
    row = np.full(4001, -10.6, dtype=np.float32)
    row[0] = 0.0
    share = 4000 * np.exp(-10.6) / (1 + 4000 * np.exp(-10.6))
    sampler = RowSampler(4001)
    draws = [sampler.sample(row, temperature=1.0, seed=s, position=0) for s in range(8000)]
    rare = sum(token != 0 for token in draws)
    assert abs(rare - share * 8000) < 5 * np.sqrt(8000 * share)
    assert len({token for token in draws if token}) > 0.9 * rare


@given(
    st.integers(0, 999), st.sampled_from([1, 50, 64, 128, 129, 6000]), st.sampled_from([0, 1, 3]), st.integers(1, 60)
)
def test_top_tokens_are_those_of_a_stable_sort(seed: int, size: int, levels: int, k: int) -> None:
    row = random_row(seed, size, 3.0, levels or None)
    assert top_tokens(row, k).tolist() == np.argsort(-row, kind="stable")[:k].tolist()


@given(st.integers(0, 999), st.sampled_from([1, 3, 1000]), st.sampled_from([0.0, 1.0, 40.0]))
def test_log_normaliser_is_logsumexp(seed: int, size: int, scale: float) -> None:
    row = random_row(seed, size, scale)
    wanted = float(torch.logsumexp(torch.from_numpy(row).double(), 0))
    assert log_normaliser(row) == pytest.approx(wanted, abs=1e-5)


def test_top_p_keeps_the_shortest_prefix_that_reaches_it() -> None:
    row = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32))
    for top_p, kept in ((0.4, 1), (0.499, 1), (0.501, 2), (0.749, 2), (0.751, 3), (0.999, 4)):
        assert len(kept_tokens(row, 1.0, 0, top_p, 0.0)) == kept, top_p
    # After top_k the mass is renormalised: 0.5 / 0.75 is enough for 0.6.
    assert len(kept_tokens(row, 1.0, 2, 0.6, 0.0)) == 1
    assert kept_tokens(row, 1.0, 0, 1.0, 0.5).tolist() == [0, 1]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 999),
    size=st.sampled_from([300, 5000]),
    scale=st.sampled_from([0.1, 1.0, 2.5]),
    levels=st.sampled_from([None, 2]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.3, 0.9, 0.999]),
)
def test_a_large_nucleus_is_the_references(
    seed: int, size: int, scale: float, levels: int | None, temperature: float, top_p: float
) -> None:
    row = random_row(seed, size, scale, levels)
    kept = kept_tokens(row, temperature, 0, top_p, 0.0)
    shortest, longest = (
        len(reference.kept_tokens(torch.from_numpy(row), temperature, 0, p)) for p in (top_p - 2e-6, top_p + 2e-6)
    )
    assert shortest <= len(kept) <= longest
    assert set(kept.tolist()) == set(np.argsort(-row, kind="stable")[: len(kept)].tolist())


def test_a_flat_distribution_needs_a_long_prefix() -> None:
    row = np.zeros(VOCAB, dtype=np.float32)
    assert abs(len(kept_tokens(row, 1.0, 0, 0.5, 0.0)) - VOCAB // 2) <= 1


def test_masked_tokens_are_never_drawn() -> None:
    row = np.full(200, -np.inf, dtype=np.float32)
    row[[3, 150]] = 1.0
    sampler = RowSampler(200)
    for settings_ in ({}, {"top_k": 10}, {"top_p": 0.99}, {"min_p": 0.1}):
        drawn = {sampler.sample(row, temperature=2.0, seed=s, position=0, **settings_) for s in range(50)}
        assert drawn == {3, 150}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_are_not_finite_are_reported(bad: float) -> None:
    row = np.zeros(10, dtype=np.float32)
    row[4] = bad
    sampler = RowSampler(10)
    assert sampler.sample(row, temperature=1.0, seed=0, position=0) == -1
    assert sampler.sample(np.full(10, -np.inf, dtype=np.float32), temperature=1.0, seed=0, position=0) == -1


def test_a_tiny_temperature_takes_the_largest() -> None:
    row = random_row(1, 1000, 3.0)
    assert RowSampler(1000).sample(row, temperature=1e-30, seed=3, position=0) == int(row.argmax())


def test_argmax_takes_the_lowest_of_equals() -> None:
    rows = np.array([[1, 3, 3, 0], [2, 2, 2, 2], [0, 0, 0, 1]], dtype=np.float32)
    assert argmax_rows(rows).tolist() == [1, 0, 3]


def test_penalties_are_applied_as_published() -> None:
    row = np.array([2.0, -2.0, 1.0, 0.0], dtype=np.float32)
    penalise_repetition(row, np.array([0, 1]), 2.0)
    assert row.tolist() == [1.0, -4.0, 1.0, 0.0]
    penalise_counts(row, np.array([0, 2]), np.array([3.0, 1.0], dtype=np.float32), 0.5, 0.25)
    assert row.tolist() == [-0.75, -4.0, 0.25, 0.0]
