"""One metered engine request: it is driven by a task of the gateway and ended exactly once, whoever hangs up or dies.

The response only watches. When the client leaves, `end` tells the engine to stop and hands the settlement to the meter,
synchronously, so that no cancellation can lose it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from engine.client import EngineClient
from engine.generation import EngineError, GenerateRequest, Generation
from engine.wire import Counters
from gateway.inference import errors
from gateway.inference.errors import ApiError
from gateway.inference.sinks import Sink
from gateway.metering.charge import Charge, Settlement, SettlementDelayedError, Stop, Timings
from gateway.metering.journal import JournalUnavailableError
from gateway.telemetry import ModelMeters
from marketplace.ledger.rules import Outcome

log = logging.getLogger(__name__)

_METER_TOKENS = 16
_METER_S = 0.25
"""The meter is told of new tokens after this many, or this long: well within the margin that it keeps back."""


class Run:
    """Drives one request for `n` choices, which are the choices `first` … `first + n - 1` of the answer."""

    def __init__(
        self,
        engine: EngineClient,
        charge: Charge,
        request: GenerateRequest,
        first: int,
        meters: ModelMeters,
        clock: Callable[[], float],
        began: float,
    ) -> None:
        """`clock` gives seconds; `began` is when the client's request came in."""
        self.charge = charge
        self._engine = engine
        self._request = request
        self._first = first
        self._meters = meters
        self._clock = clock
        self._began = began
        self._sink: Sink
        self._generation: Generation | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._stop: Stop | None = None
        self._delivered = 0
        self._metered_tokens = 0
        self._metered_at = began
        self._alarmed = False
        self._first_at: float | None = None
        self._last_at = began

    @property
    def durable(self) -> bool:
        """True once the hold is on disk."""
        future = self.charge.durable
        return future.done() and not future.cancelled() and future.exception() is None

    @property
    def out_of_funds(self) -> bool:
        """True when the answer was cut because the hold could not be extended."""
        return self._stop is Stop.INSUFFICIENT_QUOTA

    def begin(self) -> None:
        """Send the request to the engine while its hold is on the way to the disk. Raises ApiError; then it is over."""
        try:
            generation = self._generation = self._engine.generate(self._request)
        except EngineError as error:
            self.charge.void(error.code)
            raise translate(error) from error
        generation.ended.add_done_callback(self._wake)

    async def drive(self, sink: Sink) -> Settlement:
        """Write to the sink what the engine generates, and settle. Raises ApiError when it failed, settled too."""
        self._sink = sink
        generation = self._generation
        assert generation is not None, "driven before it was begun"
        try:
            await self._read(generation)
            counters = await generation.final()
        except EngineError as error:
            self._refuse_or_fail(error, generation.counters)
            raise translate(error) from error
        except JournalUnavailableError as error:  # the hold was never written: nothing is owed, nothing may run
            generation.abort()
            raise errors.unavailable("The service cannot account for requests at the moment.") from error
        if self._stop is Stop.UNAVAILABLE:
            self._settle("server_fault", counters)
            raise errors.unavailable("The service cannot account for requests at the moment.")
        try:
            settlement = await self._settle("out_of_funds" if self.out_of_funds else "finished", counters)
        except (SettlementDelayedError, JournalUnavailableError) as error:
            raise errors.unavailable("The request could not be accounted for; it is not charged.") from error
        assert settlement is not None, "a charge that was not voided has a settlement"
        self._sink.release(self._first)
        return settlement

    async def _read(self, generation: Generation) -> None:
        sink = self._sink
        while True:
            await generation.wait()
            while not generation.finished and (pause := sink.pause_s()) > 0:
                if not await self._pause(generation, pause):
                    break
                self._meter(generation)
            deltas = await generation.next()
            if not deltas:
                return
            if self._first_at is None:
                await asyncio.shield(self.charge.durable)
            tokens = 0
            for delta in deltas:
                tokens += len(delta.token_ids)
                if delta.finish_reason == "abort" and self._stop is None:
                    raise EngineError("draining", "the engine ended the request")
            self._observe(tokens)
            sink.write(self._first, deltas)
            if self._unmetered(generation) >= _METER_TOKENS or self._last_at >= self._metered_at + _METER_S:
                self._meter(generation)
            while sink.full:
                await sink.room(_METER_S)
                self._meter(generation)

    def _unmetered(self, generation: Generation) -> int:
        """Tokens generated since the meter was last told."""
        return generation.counters.completion - self._metered_tokens

    def _meter(self, generation: Generation) -> None:
        """Tell the meter how far the request is; stop it when there is no money for more."""
        counters = generation.counters
        self._metered_tokens = counters.completion
        self._metered_at = self._clock()
        if self._stop is None:
            self._stop = self.charge.progress(counters)
            if self._stop is not None:
                generation.abort()

    def _observe(self, tokens: int) -> None:
        now = self._clock()
        if self._first_at is None:
            self._first_at = now
            self._meters.first_token.observe(now - self._began)
        elif tokens:
            self._meters.tokens_apart.observe((now - self._last_at) / tokens, tokens)
        self._last_at = now
        self._delivered += tokens

    async def _pause(self, generation: Generation, seconds: float) -> bool:
        """Let tokens gather, at most until the generation ends. True when so many came that the meter has to know."""
        unmetered = self._unmetered(generation)
        if unmetered >= _METER_TOKENS:
            return True
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self._alarmed = False
        generation.alarm(_METER_TOKENS - unmetered, self._alarm)
        timer = loop.call_later(seconds, self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None
        return self._alarmed

    def _alarm(self) -> None:
        self._alarmed = True
        self._wake()

    def _wake(self, _: object = None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def end(self, outcome: Outcome) -> None:
        """End the request now, whatever it is doing; changes nothing when it has ended."""
        if self.charge.ended:
            return
        generation = self._generation
        if generation is None:
            self.charge.void(outcome)
            return
        generation.abort()
        task = self.charge.settle_when(outcome, generation.final(), engine_epoch=self._epoch, timings=self._timings())
        task.add_done_callback(lambda _: self._count())

    def _refuse_or_fail(self, error: EngineError, counters: Counters) -> None:
        if error.code in ("queue_full", "too_long", "invalid"):
            self._settle("refused", counters)
        else:
            log.warning("request %s: %s: %s", self._request.request_id, error.code, error.message)
            self._settle("engine_error", counters)

    def _settle(self, outcome: Outcome, counters: Counters) -> asyncio.Future[Settlement | None]:
        future = self.charge.settle(outcome, counters, engine_epoch=self._epoch, timings=self._timings())
        future.add_done_callback(self._settled)
        return future

    def _settled(self, done: asyncio.Future[Settlement | None]) -> None:
        if not done.cancelled() and done.exception() is None and (settlement := done.result()) is not None:
            self._meters.settled(settlement)

    def _count(self) -> None:
        if self.charge.end is not None:
            self.charge.end.add_done_callback(self._settled)

    @property
    def _epoch(self) -> str:
        welcome = self._engine.welcome
        return "" if welcome is None else welcome.epoch

    def _timings(self) -> Timings:
        now = self._clock()
        first = self._first_at
        return Timings(
            delivered=self._delivered,
            ttft_us=0 if first is None else round((first - self._began) * 1e6),
            duration_us=round((now - self._began) * 1e6),
        )


def translate(error: EngineError) -> ApiError:
    """An engine's refusal or failure as clients see it."""
    match error.code:
        case "queue_full":
            return errors.overloaded("The model's queue is full. Please retry later.")
        case "too_long":
            return ApiError(400, error.message, code="context_length_exceeded", param="messages")
        case "invalid":
            return errors.invalid(None, f"The engine does not accept the request: {error.message}")
        case "engine_error":
            return errors.internal("The engine failed on this request. It is not charged.")
        case "draining" | "engine_down":
            return errors.unavailable("The engine that serves this model is restarting. Please retry shortly.")
    return errors.internal()
