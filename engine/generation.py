"""Generation: one request of n answers, as its consumer reads it: deltas, one end, final counters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from engine.answer import Answer, Delta
from engine.detokenizer import Detokenizer, HasVocabulary
from engine.sampling_params import SamplingParams
from engine.wire import Counters, Progress, pack_tokens


class EngineError(Exception):
    """The engine did not serve a request.

    code: queue_full, overloaded, too_long, invalid, draining (refused: nothing was computed), engine_down (it died or
    cannot be reached), engine_error (it gave up on this request), duplicate (the id is running), protocol (it is not
    our engine), denied (it or we do not know the secret). retry_after_s: when the engine expects to take the request; 0
    where it does not say.
    """

    def __init__(self, code: str, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """n answers to one prompt."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    n: int = 1
    priority: int = 0
    salt: str = ""
    adapter: str = ""


class Engine(Protocol):
    """What a Generation needs of the client."""

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | bytes,
        params: SamplingParams,
        *,
        on_progress: Callable[[Progress | EngineError], None],
        priority: int = 0,
        salt: str = "",
        adapter: str = "",
        follows: bool = False,
    ) -> None:
        """Start one sequence; follows: it is one more answer of a request whose first was submitted before."""
        ...

    def abort(self, request_id: str) -> asyncio.Future[Progress]:
        """End one sequence."""
        ...


def child_ids(request_id: str, n: int) -> list[str]:
    """Ids under which the engine knows a request's n sequences."""
    return [request_id] if n == 1 else [f"{request_id}#{index}" for index in range(n)]


def total(counters: Sequence[Counters]) -> Counters:
    """Counters of a request from those of its sequences: completions add up, the prompt is one and the same.

    Cached tokens are those of the sequence that found least in the cache, as if it had come alone: the others hit
    what it computed a moment before.
    """
    if len(counters) == 1:
        return counters[0]
    return Counters(
        prompt=max(c.prompt for c in counters),
        cached=min((c.cached for c in counters if c.started), default=0),
        completion=sum(c.completion for c in counters),
        started=any(c.started for c in counters),
        accepted=sum(c.accepted for c in counters),
        rejected=sum(c.rejected for c in counters),
    )


class Generation:
    """The consumer's handle of a request. Belongs to one event loop and has one consumer.

    next() until it returns an empty list or raises; or abort(), then final(). Letting go of an unfinished Generation
    aborts it.
    """

    def __init__(self, answers: _Answers) -> None:
        self._answers = answers

    @classmethod
    def start(cls, engine: Engine, request: GenerateRequest, tokenizer: HasVocabulary) -> Generation:
        """Submit all sequences, or none. Raises EngineError, ValueError for an n below 1."""
        return cls(_Answers(engine, request, tokenizer))

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self._answers.request_id

    @property
    def counters(self) -> Counters:
        """Tokens counted so far, cumulative."""
        answers = self._answers.answers
        return answers[0].counters if len(answers) == 1 else total([answer.counters for answer in answers])

    @property
    def finished(self) -> bool:
        """True once nothing more will arrive; what has arrived may still be unread."""
        return self._answers.open == 0

    @property
    def ended(self) -> asyncio.Future[None]:
        """Resolves when nothing more will arrive, however it ended; for callbacks, not to be cancelled."""
        return self._answers.done

    def listen(self, callback: Callable[[], None] | None) -> None:
        """Call back whenever read() may have something new, and at the end; it must not raise. For consumers that are
        no tasks of their own. None stops it."""
        self._answers.on_news = callback or _nothing

    def read(self) -> list[Delta]:
        """Return what is new, without waiting; nothing, where nothing is. Raises EngineError when there is no more to
        read and the engine failed."""
        answers = self._answers
        deltas = answers.read()
        if not deltas and answers.error is not None:
            raise EngineError(answers.error.code, answers.error.message, answers.error.retry_after_s)
        return deltas

    async def next(self) -> list[Delta]:
        """Return everything new, at most one Delta per answer; wait for it when there is nothing.

        An empty list is the end: every answer's last Delta has been returned. Raises EngineError, after what came
        before the error was returned. May be cancelled and called again; nothing is lost.
        """
        answers = self._answers
        while True:
            deltas = self.read()
            if deltas or answers.open == 0:
                return deltas
            await answers.wait()

    def abort(self) -> None:
        """Ask the engine to end all answers now. Those that had not ended get finish_reason "abort"."""
        self._answers.abort()

    async def final(self) -> Counters:
        """Wait for the end and return the final counters: all that was computed, less what came after a stop string.

        Raises EngineError when the engine failed; `counters` then has what was known. Being cancelled does no harm.
        """
        answers = self._answers
        if not answers.done.done():
            await asyncio.shield(answers.done)
        if answers.error is not None:
            raise EngineError(answers.error.code, answers.error.message, answers.error.retry_after_s)
        return self.counters

    def __del__(self) -> None:
        """Abort what nobody reads any more. May run in any thread, so it only asks the loop to."""
        answers = self._answers
        if answers.open:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the connection
                answers.loop.call_soon_threadsafe(answers.abort)


