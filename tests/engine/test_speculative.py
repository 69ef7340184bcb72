"""Guesses change how many steps an answer takes, and nothing else: not a token, not a probability, not a page."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.device import CpuDevice, ScriptedDevice
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.speculative import NGRAM, Lookup, depth, expected, standing
from tests.engine import lives
from tests.engine.lives import Job, assert_the_same, jobs, prompt

Alone = Callable[[Sequence[int], int], list[int]]
Make = Callable[..., Any]

small_texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def test_a_text_goes_on_as_it_did_before() -> None:
    lookup = Lookup()
    text = array("i", [1, 2, 3, 4, 5, 6, 7, 1, 2])
    lookup.follow(text, 9)
    assert lookup.guess(4) == [] and lookup.probability == 0
    text.append(3)
    lookup.follow(text, 10)
    assert lookup.guess(4) == [4, 5, 6, 7]
    assert lookup.guess(9) == [4, 5, 6, 7, 1, 2, 3, 4, 5], "what is guessed goes on itself"
    before = lookup.probability
    text.append(4)
    lookup.follow(text, 11)
    assert lookup.guess(3) == [5, 6, 7] and lookup.probability > before
    text.append(9)
    lookup.follow(text, 12)
    assert lookup.guess(3) == [], "a wrong guess is not gone on with"


def test_what_is_not_known_yet_is_not_looked_at() -> None:
    lookup, text = Lookup(), array("i", [1, 2, 3, 8, 1, 2, 3, 0])
    lookup.follow(text, 7)
    assert lookup.guess(1) == [8]
    text[7] = 8
    lookup.follow(text, 8)
    assert lookup.guess(2) == [1, 2]


@given(small_texts, st.integers(1, 60))
def test_a_prompt_read_at_once_is_known_as_well_as_one_followed(text: list[int], cut: int) -> None:
    tokens = array("i", text)
    at_once, followed = Lookup(), Lookup()
    at_once.follow(tokens, len(tokens))
    for known in range(min(cut, len(tokens)), len(tokens) + 1):
        followed.follow(tokens, known)
    followed.follow(tokens, len(tokens))
    ends = [i for i in range(NGRAM, len(text)) if text[i - NGRAM : i] == text[-NGRAM:] and len(text) >= NGRAM]
    assert at_once.guess(1) == ([text[ends[-1]]] if ends else [])
    if ends:
        assert followed.guess(1)
    assert 0 <= followed.probability <= 1


@given(
    st.floats(0, 1), st.integers(0, 12), st.floats(1, 64), st.floats(1e-3, 1.0), st.floats(1e-5, 1.0),
    st.one_of(st.just(math.inf), st.floats(0, 1)),
)  # fmt: skip
def test_as_many_guesses_are_computed_as_bring_the_most_tokens_a_second(
    probability: float, most: int, tokens: float, seconds: float, row: float, room: float
) -> None:
    found = depth(probability, most, tokens=tokens, seconds=seconds, row=row, room=room)
    row = max(row, seconds / 256)

    def rate(count: int) -> float:
        return (tokens + expected(probability, count)) / (seconds + count * row)

    allowed = [count for count in range(most + 1) if count * row <= room]
    assert found in allowed
    assert rate(found) >= max(map(rate, allowed)) * (1 - 1e-9)


def test_who_is_seldom_right_or_shares_a_busy_step_is_not_guessed_for() -> None:
    alone: dict[str, float] = {"tokens": 1, "seconds": 0.010, "row": 0.001, "room": math.inf}
    assert depth(0.95, 8, **alone) == 8
    assert 1 <= depth(0.5, 8, **alone) < 8
    assert depth(0.05, 8, **alone) == 0
    crowd = {**alone, "tokens": 64, "seconds": 0.074}
    assert depth(0.8, 8, **crowd) == 0
    assert depth(0.95, 8, **{**alone, "room": 0.003}) == 3, "nobody's longest step gets longer"
    nothing_known = depth(0.5, 8, tokens=1, seconds=0.0, row=0.0, room=math.inf)
    assert 0 < nothing_known < 8


def test_guesses_stand_up_to_the_first_wrong_one_or_the_end() -> None:
    request = Request("a", array("i", [1, 2, 7]), SamplingParams(stop_token_ids=(9,)), limit=40, arrival=0)
    assert standing(request, [7, 8, 5], [8, 5, 6]) == 3
    assert standing(request, [7, 8, 5], [4, 5, 6]) == 1
    assert standing(request, [8, 8, 5], [8, 5, 6]) == 0
    assert standing(request, [7, 9, 5], [9, 5, 6]) == 1, "nothing comes after a stop token"


class Prophet:
    """Guesses what the model will say, rightly or wrongly as `pattern` says, position by position."""

    def __init__(self, request: Request, alone: Alone, pattern: Sequence[bool]) -> None:
        self._request = request
        self._alone = alone
        self._pattern = pattern
        self._known = 0
        self.probability = 1.0

    def follow(self, tokens: array[int], known: int) -> None:
        assert known == len(tokens) - self._request.ahead
        self._known = known

    def guess(self, most: int) -> list[int]:
        assert self._request.ahead == 0
        right = self._alone(self._request.tokens[: self._known], most)
        said = [self._pattern[(self._known + i) % len(self._pattern)] for i in range(most)]
        return [token if true else (token + 1) % 60 for token, true in zip(right, said, strict=True)]


@pytest.mark.parametrize(
    ("device", "sizes", "right"), [(CpuDevice, [5, 5, 5, 5], 12), (ScriptedDevice, [5, 1, 5, 5, 4], 11)]
)
def test_right_guesses_save_steps_and_are_counted(
    make_bench: Make, alone: Alone, device: Any, sizes: list[int], right: int
) -> None:
    """A device that is a step behind has the second step before the first token can be guessed from."""
    bench = make_bench(
        device=device(), speculate="lookup", speculate_tokens=4, guesser=lambda r: Prophet(r, alone, [True])
    )
    bench.submit("a", prompt(5), max_tokens=16)
    said = bench.drain()["a"]
    assert said.tokens == alone(prompt(5), 16)
    assert bench.model.sizes == sizes
    assert (said.counters.completion, said.counters.accepted, said.counters.rejected) == (16, right, 0)
    metrics = bench.core.snapshot()
    assert (metrics.accepted_tokens, metrics.rejected_tokens, metrics.completion_tokens) == (right, 0, 16)
    usage = bench.core.usage(["a"])["a"]
    assert usage.counters == said.counters and usage.finish_reason == "length"


def test_wrong_guesses_cost_rows_and_change_nothing(make_bench: Make, alone: Alone) -> None:
    bench = make_bench(speculate="lookup", speculate_tokens=3, guesser=lambda r: Prophet(r, alone, [False]))
    bench.submit("a", prompt(5), max_tokens=5)
    said = bench.drain()["a"]
    assert said.tokens == alone(prompt(5), 5)
    # no more is guessed than may still be said
    assert bench.model.sizes == [5, 4, 3, 2, 1]
    assert (said.counters.accepted, said.counters.rejected) == (0, 6)


def test_penalties_are_computed_without_guesses(make_bench: Make, alone: Alone) -> None:
    settings = {"speculate": "lookup", "guesser": lambda r: Prophet(r, alone, [True])}
    bench, plain = make_bench(**settings), make_bench()
    for one in (bench, plain):
        one.submit("a", prompt(5), max_tokens=9, frequency_penalty=0.5)
    assert bench.drain()["a"].tokens == plain.drain()["a"].tokens
    assert bench.said["a"].counters.accepted == bench.said["a"].counters.rejected == 0
    assert set(bench.model.sizes[1:]) == {1}


def test_answers_end_at_a_stop_token_among_guesses(make_bench: Make, alone: Alone) -> None:
    tokens = alone(prompt(5), 20)
    stop = tokens[9]
    wanted = tokens[: tokens.index(stop) + 1]
    bench = make_bench(speculate="lookup", speculate_tokens=8, guesser=lambda r: Prophet(r, alone, [True]))
    bench.submit("a", prompt(5), max_tokens=20, stop_token_ids=(stop,))
    said = bench.drain()["a"]
    assert (said.tokens, said.ends, said.stop_token) == (wanted, ["stop"], stop)
    assert said.counters.completion == len(wanted)


def test_logits_that_are_not_finite_end_an_answer_behind_right_guesses(make_bench: Make, alone: Alone) -> None:
    bench = make_bench(speculate="lookup", speculate_tokens=4, guesser=lambda r: Prophet(r, alone, [True]))
    forward = bench.model.forward

    def broken(batch: Any, kv: Any) -> Any:
        logits = forward(batch, kv)
        for row, at in enumerate(batch.logit_rows.tolist()):
            if int(batch.positions[at]) == 12:
                logits[row] = math.nan
        return logits

    bench.model.forward = broken
    bench.submit("a", prompt(5), max_tokens=20)
    said = bench.drain()["a"]
    assert (said.tokens, said.ends) == (alone(prompt(5), 8), ["error"])


@settings(max_examples=25, deadline=None)
@given(jobs, st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 9), st.booleans(), st.integers(5, 12))
def test_any_guesses_leave_every_answer_as_it_is(
    make_bench: Make,
    alone: Alone,
    wanted: list[Job],
    pattern: list[bool],
    tokens: int,
    late: bool,
    pages: int,
) -> None:
    """Random arrivals, few pages (so: preemption), cached prefixes, aborts, stop tokens, drawn tokens."""

    def play(**settings: Any) -> Any:
        bench = make_bench(
            pages=pages, max_context=64, max_running=3, step_tokens=24, device=ScriptedDevice() if late else None,
            **settings,
        )  # fmt: skip
        return lives.play(bench, wanted)

    plain = play()
    said = play(speculate="lookup", speculate_tokens=tokens, guesser=lambda r: Prophet(r, alone, pattern))
    assert_the_same(plain, said)


def test_what_is_drawn_behind_a_right_guess_has_the_models_distribution(make_bench: Make) -> None:
    """Of 500 seeds those whose first draw was guessed: the second draws, computed with the guess, against softmax."""
    wished = 5

    class Stubborn:
        probability = 1.0

        def follow(self, tokens: array[int], known: int) -> None:
            assert known == len(tokens)

        def guess(self, most: int) -> list[int]:
            return [wished] * most

    bench = make_bench(
        speculate="lookup", speculate_tokens=1, guesser=lambda r: Stubborn(), pages=512, prefix_cache=False,
        max_queued=500,
    )  # fmt: skip
    for seed in range(500):
        params = {"max_tokens": 2, "temperature": 1.0, "seed": seed, "ignore_eos": True, "logit_bias": {wished: 14.0}}
        assert bench.submit(str(seed), [3], **params) is None
    said = bench.drain()
    drawn = [one.tokens[1] for one in said.values() if one.counters.accepted]
    assert 100 < len(drawn) < 450
    best = (4 * 7 + 6 * 38) % 60
    logits = [-((token - best) % 61) / 3 + (14.0 if token == wished else 0.0) for token in range(61)]
    total = sum(map(math.exp, logits))
    counts, square, cells, rest, others = Counter(drawn), 0.0, 0, 0.0, 0
    for token, logit in enumerate(logits):
        mean = math.exp(logit) / total * len(drawn)
        if mean < 5:
            rest, others = rest + mean, others + counts[token]
            continue
        square, cells = square + (counts[token] - mean) ** 2 / mean, cells + 1
    square += (others - rest) ** 2 / rest
    # 99.9 % of chi-square by Wilson and Hilferty; the seeds are fixed, so that it passes always or never
    limit = cells * (1 - 2 / (9 * cells) + 3.09 * math.sqrt(2 / (9 * cells))) ** 3
    assert cells >= 1 and square < limit
