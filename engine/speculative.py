"""Speculative decoding: next tokens of a request are guessed, and checked in the step that computes the next one. Here
what a request has said before is guessed to come again; engine.draft has a smaller model guess.

A decode that has guesses is computed as 1 + k rows of its step, one for each position, every row with the keys of those
before it; each row chooses the token of its position exactly as it would alone. The first choice is the request's next
token. While the choice before a row equals the guess that the row was computed with, the row's own choice stands, too;
the others are dropped. Because the noise of a draw follows from seed, position and token alone (kernels.sampling), the
tokens are those that the request would get without guesses, greedy or drawn, and so is their distribution. Nothing is
rolled back but a count: keys of a wrong guess are overwritten when the position is computed again, and pages are
published only as far as tokens stand.

Requests whose penalties count earlier tokens are left alone: their logits at a position depend on which tokens stand
before it, which nobody knows yet.

Source of the lookup: A. Saxena, "Prompt Lookup Decoding", 2023; of the expected number of accepted guesses: Leviathan,
Kalman, Matias, arXiv 2211.17192.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from engine.config import EngineConfig
from engine.request import Draft, Request, Work
from engine.scheduler import Scheduler, shape_of
from engine.step_time import Pace

NGRAM = 3
"""Tokens that must be equal before what followed them is guessed to follow again."""
_BITS = 21
_MASK = (1 << NGRAM * _BITS) - 1
MEMORY = 0.95
"""What a guess counts for in the estimate after another one was checked."""
FIRST = (1.0, 2.0)
"""Right guesses, and guesses, that a request is taken to have had before its first."""
LEAST_ROW = 1 / 256
"""Least cost of a row that is believed, in parts of the step that it joins: a fit may make it nothing."""
UNKNOWN_ROW = 1 / 32
"""The same while nothing is known of steps."""


class Guesser(Protocol):
    """Guesses how one request goes on."""

    def follow(self, tokens: array[int], known: int) -> None:
        """The request's first `known` tokens are known, guesses of them right or wrong."""
        ...

    @property
    def probability(self) -> float:
        """Estimate that a guess is right where those before it are; 0 where there is none now."""
        ...

    def guess(self, most: int) -> list[int]:
        """Up to `most` next tokens."""
        ...


class Source(Protocol):
    """Where the guesses of an engine come from."""

    took: float
    """Seconds that a device took for the guesses of the latest step"""
    compares: bool
    """Wants to hear of requests that have no guesses"""

    def guesser(self, request: Request) -> Guesser:
        """The guesser of one request."""
        ...

    def seconds(self, requests: int, context: int) -> float:
        """Time that one more guess for each of so many requests takes, which have so many tokens together."""
        ...

    def prepare(self, asked: Sequence[tuple[Request, int]], idle: Sequence[Request], *, worth: bool) -> None:
        """Guessers of requests, whose tokens are all known, are about to be asked for so many guesses each. idle: other
        requests; worth: guesses would pay for them if more of them were right."""
        ...


class Lookups:
    """Guessers that guess each by itself, at no cost."""

    took = 0.0
    compares = False

    def __init__(self, guesser: Callable[[Request], Guesser] | None = None) -> None:
        """guesser: makes one for a request; None: a Lookup."""
        self._make = guesser or (lambda request: Lookup())

    def guesser(self, request: Request) -> Guesser:
        """See `Source`."""
        return self._make(request)

    def seconds(self, requests: int, context: int) -> float:
        """Nothing beside the step's."""
        return 0.0

    def prepare(self, asked: Sequence[tuple[Request, int]], idle: Sequence[Request], *, worth: bool) -> None:
        """Nothing has to be."""


