"""Speculative decoding by a draft model: a smaller model of the same vocabulary says how requests go on, and the step
that computes their next tokens checks it, as engine.speculative has it for all guesses.

The draft has pages of its own for keys and values, as many as the model, and uses the page tables of the requests: a
token lies in the same place of both. So its memory is bounded by the pages, nothing is handed out a second time, and
whoever leaves a row has left the draft's memory, too. A request that starts to run, again too, is unknown to the draft.

Before a step, one pass of the draft computes what has been accepted since, for all requests that are guessed for, and
gives their first guesses; a pass for each further guess follows. Keys of wrong guesses are overwritten by what stands
instead. A pass computes at most as many tokens as a step: a long prompt is caught up with over several steps, without
guesses meanwhile, and of requests that would write the same shared page one waits for the next step.

A request that is not worth guessing for is compared all the same, now and then: the draft reads what was generated
meanwhile, and each token tells whether it would have been guessed. It reads at most PER_TOKEN tokens for each that is
generated without guesses. Where its passes take too long for any guess to pay, one of them is timed again, now and
then. New requests are expected to do as others did.

After: Leviathan, Kalman, Matias, arXiv 2211.17192; Chen et al., arXiv 2302.01318. Guesses are the draft's most probable
tokens, and they stand where the model's own choice is the same, so that nothing is accepted or rejected by chance.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.batch import ForwardBatch, KVTensors, kv_tensors
from engine.config import EngineConfig
from engine.device import Device, Result
from engine.embedding import Embedder
from engine.exact import LoadedModel
from engine.packing import Int32s
from engine.request import Request
from engine.scheduler import Scheduler
from engine.sizing import cache_dtype, token_bytes
from engine.speculative import MEMORY, Guesser, Lookups, Source, Speculation
from engine.step_time import StepShape, StepTimes, chunk_pairs

log = logging.getLogger("engine.core")

FIRST = (1.5, 2.0)
"""Right guesses, and guesses, that a draft is taken to have had before its first."""
OTHERS = 0.99
"""What a guess counts for in the estimate for new requests after another one was checked."""
MOST_ROWS = 64
"""Tokens of a request in one pass, at most, of which the draft is asked what it would have guessed."""
LATER = 32
"""Tokens that a request generates without guesses before they are compared, ..."""
PER_TOKEN = 2
"""... and most tokens that the draft reads for that, for each of them, those of prompts included."""

RARELY = 64
"""Steps in which no guess would pay, right as it may be, after which it is timed again what a guess takes."""


def speculation(
    config: EngineConfig,
    scheduler: Scheduler,
    rows: int,
    *,
    guesser: Callable[[Request], Guesser] | None,
    draft: LoadedModel | None,
    device: Device,
    clock: Callable[[], float],
) -> Speculation | None:
    """How an engine guesses, by configuration; None: it does not. rows: most sequences of a step."""
    if config.speculate == "off":
        return None
    source: Source = Lookups(guesser)
    if config.speculate == "draft" and guesser is None:
        assert draft is not None, "draft_bytes has seen to it"
        limits, pages = scheduler.limits, scheduler.pool.num_pages
        kv = kv_tensors(
            draft.config,
            num_pages=pages,
            page_size=limits.page_size,
            dtype=cache_dtype(config, draft.config, packed=draft.packed, device=device.name),
            device=device.name,
        )
        longest = draft.config.max_position - config.speculate_tokens
        source = DraftModel(draft, kv, device, clock, step_tokens=limits.step_tokens, longest=longest)
    return Speculation(scheduler, source, tokens=config.speculate_tokens, rows=rows)


def draft_bytes(config: EngineConfig, model: LoadedModel, draft: LoadedModel | None, device: str) -> int:
    """Bytes that the draft model keeps for each token of the KV cache. Raises ValueError, naming the setting, where it
    cannot guess for this model."""
    if config.speculate != "draft":
        return 0
    if draft is None:
        raise ValueError("speculate draft needs a draft_model")
    if isinstance(model, Embedder) or isinstance(draft, Embedder):
        raise ValueError("draft_model: models that embed have no next tokens to guess")
    ours, its = model.config.vocab_size, draft.config.vocab_size
    if ours != its:
        raise ValueError(
            f"draft_model has a vocabulary of {its} tokens, the model one of {ours}: they must be the same"
        )
    return token_bytes(draft.config, cache_dtype(config, draft.config, packed=draft.packed, device=device))


@dataclass(slots=True)
class Estimate:
    """How often guesses are right, the latest counting most."""

    memory: float
    right: float = FIRST[0]
    tried: float = FIRST[1]

    @property
    def probability(self) -> float:
        """Of the next guess to be right."""
        return self.right / self.tried

    def saw(self, right: bool) -> None:
        """A guess was checked."""
        self.right = self.memory * self.right + right
        self.tried = self.memory * self.tried + 1


@dataclass(slots=True)
class Common:
    """What holds for all requests of a draft."""

    longest: int
    """most tokens after which it guesses; negative: it does not any more"""
    others: Estimate = field(default_factory=lambda: Estimate(OTHERS))
    """what new requests are taken to be like"""


class DraftGuesser:
    """What a draft model has computed of one request, and says of it. See `engine.speculative.Guesser`."""

    __slots__ = ("at", "common", "epoch", "guesses", "have", "known", "own")

    def __init__(self, common: Common) -> None:
        self.common = common
        self.own = Estimate(MEMORY, FIRST[1] * common.others.probability, FIRST[1])
        self.epoch = -1
        """the request's when the draft began with it"""
        self.known = 0
        self.have = 0
        """tokens whose keys and values the draft has"""
        self.at = 0
        self.guesses: list[int] = []
        """of the tokens after the first `at`"""

    def follow(self, tokens: array[int], known: int) -> None:
        """See `Guesser`: the latest guesses are compared with what came."""
        self.known = known
        if known <= self.at or not self.guesses:
            return
        right = 0
        for guess, token in zip(self.guesses, tokens[self.at : known], strict=False):
            self.saw(guess == token)
            if guess != token:
                break
            right += 1
        self.have = self.at + min(right, len(self.guesses) - 1)  # the last guess has not been read
        self.guesses = []

    def saw(self, right: bool) -> None:
        """A guess was right, or would have been, or not."""
        self.own.saw(right)
        self.common.others.saw(right)

    def begin(self, epoch: int) -> None:
        """The draft is to compute its request in this epoch."""
        if self.epoch != epoch:
            self.epoch = epoch
            self.have = 0
            self.guesses = []

    @property
    def probability(self) -> float:
        """See `Guesser`."""
        return self.own.probability if self.known <= self.common.longest else 0.0

    def guess(self, most: int) -> list[int]:
        """See `Guesser`: what the draft has said; nothing while it is catching up."""
        return self.guesses[:most]


