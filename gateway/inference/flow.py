"""How one request's text flows: from the engine's frames through pace, meter and sink, without a task in between.

Each arrival from the engine calls `_news`, which hands over everything that has come, unless something holds it back:
the hold that is not on disk yet, the pace of the stream, a client that does not keep up. What held it back calls again.
A task would cost more per token than all of the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from engine.generation import EngineError, Generation
from gateway.inference.sinks import Sink
from gateway.metering.charge import Charge, Stop
from gateway.telemetry import ModelMeters

METER_TOKENS = 16
METER_S = 2.0
"""The meter is told of new tokens after this many, or this long: well within the margin that it keeps back."""


class Metered(Protocol):
    """The request, as far as its flow goes."""

    charge: Charge
    first: int
    meters: ModelMeters
    clock: Callable[[], float]
    began: float

    def answering(self) -> None:
        """Told when the first token is there."""


class Flow:
    """Carries a generation into a sink until both are through, or a failure ends it."""

    def __init__(self, request: Metered, generation: Generation, sink: Sink) -> None:
        self.stopped: Stop | None = None
        """Why the meter ended the request early; None while it did not."""
        self.delivered = 0
        """Generated tokens handed to the sink."""
        self.first_at: float | None = None
        """When the first text came, in seconds of the request's clock."""
        self._answering = request.answering
        self._charge = request.charge
        self._first = request.first
        self._meters = request.meters
        self._clock = request.clock
        self._began = request.began
        self._generation = generation
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._blocked = False
        self._last_at = self._metered_at = request.began
        self._metered_tokens = 0

    async def run(self) -> None:
        """Return when everything was handed over. Raises EngineError, JournalUnavailableError; may be cancelled."""
        generation = self._generation
        durable = self._charge.durable
        if not durable.done():
            self._blocked = True
            durable.add_done_callback(self._unblock)
        self._sink.when_room(self._unblock)
        generation.listen(self._news)
        try:
            self._news()
            await self._over
        finally:
            generation.listen(None)
            self._stop_timer()

    def _news(self) -> None:
        """Something came. While it has to wait, only the meter is told, where it has to know."""
        generation = self._generation
        if self._blocked:
            return
        if self._timer is not None:
            if not generation.finished:
                if generation.counters.completion - self._metered_tokens >= METER_TOKENS:
                    self._guarded(self._meter)
                return
            self._stop_timer()
        self._guarded(self._hand_over)

    def _unblock(self, _: object = None) -> None:
        """The hold is on disk, or the client has caught up."""
        if self._blocked and not self._sink.full and self._charge.durable.done():
            self._blocked = False
            self._stop_timer()
            self._news()

    def _due(self) -> None:
        """The pace allows the next write; a client that is behind is looked at, so that its hold is extended."""
        self._timer = None
        if self._blocked:
            self._guarded(self._meter)
            self._timer = self._loop.call_later(METER_S, self._due)
        else:
            self._guarded(self._hand_over)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run a step. Its failure is this request's: who called here serves all the others, too."""
        if self._over.done():
            return
        try:
            step()
        except Exception as error:  # supervision boundary: `run` raises it where the request is ended and settled
            self._over.set_exception(error)

    def _hand_over(self) -> None:
        """Give the sink everything that has come, as its pace allows."""
        generation, sink = self._generation, self._sink
        finished, now = generation.finished, self._clock()
        if self.first_at is None:
            self._charge.durable.result()  # raises when the hold will never be on disk
        elif not finished and (pause := sink.pause_s(now)) > 0:
            self._timer = self._loop.call_later(pause, self._due)
            return
        deltas = generation.read()
        if deltas:
            tokens = 0
            for delta in deltas:
                tokens += len(delta.token_ids)
                if delta.finish_reason == "abort" and self.stopped is None:
                    raise EngineError("draining", "the engine ended the request")
            sink.write(self._first, deltas, now)
            self._observe(tokens, now)
        if finished:
            self._over.set_result(None)
            return
        if self.delivered - self._metered_tokens >= METER_TOKENS or now >= self._metered_at + METER_S:
            self._meter()
        if sink.full:
            self._blocked = True
            self._timer = self._loop.call_later(METER_S, self._due)

    def _meter(self) -> None:
        """Tell the meter how far the request is; stop it when there is no money for more."""
        counters = self._generation.counters
        self._metered_tokens = counters.completion
        self._metered_at = self._clock()
        if self.stopped is None:
            self.stopped = self._charge.progress(counters)
            if self.stopped is not None:
                self._generation.abort()

    def _observe(self, tokens: int, now: float) -> None:
        if self.first_at is None:
            self.first_at = now
            self._answering()
            self._meters.first_token.observe(now - self._began)
        elif tokens:
            self._meters.tokens_apart.observe((now - self._last_at) / tokens, tokens)
        self._last_at = now
        self.delivered += tokens

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
