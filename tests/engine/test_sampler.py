"""The sampler's rows: parameters mixed in one batch, each row by itself, against a plain float64 oracle."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import Request
from engine.sampler import BROKEN, RowState, Sampled, Sampler, TokenCounts, logprobs_of, plain
from engine.sampling_params import SamplingParams
from kernels import reference

VOCAB = 40
EOS = 39


def request(row: int, tokens: list[int], prompt: int, **params: Any) -> Request:
    settings_ = {"temperature": 0.0, "max_tokens": 50, **params}
    made = Request(
        str(row),
        array("i", tokens[:prompt]),
        SamplingParams(**settings_),
        limit=prompt + 50,
        arrival=row,
        seed=settings_.get("seed") or 0,
        eos_ids=(EOS,),
    )
    made.tokens.extend(tokens[prompt:])
    made.row = row
    return made


def admit(sampler: Sampler, r: Request) -> None:
    sampler.install(r.row, None if plain(r) else RowState(r))


def sample(sampler: Sampler, raw: torch.Tensor, requests: list[Request]) -> Sampled:
    """Sample the token after all that the requests have, with a token table that has those."""
    table = np.zeros((8, 128), dtype=np.int32)
    for r in requests:
        table[r.row, : len(r.tokens)] = r.tokens
    sampled = sampler.sample(raw, [r.row for r in requests], [len(r.tokens) for r in requests], table)
    for r, token in zip(requests, sampled.tokens, strict=True):
        assert table[r.row, len(r.tokens)] == token
    return sampled


def oracle_logits(raw: np.ndarray, r: Request) -> np.ndarray:
    """The rewritten row in float64, straight from the definitions."""
    p = r.params
    row = raw.astype(np.float64).copy()
    for token in set(r.tokens):
        row[token] = row[token] / p.repetition_penalty if row[token] > 0 else row[token] * p.repetition_penalty
    for token, count in Counter(r.tokens[r.prompt_len :]).items():
        row[token] -= p.frequency_penalty * count + p.presence_penalty
    for token, bias in p.logit_bias.items():
        row[token] += bias
    if r.generated < p.min_tokens:
        for token in (*p.stop_token_ids, EOS):
            row[token] = -np.inf
    return row


def oracle(raw: np.ndarray, r: Request) -> set[int]:
    """Tokens that float32 rounding may leave as the answer."""
    row = oracle_logits(raw, r)
    p = r.params
    if p.temperature == 0:
        return set(np.flatnonzero(row >= row.max() - 1e-4).tolist())
    logits = torch.from_numpy(row)
    return {
        reference.sample(logits, p.temperature, r.seed, len(r.tokens), p.top_k, min(top_p, 1.0), p.min_p)
        for top_p in ((p.top_p * (1 - 1e-5), p.top_p, p.top_p * (1 + 1e-5)) if p.top_p < 1 else (1.0,))
    }


any_params = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_p": st.sampled_from([0.3, 0.9]),
        "top_k": st.sampled_from([1, 5]),
        "min_p": st.sampled_from([0.07]),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "frequency_penalty": st.sampled_from([-1.0, 0.7]),
        "presence_penalty": st.sampled_from([-0.5, 1.5]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.5, 2.5]), max_size=3),
        "seed": st.integers(1, 99),
        "min_tokens": st.sampled_from([3, 9]),
        "stop_token_ids": st.just((5, 6)),
        "logprobs": st.sampled_from([0, 4]),
    },
)
any_row = st.tuples(any_params, st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30), st.integers(1, 30))


@settings(max_examples=200)
@given(rows=st.lists(any_row, min_size=1, max_size=6), noise=st.integers(0, 10_000))
def test_a_mixed_batch_gives_each_row_the_oracles_token(
    rows: list[tuple[dict[str, Any], list[int], int]], noise: int
) -> None:
    raw = (np.random.default_rng(noise).standard_normal((len(rows), VOCAB)) * 3).astype(np.float32)
    requests = [
        request(i, tokens, min(prompt, len(tokens)), **params) for i, (params, tokens, prompt) in enumerate(rows)
    ]
    sampler = Sampler(VOCAB, len(rows))
    for r in requests:
        admit(sampler, r)
    sampled = sample(sampler, torch.from_numpy(raw.copy()), requests)
    for i, r in enumerate(requests):
        assert sampled.tokens[i] in oracle(raw[i], r)
        alone = sample(sampler, torch.from_numpy(raw[i : i + 1].copy()), [r])
        assert alone.tokens == [sampled.tokens[i]]
        assert (i in sampled.logprobs) == (r.params.logprobs is not None)
        if i in sampled.logprobs:
            assert sampled.logprobs[i] == logprobs_of(raw[i], sampled.tokens[i], r.params.logprobs or 0)


def test_penalties_follow_the_output_step_by_step() -> None:
    r = request(0, [1, 2, 3, 2], 4, repetition_penalty=1.2, frequency_penalty=0.6, presence_penalty=0.3)
    sampler = Sampler(VOCAB, 1)
    admit(sampler, r)
    generator = np.random.default_rng(1)
    for _ in range(40):
        raw = generator.standard_normal((1, VOCAB)).astype(np.float32)
        token = sample(sampler, torch.from_numpy(raw), [r]).tokens[0]
        assert token in oracle(raw[0], r)
        r.tokens.append(token)
    # A request that comes back after a preemption starts from its tokens alone.
    again = Sampler(VOCAB, 1)
    admit(again, r)
    raw = torch.from_numpy(generator.standard_normal((1, VOCAB)).astype(np.float32))
    assert sample(again, raw, [r]).tokens == sample(sampler, raw, [r]).tokens


def test_min_tokens_masks_until_it_is_reached() -> None:
    raw = torch.zeros(1, VOCAB)
    raw[0, EOS], raw[0, 5], raw[0, 8] = 9.0, 8.0, 1.0
    sampler = Sampler(VOCAB, 1)
    for generated, wanted in ((0, 8), (1, 8), (2, EOS)):
        r = request(0, [1] * (3 + generated), 3, min_tokens=2, stop_token_ids=(5,))
        admit(sampler, r)
        assert sample(sampler, raw, [r]).tokens == [wanted]


def test_the_logits_are_not_changed() -> None:
    raw = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    before = raw.clone()
    rows = [request(0, [1, 2], 1, presence_penalty=1.0, logit_bias={4: 5.0}), request(1, [1], 1, temperature=1.0)]
    sampler = Sampler(VOCAB, 2)
    for r in rows:
        admit(sampler, r)
    sample(sampler, raw, rows)
    assert torch.equal(raw, before)


@pytest.mark.parametrize("mixed", [False, True])
def test_broken_rows_are_marked_and_the_others_served(mixed: bool) -> None:
    raw = torch.zeros(4, VOCAB)
    raw[0, 7] = float("nan")
    raw[1, 7] = float("inf")
    raw[2, 7] = 1.0
    raw[3] = -float("inf")
    params: list[dict[str, Any]] = [{}, {"temperature": 1.0, "logprobs": 1} if mixed else {}, {}, {}]
    rows = [request(i, [1], 1, **p) for i, p in enumerate(params)]
    sampler = Sampler(VOCAB, 4)
    for r in rows:
        admit(sampler, r)
    sampled = sample(sampler, raw, rows)
    assert sampled.tokens == [BROKEN, BROKEN, 7, BROKEN]
    assert sampled.logprobs == {}


def test_a_row_keeps_nothing_of_its_last_owner() -> None:
    sampler = Sampler(VOCAB, 1)
    admit(sampler, request(0, [1], 1, logit_bias={3: 100.0}))
    new = request(0, [1], 1)
    admit(sampler, new)
    raw = torch.zeros(1, VOCAB)
    raw[0, 9] = 1.0
    assert sample(sampler, raw, [new]).tokens == [9]


def test_logprobs_sum_to_one_and_ties_are_ordered_by_id() -> None:
    row = np.zeros(4, dtype=np.float32)
    said = logprobs_of(row, 3, 4)
    assert [token for token, _ in said.top] == [0, 1, 2, 3]
    assert sum(np.exp(value) for _, value in said.top) == pytest.approx(1.0)
    assert said.logprob == pytest.approx(np.log(0.25))


@given(st.lists(st.lists(st.integers(0, 200), max_size=40), max_size=5))
def test_token_counts_are_a_counter(batches: list[list[int]]) -> None:
    counts = TokenCounts()
    for batch in batches:
        counts.add(batch)
    wanted = Counter(token for batch in batches for token in batch)
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == wanted