class Lookup:
    """Guesses that a request goes on as it did after the same NGRAM tokens before.

    Every guess is compared with what came, whether it was computed or not: so the estimate goes on being made while
    guesses do not pay, and finds out when they do again.
    """

    def __init__(self) -> None:
        self._history = array("i")
        self._index: dict[int, int] = {}
        """n-gram → the place after its latest occurrence but the one at the end"""
        self._at = -1
        """place in the history of the next guess; −1: there is none"""
        self._key = 0
        self._right, self._tried = FIRST

    def follow(self, tokens: array[int], known: int) -> None:
        """See `Guesser`."""
        history = self._history
        if not history:
            self._read(tokens[:known])
            return
        for token in tokens[len(history) : known]:
            if self._at >= 0:
                right = history[self._at] == token
                self._right = MEMORY * self._right + right
                self._tried = MEMORY * self._tried + 1
                self._at = self._at + 1 if right else -1
            history.append(token)
            self._key = (self._key << _BITS | token) & _MASK
            before = self._index.get(self._key, -1)
            self._index[self._key] = len(history)
            if self._at < 0 and len(history) >= NGRAM:
                self._at = before

    def _read(self, tokens: array[int]) -> None:
        """Take in what is there at the beginning, by array arithmetic: a prompt may have 100,000 tokens."""
        self._history = tokens
        ids = np.frombuffer(tokens, dtype=np.int32).astype(np.int64)
        count = max(0, len(ids) - NGRAM + 1)
        keys = np.zeros(count, dtype=np.int64)
        for i in range(NGRAM):
            keys = keys << _BITS | ids[i : i + count]
        self._index = dict(zip(keys[:-1].tolist(), range(NGRAM, len(ids)), strict=True))
        for token in tokens[-NGRAM:]:
            self._key = (self._key << _BITS | token) & _MASK
        if count:
            self._at = self._index.get(self._key, -1)
            self._index[self._key] = len(ids)

    @property
    def probability(self) -> float:
        """See `Guesser`."""
        return self._right / self._tried if self._at >= 0 else 0.0

    def guess(self, most: int) -> list[int]:
        """See `Guesser`. What is guessed may itself be gone on with: a short period goes round."""
        guesses = self._history[self._at : self._at + most].tolist() if self._at >= 0 else []
        period = len(guesses)
        while period > 0 and len(guesses) < most:
            guesses.append(guesses[-period])
        return guesses


def expected(probability: float, guesses: int) -> float:
    """Tokens that so many guesses bring on average, each right with this probability if those before it are."""
    if probability >= 1.0:
        return float(guesses)
    return float(probability * (1.0 - probability**guesses) / (1.0 - probability))


def depth(probability: float, most: int, *, tokens: float, seconds: float, row: float, room: float) -> int:
    """How many guesses of a request make a step bring the most tokens a second; 0: none does. Pure.

    tokens, seconds: what the step brings, and takes, without them; row: seconds that one more row takes; room: seconds
    that rows may take together. The next guess is worth its row while its chance of being accepted, per second of the
    row, is above the tokens per second so far: chances fall and the rate rises, so the first that is not is the last.
    """
    if seconds <= 0.0:
        seconds, row = 1.0, UNKNOWN_ROW
        room = most * row
    row = max(row, LEAST_ROW * seconds)
    count, chance = 0, probability
    while count < most and (count + 1) * row <= room and chance * seconds > tokens * row:
        tokens += chance
        seconds += row
        chance *= probability
        count += 1
    return count


def steady(request: Request) -> bool:
    """True where what is chosen at a position does not depend on counts of the tokens before it."""
    params = request.params
    return params.repetition_penalty == 1.0 and params.frequency_penalty == 0.0 and params.presence_penalty == 0.0


def most_sequences(config: EngineConfig, max_running: int) -> int:
    """Sequences that a step has room for, guesses included; with none of them a row for each that runs."""
    if config.speculate == "off":
        return max_running
    if not 1 <= config.speculate_tokens <= 64:
        raise ValueError(f"speculate_tokens {config.speculate_tokens} must be between 1 and 64")
    return min(config.step_tokens, 2 * max_running + config.speculate_tokens)


