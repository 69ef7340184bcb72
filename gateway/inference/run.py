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
from gateway.admission.capacity import MAX_RETRY_AFTER_S
from gateway.inference import errors
from gateway.inference.errors import ApiError
from gateway.inference.flow import Flow
from gateway.inference.sinks import Sink
from gateway.metering.charge import Charge, Settlement, SettlementDelayedError, Stop, Timings
from gateway.metering.journal import JournalUnavailableError
from gateway.telemetry import ModelMeters
from marketplace.ledger.rules import Outcome

log = logging.getLogger(__name__)


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
        self.first = first
        self.meters = meters
        self.clock = clock
        self.began = began
        self._engine = engine
        self._request = request
        self._generation: Generation | None = None
        self._flow: Flow | None = None

    @property
    def durable(self) -> bool:
        """True once the hold is on disk."""
        future = self.charge.durable
        return future.done() and not future.cancelled() and future.exception() is None

    @property
    def out_of_funds(self) -> bool:
        """True when the answer was cut because the hold could not be extended."""
        return self._flow is not None and self._flow.stopped is Stop.INSUFFICIENT_QUOTA

    def begin(self) -> None:
        """Send the request to the engine while its hold is on the way to the disk. Raises ApiError; then it is over."""
        try:
            self._generation = self._engine.generate(self._request)
        except EngineError as error:
            self.charge.void(error.code)
            raise translate(error) from error

    async def drive(self, sink: Sink) -> Settlement:
        """Write to the sink what the engine generates, and settle. Raises ApiError when it failed, settled too."""
        generation = self._generation
        assert generation is not None, "driven before it was begun"
        flow = self._flow = Flow(self, generation, sink)
        try:
            await flow.run()
            counters = await generation.final()
        except EngineError as error:
            self._refuse_or_fail(error, generation.counters)
            raise translate(error) from error
        except JournalUnavailableError as error:  # the hold was never written: nothing is owed, nothing may run
            generation.abort()
            raise errors.unavailable("The service cannot account for requests at the moment.") from error
        if flow.stopped is Stop.UNAVAILABLE:
            self._settle("server_fault", counters)
            raise errors.unavailable("The service cannot account for requests at the moment.")
        try:
            settlement = await self._settle("out_of_funds" if self.out_of_funds else "finished", counters)
        except (SettlementDelayedError, JournalUnavailableError) as error:
            raise errors.unavailable("The request could not be accounted for; it is not charged.") from error
        assert settlement is not None, "a charge that was not voided has a settlement"
        sink.release(self.first)
        return settlement

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
        if error.code in ("queue_full", "overloaded", "too_long", "invalid"):
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
            self.meters.settled(settlement)

    def _count(self) -> None:
        if self.charge.end is not None:
            self.charge.end.add_done_callback(self._settled)

    @property
    def _epoch(self) -> str:
        welcome = self._engine.welcome
        return "" if welcome is None else welcome.epoch

    def _timings(self) -> Timings:
        now, flow = self.clock(), self._flow
        first = None if flow is None else flow.first_at
        return Timings(
            delivered=0 if flow is None else flow.delivered,
            ttft_us=0 if first is None else round((first - self.began) * 1e6),
            duration_us=round((now - self.began) * 1e6),
        )


def translate(error: EngineError) -> ApiError:
    """An engine's refusal or failure as clients see it."""
    match error.code:
        case "queue_full":
            return errors.overloaded("The model's queue is full. Please retry later.")
        case "overloaded":
            return errors.overloaded(
                f"The model is busy: {error.message}. Please retry later.", min(error.retry_after_s, MAX_RETRY_AFTER_S)
            )
        case "too_long":
            return ApiError(400, error.message, code="context_length_exceeded", param="messages")
        case "invalid":
            return errors.invalid(None, f"The engine does not accept the request: {error.message}")
        case "engine_error":
            return errors.internal("The engine failed on this request. It is not charged.")
        case "draining" | "engine_down":
            return errors.unavailable("The engine that serves this model is restarting. Please retry shortly.")
    return errors.internal()