class _Answers:
    """A Generation's state; the client refers to it and not to the handle, so that a dropped handle is noticed."""

    __slots__ = (
        "_engine", "_waiter", "answers", "done", "error", "loop", "on_news", "open", "request_id"
    )  # fmt: skip

    def __init__(self, engine: Engine, request: GenerateRequest, tokenizer: HasVocabulary) -> None:
        if request.n < 1:
            raise ValueError("n must be at least 1")
        self.loop = asyncio.get_running_loop()
        self.request_id = request.request_id
        self.error: EngineError | None = None
        self.done: asyncio.Future[None] = self.loop.create_future()
        self.open = request.n
        self.on_news: Callable[[], None] = _nothing
        self._engine = engine
        self._waiter: asyncio.Future[None] | None = None
        prompt, params = pack_tokens(request.prompt_ids), request.params
        self.answers: list[Answer] = []
        for index, child_id in enumerate(child_ids(request.request_id, request.n)):
            text = Detokenizer(tokenizer, params.stop, params.include_stop, params.skip_special_tokens)
            answer = Answer(index, child_id, params, text)
            try:
                engine.submit(
                    child_id,
                    prompt,
                    _params_of(params, index),
                    on_progress=partial(self._on_progress, answer),
                    priority=request.priority,
                    salt=request.salt,
                    adapter=request.adapter,
                    follows=index > 0,
                )
            except EngineError as error:
                self._fail(error)
                raise
            self.answers.append(answer)

    def read(self) -> list[Delta]:
        """Deltas of the answers that have something new."""
        if len(self.answers) == 1:
            only = self.answers[0].read()
            return [] if only is None else [only]
        return [delta for answer in self.answers if (delta := answer.read()) is not None]

    async def wait(self) -> None:
        """Return when something may be new."""
        if self._waiter is not None:
            raise RuntimeError("a Generation has one consumer")
        self._waiter = self.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def abort(self) -> None:
        """Abort the answers that are not finished; their last Progress ends them."""
        for answer in self.answers:
            if not answer.finished:
                self._engine.abort(answer.request_id)

    def _on_progress(self, answer: Answer, said: Progress | EngineError) -> None:
        if answer.finished:  # at a stop string, or with the whole request
            return
        if isinstance(said, EngineError):
            answer.finished = True
            self._fail(said)
            return
        if said.finish_reason == "error":
            answer.counters = said.counters
            answer.finished = True
            self._fail(EngineError("engine_error", said.error or "the engine failed"))
            return
        if answer.take(said):
            if said.finish_reason is None:  # a stop string, of which the engine knows nothing
                self._engine.abort(answer.request_id)
            self.open -= 1
            if self.open == 0:
                self._finish()
        if answer.unread or not self.open:
            self._tell()

    def _fail(self, error: EngineError) -> None:
        """End the whole request: the consumer gets the first error, the engine is told to stop the other answers."""
        self.error = error
        self.abort()
        for answer in self.answers:
            answer.finished = True
        self.open = 0
        self._finish()
        self._tell()

    def _tell(self) -> None:
        """Wake the consumer."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        self.on_news()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


def _nothing() -> None:
    """Nobody listens."""


def _params_of(params: SamplingParams, index: int) -> SamplingParams:
    """Each answer draws with a seed of its own, or all n would be the same (64-bit, wrapping)."""
    if params.seed is None or index == 0:
        return params
    return msgspec.structs.replace(params, seed=(params.seed + index + 2**63) % 2**64 - 2**63)