class Speculation:
    """Decides which requests of a step are computed with how many guesses. One thread."""

    def __init__(self, scheduler: Scheduler, source: Source, *, tokens: int, rows: int) -> None:
        """tokens: most guesses of a request in a step; rows: most sequences of a step, guesses included."""
        self._scheduler = scheduler
        self._source = source
        self._tokens = tokens
        self._rows = rows
        self.waits = False
        """The next step is to be decided when the latest one has been collected: somebody's guesses are worth it"""

    @property
    def took(self) -> float:
        """Seconds that a device took for the guesses of the latest step."""
        return self._source.took

    def draft(self, work: Sequence[Work], pace: Pace) -> list[Draft]:
        """Guesses for the decodes of a step that has been scheduled; takes the pages that they need. What prompts leave
        of the step is theirs, and pages above the watermark."""
        self.waits = False
        found = [(-p, request.rank, request) for request, count in work if count == 1 and (p := self._look(request))]
        if not found:
            self._source.prepare((), (), worth=False)
            return []
        found.sort(key=lambda entry: entry[:2])
        likely = [(-negative, request) for negative, _, request in found]
        asked: list[tuple[Request, int]] = []
        idle: list[Request] = []
        counts = self._counts(likely, work, pace)
        for _, request in likely:
            if not (count := counts[request]):
                idle.append(request)
            elif request.ahead:
                self.waits = True
            elif count := self._scheduler.extend(request, count):
                asked.append((request, count))
        worth = self._source.compares and bool(idle) and self._counts([(1.0, idle[0])], work, pace)[idle[0]] > 0
        self._source.prepare(asked, idle, worth=worth)
        self.waits |= bool(asked)
        drafts: list[Draft] = []
        for request, count in asked:
            assert request.guesser is not None
            if guesses := request.guesser.guess(count):
                drafts.append(Draft(request, guesses, request.epoch))
        return drafts

    def _counts(self, likely: Sequence[tuple[float, Request]], work: Sequence[Work], pace: Pace) -> dict[Request, int]:
        """How many guesses pay, of requests by falling probability. What guessing takes is shared by those who guess,
        so it is asked again for the fewer until there are no fewer."""
        shape = shape_of(work)
        sharing = likely
        while True:
            context = sum(len(request.tokens) for _, request in sharing)
            share = self._source.seconds(len(sharing), context) / len(sharing)
            seconds, tokens = pace.cost.seconds(shape), float(len(work))
            left = min(self._rows - shape.requests, self._scheduler.limits.step_tokens - shape.tokens)
            counts = {request: 0 for _, request in likely}
            for probability, request in sharing:
                known = len(request.tokens)
                row = pace.cost.per_request + pace.cost.per_token + pace.cost.per_context * known + share
                count = counts[request] = depth(
                    probability,
                    min(self._tokens, left, request.limit - known - 1),
                    tokens=tokens,
                    seconds=seconds,
                    row=row,
                    room=pace.seconds - seconds,
                )
                if not request.ahead:
                    left -= count
                    seconds += row * count
                    tokens += expected(probability, count)
            guessing = [entry for entry in sharing if counts[entry[1]]]
            if share == 0.0 or not guessing or len(guessing) == len(sharing):
                return counts
            sharing = guessing

    def _look(self, request: Request) -> float:
        """How likely a guess of a request is right, 0 where there is none; work of one token that is no decode has
        none."""
        if request.scheduled != len(request.tokens) or not steady(request):
            return 0.0
        if request.guesser is None:
            request.guesser = self._source.guesser(request)
        request.guesser.follow(request.tokens, len(request.tokens) - request.ahead)
        return request.guesser.probability


def standing(request: Request, guesses: Sequence[int], chosen: Sequence[int]) -> int:
    """How many guesses stand, of a request whose last token was chosen just before them: the first ones that equal the
    token chosen at their place, as long as that is not the end."""
    count, token = 0, request.tokens[-1]
    for guess, choice in zip(guesses, chosen, strict=True):
        if guess != token or token in request.stops:
            break
        count += 1
        token = choice
    return count