@dataclass(slots=True)
class Turn:
    """A request's part in the passes before one step."""

    request: Request
    guesser: DraftGuesser
    start: int
    end: int
    """its tokens from start to end are computed; at least one"""
    guesses: int
    """how many are wanted; 0: what has come is compared, and that is all"""
    pages: Int32s

    @property
    def rows(self) -> int:
        """Of the last of these tokens, those whose following one the draft is asked for: where it has to catch up,
        those that were generated."""
        if self.end == self.guesser.known <= self.start + 2:
            return 1
        return min(MOST_ROWS, max(0, self.end - max(self.start, self.request.prompt_len - 1)))

    def take(self, said: Sequence[int]) -> None:
        """What the draft says of `rows` tokens: of those that are known it tells how good it is."""
        guesser, first = self.guesser, self.end - len(said) + 1
        for place, token in enumerate(said, first):
            if place < guesser.known:
                guesser.saw(token == self.request.tokens[place])
        guesser.have, guesser.at = self.end, guesser.known
        guesser.guesses = [said[-1]] if self.end == guesser.known else []


@dataclass(slots=True)
class Chunk:
    """Tokens of a request that a pass computes."""

    tokens: Sequence[int]
    start: int
    rows: int
    """of the last of them, those whose following one is asked for"""
    pages: Int32s


