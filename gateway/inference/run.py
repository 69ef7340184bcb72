"""One metered engine request: it is driven by a task of the gateway and ended exactly once, whoever hangs up or dies.

The response only watches. When the client leaves, `end` tells the engine to stop and hands the settlement to the meter,
synchronously, so that no cancellation can lose it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from engine.generation import EngineError, GenerateRequest, Generation
from engine.wire import Counters
from gateway.admission.capacity import MAX_RETRY_AFTER_S
from gateway.fleet.catalogue import Server
from gateway.fleet.pool import Seat
from gateway.inference import errors
from gateway.inference.errors import ApiError
from gateway.inference.flow import Flow
from gateway.inference.sinks import Sink
from gateway.metering.charge import Charge, Settlement, SettlementDelayedError, Stop, Timings
from gateway.metering.journal import JournalUnavailableError
from gateway.telemetry import ModelMeters
from marketplace.ledger.rules import Outcome

log = logging.getLogger(__name__)

LOST = ("engine_down", "draining")
"""Failures of a replica, not of a request: another one may serve it."""


class Run:
    """Drives one request for `n` choices, which are the choices `first` … `first + n - 1` of the answer."""

    def __init__(
        self,
        server: Server,
        charge: Charge,
        request: GenerateRequest,
        first: int,
        meters: ModelMeters,
        clock: Callable[[], float],
        began: float,
    ) -> None:
        """`server` has the engines that may compute it. `clock` gives seconds; `began` is when the client's request
        came in."""
        self.charge = charge
        self.first = first
        self.meters = meters
        self.clock = clock
        self.began = began
        self._server = server
        self._request = request
        self._seat: Seat | None = None
        self._left: list[int] = []
        """Replicas that were lost before they had said anything."""
        self._generation: Generation | None = None
        self._flow: Flow | None = None

    @property
    def begun(self) -> bool:
        """True once an engine was asked."""
        return self._generation is not None

    @property
    def computed_until(self) -> asyncio.Future[Any] | None:
        """Resolves when no engine computes it any more, after its end where that cut it off; None: none does."""
        ended = None if self._generation is None else self._generation.ended
        return None if ended is None or ended.done() else ended

    @property
    def durable(self) -> bool:
        """True once the hold is on disk."""
        future = self.charge.durable
        return future.done() and not future.cancelled() and future.exception() is None

    @property
    def out_of_funds(self) -> bool:
        """True when the answer was cut because the hold could not be extended."""
        return self._flow is not None and self._flow.stopped is Stop.INSUFFICIENT_QUOTA

    @property
    def counters(self) -> Counters:
        """What the engine has counted so far."""
        return Counters() if self._generation is None else self._generation.counters

    def begin(self) -> None:
        """Send the request to the engine while its hold is on the way to the disk. Raises ApiError; then it is over."""
        try:
            self._sit()
        except EngineError as error:
            self.charge.void(error.code)
            raise translate(error) from error

    def _sit(self) -> Generation:
        """Send the request to the replica that suits it best. Raises EngineError."""
        seat = self._server.place(self._request, self._left)
        try:
            generation = seat.client.generate(self._request)
        except EngineError:
            seat.leave()
            raise
        generation.ended.add_done_callback(lambda _: seat.leave())
        self._seat, self._generation = seat, generation
        return generation

    def _move(self, flow: Flow, error: EngineError) -> Generation | None:
        """Send the request to another replica, once, where the first was lost before a word of it was handed over. The
        hold is the same one, and only what the other replica counts is settled. None where it cannot be."""
        lost = self._seat
        if error.code not in LOST or flow.first_at is not None or lost is None or self._left or self.charge.ended:
            return None
        self._left.append(lost.replica)
        generation = self._generation
        assert generation is not None, "it was begun"
        generation.abort()
        try:
            moved = self._sit()
        except EngineError:  # of the two failures, the first is the one to tell of
            return None
        self.meters.moved += 1
        log.warning("request %s goes to another replica: %s", self._request.request_id, error.message)
        return moved

    def answering(self) -> None:
        """The first token is there."""
        if self._seat is not None and self._generation is not None:
            self._seat.began(self._generation.counters.cached)

    async def drive(self, sink: Sink, computed: Callable[[], Awaitable[None]] | None = None) -> Settlement:
        """Write to the sink what the engine generates, and settle, after a wait for `computed`. Raises ApiError when it
        failed, settled too."""
        generation = self._generation
        assert generation is not None, "driven before it was begun"
        flow = self._flow = Flow(self, generation, sink)
        try:
            try:
                await flow.run()
            except EngineError as error:
                moved = self._move(flow, error)
                if moved is None:
                    raise
                generation = moved
                flow = self._flow = Flow(self, generation, sink)
                await flow.run()
            counters = await generation.final()
            if computed is not None:
                await computed()
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
        if error.code in ("queue_full", "overloaded", "too_long", "invalid", "unknown_adapter"):
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
        return "" if self._seat is None else self._seat.epoch

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
        case "unknown_adapter":
            return ApiError(404, f"The model is not loaded: {error.message}.", code="model_not_found", param="model")
        case "engine_error":
            return errors.internal("The engine failed on this request. It is not charged.")
        case "draining" | "engine_down":
            return errors.unavailable("The engine that serves this model is restarting. Please retry shortly.")
    return errors.internal()
