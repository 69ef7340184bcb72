"""One request inside the engine: a record whose lengths obey one chain of inequalities at every moment.

    0 ≤ cached ≤ computed ≤ scheduled ≤ len(tokens) ≤ limit

There is no prefill or decode phase: `computed` chases `len(tokens)`, and a step that catches up samples one more token.
Chunked prefill, prefix hits and recomputation after a preemption are the same movement from different starting points.

A step is counted as computed when the device has it: whatever is handed over later finds its keys and values. The token
that it samples stands in `tokens` as a placeholder until the host knows it, so that the next step can be decided and
handed over before.
"""

from __future__ import annotations

from array import array
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from engine.kv_cache import PrefixKeys
from engine.sampling_params import SamplingParams
from engine.wire import Counters, FinishReason

if TYPE_CHECKING:
    from engine.lora import Adapter
    from engine.speculative import Guesser


class RequestState(Enum):
    """Where a request is in its life. PREEMPTED waits like WAITING, but has run before."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class RequestError(AssertionError):
    """A request's record contradicts itself: a defect of the engine, never of the request's sender."""


class Request:
    """State of one sequence, owned by the engine's step thread.

    tokens: prompt, then generated ids. limit: most tokens it may ever have. arrival: order of submission, unique. rank
    orders requests: lower (priority, arrival) runs first and is preempted last. `epoch` grows whenever work in flight
    for the request becomes void; a result that carries another epoch is dropped.
    """

    __slots__ = (
        "accepted",
        "adapter",
        "ahead",
        "arrival",
        "cached",
        "computed",
        "eos_ids",
        "epoch",
        "finish_reason",
        "guesser",
        "keys",
        "limit",
        "next",
        "pages",
        "params",
        "parent_uid",
        "prompt_cached",
        "prompt_len",
        "published",
        "queued_at",
        "rank",
        "rejected",
        "request_id",
        "rest",
        "row",
        "scheduled",
        "seed",
        "started",
        "state",
        "stop_token",
        "stops",
        "tokens",
    )

    def __init__(
        self,
        request_id: str,
        prompt: array[int],
        params: SamplingParams,
        *,
        limit: int,
        arrival: int,
        priority: int = 0,
        salt: str = "",
        seed: int = 0,
        eos_ids: tuple[int, ...] = (),
        now: float = 0.0,
        adapter: Adapter | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.tokens = prompt
        self.prompt_len = len(prompt)
        self.limit = limit
        self.arrival = arrival
        self.rank = (priority, arrival)
        self.seed = seed
        self.eos_ids = eos_ids
        self.stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
        self.state = RequestState.WAITING
        self.epoch = 0
        self.row = -1
        self.ahead = 0
        """placeholders at the end of `tokens`: sampled by steps whose results the host has not seen yet"""
        self.pages: list[int] = []
        self.cached = 0
        self.computed = 0
        self.scheduled = 0
        self.rest = len(prompt)
        """tokens left to compute when it was queued, after the cached prefix as of then"""
        self.prompt_cached = 0
        """prompt tokens taken from the prefix cache at the first admission: what the customer is told and billed"""
        self.started = False
        self.guesser: Guesser | None = None
        """guesses its next tokens; None before anybody asked"""
        self.accepted = 0
        self.rejected = 0
        """guesses that were computed, and stood or were dropped"""
        self.adapter = adapter
        self.keys = PrefixKeys(salt if adapter is None else salt + adapter.salt)
        self.published = 0
        """pages of this table, from the front, that are in the prefix index (or that an equal page stands for)"""
        self.parent_uid = 0
        """identity of the last of them in the index; −1 when the chain broke and nothing more is published"""
        self.finish_reason: FinishReason | None = None
        self.stop_token: int | None = None
        self.queued_at = now
        self.next = Work(self, 1)
        """its work in every step in which it needs one token: made once, and equal lists of work are found equal
        without a look inside"""
        self.verify()

    @property
    def generated(self) -> int:
        """Tokens generated so far, as far as they are known."""
        return len(self.tokens) - self.ahead - self.prompt_len

    @property
    def counters(self) -> Counters:
        """Cumulative counts as the sender sees them."""
        return Counters(self.prompt_len, self.prompt_cached, self.generated, self.started, self.accepted, self.rejected)

    def admit(self, row: int, pages: list[int], hits: int, hit_tokens: int, parent_uid: int) -> None:
        """Enter the running set on device row `row` with pages for every known token.

        The first `hits` pages hold the KV of `hit_tokens` tokens already; parent_uid is the identity of the last of
        them.
        """
        if self.state is RequestState.WAITING:
            self.prompt_cached = min(hit_tokens, self.prompt_len)
        elif self.state is not RequestState.PREEMPTED:
            raise RequestError(f"{self.request_id}: admitted while {self.state.value}")
        self.state = RequestState.RUNNING
        self.row = row
        self.pages = pages
        self.cached = self.computed = self.scheduled = hit_tokens
        self.published = hits
        self.parent_uid = parent_uid

    def schedule(self, count: int) -> None:
        """Count `count` more tokens as part of the step being built."""
        self.scheduled += count
        if self.scheduled > len(self.tokens):
            raise RequestError(f"{self.request_id}: {self.scheduled} tokens scheduled of {len(self.tokens)}")

    def dispatch(self) -> None:
        """The device has been given the step that computes the scheduled tokens."""
        self.computed = self.scheduled

    def expect(self) -> None:
        """The step that the device has been given samples the next token."""
        self.tokens.append(0)
        self.ahead += 1

    def sampled(self, token: int) -> int:
        """The oldest expected token is known. Returns the number of known tokens."""
        known = len(self.tokens) - self.ahead
        self.tokens[known] = token
        self.ahead -= 1
        return known + 1

    def accept(self, token: int) -> int:
        """The guess after the last token stood: it has been computed, and `token` was chosen after it. Returns the
        number of known tokens."""
        self.scheduled += 1
        self.computed = self.scheduled
        self.tokens.append(token)
        return len(self.tokens)

    def preempt(self) -> list[int]:
        """Give up the device state and go back to wait; generated tokens are kept. Returns the pages to release."""
        if self.state is not RequestState.RUNNING:
            raise RequestError(f"{self.request_id}: preempted while {self.state.value}")
        self.state = RequestState.PREEMPTED
        return self._leave()

    def finish(self, reason: FinishReason) -> list[int]:
        """End. Returns the pages to release. Raises RequestError when it has ended before: one terminal event each."""
        if self.state is RequestState.FINISHED:
            raise RequestError(f"{self.request_id}: finished twice")
        self.state = RequestState.FINISHED
        self.finish_reason = reason
        del self.next  # it refers to this request: both would stay until the garbage collector comes
        return self._leave()

    def _leave(self) -> list[int]:
        pages, self.pages = self.pages, []
        if self.ahead:
            del self.tokens[-self.ahead :]
            self.ahead = 0
        self.epoch += 1
        self.row = -1
        self.cached = self.computed = self.scheduled = 0
        self.published = 0
        self.parent_uid = 0
        return pages

    def verify(self) -> None:
        """Raise RequestError unless the chain of lengths holds and only a running request holds device state."""
        chain = (0, self.cached, self.computed, self.scheduled, len(self.tokens), self.limit)
        if any(a > b for a, b in pairwise(chain)):
            raise RequestError(f"{self.request_id}: 0 ≤ cached ≤ computed ≤ scheduled ≤ tokens ≤ limit broken: {chain}")
        if not 0 < self.prompt_len <= len(self.tokens) - self.ahead:
            raise RequestError(f"{self.request_id}: prompt of {self.prompt_len} in {len(self.tokens)} tokens")
        if self.ahead and self.state is not RequestState.RUNNING:
            raise RequestError(f"{self.request_id}: {self.state.value} with {self.ahead} tokens expected")
        if not 0 <= self.prompt_cached < self.prompt_len:
            raise RequestError(f"{self.request_id}: {self.prompt_cached} of {self.prompt_len} prompt tokens cached")
        if (self.state is RequestState.RUNNING) != (self.row >= 0):
            raise RequestError(f"{self.request_id}: {self.state.value} with row {self.row}")
        if self.pages and self.state is not RequestState.RUNNING:
            raise RequestError(f"{self.request_id}: {self.state.value} with {len(self.pages)} pages")
        if (self.state is RequestState.FINISHED) != (self.finish_reason is not None):
            raise RequestError(f"{self.request_id}: {self.state.value} with finish reason {self.finish_reason}")


class Work(NamedTuple):
    """A request and how many of its next tokens are computed."""

    request: Request
    tokens: int


class Draft(NamedTuple):
    """Guesses of a decode's next tokens, computed behind the token that its step computes anyway."""

    request: Request
    tokens: list[int]
    epoch: int
    """the request's when they were made"""