class DraftModel:
    """A draft model with its memory. One thread."""

    compares = True

    def __init__(
        self,
        model: LoadedModel,
        kv: KVTensors,
        device: Device,
        clock: Callable[[], float],
        *,
        step_tokens: int,
        longest: int,
    ) -> None:
        """step_tokens: most tokens of a pass; longest: most tokens after which it guesses."""
        self.kv = kv
        self.took = 0.0
        self.computed = 0
        """Tokens that it has computed"""
        self._model = model
        self._device = device
        self._clock = clock
        self._step_tokens = step_tokens
        self._common = Common(longest)
        self._times = StepTimes()
        self._hopeless = 0
        """Steps in which not even right guesses would have paid, since a pass was timed for that"""
        self._credit = 0
        """Tokens that may be read to compare requests without guesses"""

    def guesser(self, request: Request) -> Guesser:
        """See `Source`."""
        return DraftGuesser(self._common)

    def seconds(self, requests: int, context: int) -> float:
        """See `Source`: a pass of so many tokens, as measured."""
        return self._times.cost.seconds(StepShape(requests, requests, context, 0))

    def prepare(self, asked: Sequence[tuple[Request, int]], idle: Sequence[Request], *, worth: bool) -> None:
        """See `Source`. An error costs the guesses, not the requests: it is logged, and nothing is guessed any more."""
        self.took = 0.0
        due = self._due(idle) if worth else []
        hopeless = bool(idle) and not worth
        self._hopeless = (self._hopeless + hopeless) % RARELY
        again = hopeless and not self._hopeless
        if not asked and not due and not again:
            return
        began = self._clock()
        try:
            self._compute(self._turns([*asked, *((request, 0) for request in due)]))
            if again:
                self._time(idle[0])
        except Exception as error:  # a supervision boundary: whatever a model raises
            self._common.longest = -1
            log.error("the draft model failed; nothing is guessed any more", exc_info=error)
            for request in (*(request for request, _ in asked), *due):
                guesser_of(request).guesses = []
        self.took = self._clock() - began

    def _due(self, idle: Sequence[Request]) -> list[Request]:
        """Of requests without guesses one that may be compared, if there is one."""
        self._credit = min(self._credit + PER_TOKEN * len(idle), 1 << 20)
        for request in idle:
            guesser = guesser_of(request)
            guesser.begin(request.epoch)
            missing = guesser.known - guesser.have
            if guesser.known - max(guesser.have, request.prompt_len) >= LATER and missing <= self._credit:
                self._credit -= min(missing, self._step_tokens)
                return [request]
        return []

    def _turns(self, asked: Sequence[tuple[Request, int]]) -> list[Turn]:
        """Who is computed how far: those first who miss the least, as far as a pass goes, and nobody who would write a
        page that another one writes."""
        turns: list[Turn] = []
        for request, guesses in asked:
            guesser = guesser_of(request)
            guesser.begin(request.epoch)
            start = min(guesser.have, guesser.known - 1)
            pages = np.array(request.pages, dtype=np.int32)
            turns.append(Turn(request, guesser, start, guesser.known, guesses, pages))
        turns.sort(key=lambda turn: turn.end - turn.start)
        left, written, size = self._step_tokens, set[int](), self.kv.page_size
        taken: list[Turn] = []
        for turn in turns:
            beyond = turn.end + max(0, turn.guesses - 1)
            turn.end = min(turn.end, turn.start + left)
            pages_of = set(turn.pages[turn.start // size : -(-beyond // size)].tolist())
            if turn.start < turn.end and written.isdisjoint(pages_of):
                written |= pages_of
                left -= turn.end - turn.start
                taken.append(turn)
        return taken

    def _compute(self, turns: Sequence[Turn]) -> None:
        """The passes before one step."""
        if not turns:
            return
        chunks = [
            Chunk(turn.request.tokens[turn.start : turn.end], turn.start, turn.rows, turn.pages) for turn in turns
        ]
        said, at = self._run(chunks), 0
        for turn, chunk in zip(turns, chunks, strict=True):
            turn.take(said[at : at + chunk.rows])
            at += chunk.rows
        while going := [turn for turn in turns if 0 < len(turn.guesser.guesses) < turn.guesses]:
            chunks = [
                Chunk(turn.guesser.guesses[-1:], turn.end + len(turn.guesser.guesses) - 1, 1, turn.pages)
                for turn in going
            ]
            for turn, token in zip(going, self._run(chunks), strict=True):
                turn.guesser.guesses.append(token)

    def _time(self, request: Request) -> None:
        """A pass of one token that the draft has, or of the first one: it takes what a guess takes."""
        guesser = guesser_of(request)
        guesser.begin(request.epoch)
        guesser.have = max(1, guesser.have)
        place = guesser.have - 1
        pages = np.array(request.pages, dtype=np.int32)
        self._run([Chunk(request.tokens[place : place + 1], place, 1, pages)])

    def _run(self, chunks: Sequence[Chunk]) -> list[int]:
        """One pass; returns the most probable token after each row, in order. How long it takes is remembered, unless
        somebody catches up: such a pass does not tell what a guess takes, and may wait for a step that runs."""
        began = self._clock()

        def work() -> Result:
            with torch.inference_mode():
                batch = batch_of(chunks, self.kv.page_size, self._device.name)
                return (self._model.forward(batch, self.kv).argmax(dim=-1),)

        (said,) = self._device.run(work).wait()
        self.computed += sum(len(chunk.tokens) for chunk in chunks)
        if all(len(chunk.tokens) <= 2 for chunk in chunks):
            self._times.observe(_shape(chunks), self._clock() - began)
        tokens: list[int] = said.tolist()
        return tokens


def guesser_of(request: Request) -> DraftGuesser:
    """What the draft knows of a request that it has been asked about."""
    guesser = request.guesser
    assert isinstance(guesser, DraftGuesser)
    return guesser


def batch_of(chunks: Sequence[Chunk], page_size: int, place: str) -> ForwardBatch:
    """A pass as the model takes it, on torch's device `place`."""
    counts = np.array([len(chunk.tokens) for chunk in chunks], dtype=np.int32)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
    ends = counts.cumsum(dtype=np.int32)
    owners = np.arange(len(chunks), dtype=np.int32).repeat(counts)
    positions = np.arange(ends[-1], dtype=np.int32) - (ends - counts - starts)[owners]
    table = np.zeros((len(chunks), max(len(chunk.pages) for chunk in chunks)), dtype=np.int32)
    for row, chunk in zip(table, chunks, strict=True):
        row[: len(chunk.pages)] = chunk.pages
    rows = [np.arange(end - chunk.rows, end) for end, chunk in zip(ends.tolist(), chunks, strict=True)]

    def there(numbers: Int32s) -> Tensor:
        return torch.from_numpy(numbers).to(place)

    return ForwardBatch(
        token_ids=there(np.array([token for chunk in chunks for token in chunk.tokens], dtype=np.int32)),
        positions=there(positions),
        slots=there(table[owners, positions // page_size] * np.int32(page_size) + positions % np.int32(page_size)),
        q_starts=there(np.concatenate((np.zeros(1, dtype=np.int32), ends))),
        kv_lens=there(starts + counts),
        page_table=there(table),
        logit_rows=torch.from_numpy(np.concatenate(rows).astype(np.int64)).to(place),
    )


def _shape(chunks: Sequence[Chunk]) -> StepShape:
    """What a pass computes."""
    tokens = sum(len(chunk.tokens) for chunk in chunks)
    context = sum(chunk.start + 1 for chunk in chunks if len(chunk.tokens) == 1)
    pairs = sum(chunk_pairs(chunk.start, len(chunk.tokens)) for chunk in chunks if len(chunk.tokens) > 1)
    return StepShape(len(chunks), tokens, context, pairs)
