"""The actor behind one answer.

A task of the gateway that drives the engine requests of a call and outlives its response.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from engine.wire import Counters
from gateway.inference import errors
from gateway.inference.errors import ApiError
from gateway.inference.run import Run
from gateway.inference.sinks import Sink
from gateway.metering.charge import Settlement
from marketplace.ledger.rules import Outcome

log = logging.getLogger(__name__)

AT_ONCE = 128
"""Most of a call's runs that an engine is asked at a time."""


class Answer:
    """Drives the runs of one call and tells its sink and its response how it went."""

    def __init__(
        self,
        runs: list[Run],
        sink: Sink,
        created: int,
        timeout_s: float,
        at_once: int = AT_ONCE,
        *,
        together: bool = False,
    ) -> None:
        """at_once: runs that the engine has at a time; those past it are begun when others end. together: none is
        settled before all are computed, so that a call that fails costs nothing."""
        self.sink = sink
        self.created = created
        self.error: ApiError | None = None
        """Why it failed, set before `over` resolves."""
        self.abandoned = False
        """True when nobody waits for it any more."""
        self.cost = 0
        """Nano-units charged."""
        self.usage: dict[str, Any] = {}
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Resolves when nothing more will come: settled, failed or abandoned."""
        self._runs = runs
        self._timeout_s = timeout_s
        self._at_once = at_once
        self._together = together
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._on_end: list[Callable[[], None]] = []

    @property
    def durable(self) -> bool:
        """True once all holds are on disk: bytes may be sent."""
        return all(run.durable for run in self._runs)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call back when the answer is over, in this order."""
        self._on_end.append(callback)

    def on_quiet(self, callback: Callable[[], None]) -> None:
        """Call back when the answer is over and no engine computes any of it any more: one that was cut off goes on
        there for a moment."""

        def over() -> None:
            waits = [wait for run in self._runs if (wait := run.computed_until) is not None]
            if waits:
                asyncio.gather(*waits, return_exceptions=True).add_done_callback(lambda _: callback())
            else:
                callback()

        self._on_end.append(over)

    def start(self) -> None:
        """Begin; exactly once."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._timeout_s, self._overdue)
        self._task = loop.create_task(self._work())

    async def _work(self) -> None:
        try:
            if len(self._runs) == 1:
                settlements = [await self._runs[0].drive(self.sink)]
            else:
                settlements = await _all(self._runs, self.sink, self._at_once, together=self._together)
            self.cost = sum(settlement.cost for settlement in settlements)
            counters = [run.counters for run in self._runs]
            self.usage = usage(settlements, counters, any(run.out_of_funds for run in self._runs))
            self.sink.finish(self.usage)
        except ApiError as error:
            self._fail(error, "server_fault")
        except Exception:  # supervision boundary: whatever broke, the holds must end and the client must be told
            log.exception("an answer failed")
            self._fail(errors.internal(), "server_fault")
        finally:
            self._close()

    def abandon(self, outcome: Outcome = "disconnected", error: ApiError | None = None) -> None:
        """End now: the client left, time is up, or the gateway stops. What was generated is settled by the outcome."""
        if self.over.done():
            return
        self.abandoned = error is None
        self._fail(error, outcome)
        if self._task is not None:
            self._task.cancel()
        self._close()

    def _overdue(self) -> None:
        seconds = f"{self._timeout_s:g}"
        error = ApiError(
            504,
            f"The answer took longer than {seconds} seconds. It is not charged.",
            type="server_error",
            code="timeout",
        )
        self.abandon("timeout", error)

    def _fail(self, error: ApiError | None, outcome: Outcome) -> None:
        self.error = error
        for run in self._runs:
            run.end(outcome)
        self.sink.fail(error)

    def _close(self) -> None:
        if self.over.done():
            return
        if self._timer is not None:
            self._timer.cancel()
        self.over.set_result(None)
        for callback in self._on_end:
            callback()


async def _all(runs: list[Run], sink: Sink, at_once: int, *, together: bool) -> list[Settlement]:
    """Drive several runs, so many at once; the first failure ends the others."""
    places = asyncio.Semaphore(at_once)
    every: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    left = len(runs)

    async def computed() -> None:
        """One is computed: another may begin, and this one waits for the rest."""
        nonlocal left
        places.release()
        left -= 1
        if not left:
            every.set_result(None)
        await asyncio.shield(every)

    async def drive(run: Run) -> Settlement:
        await places.acquire()
        if not run.begun:
            run.begin()
        if together:
            return await run.drive(sink, computed)
        try:
            return await run.drive(sink)
        finally:
            places.release()

    tasks = [asyncio.create_task(drive(run)) for run in runs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def usage(settlements: list[Settlement], counters: list[Counters], out_of_funds: bool) -> dict[str, Any]:
    """The usage object: sums over the call's engine requests. Rejected guesses are told and not charged: they are no
    part of the completion."""
    prompt = sum(settlement.tokens.prompt for settlement in settlements)
    cached = sum(settlement.tokens.cached for settlement in settlements)
    completion = sum(settlement.tokens.completion for settlement in settlements)
    rendered: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": sum(count.accepted for count in counters),
            "rejected_prediction_tokens": sum(count.rejected for count in counters),
        },
    }
    if out_of_funds:
        rendered["error"] = {
            "code": "insufficient_quota",
            "message": "The answer was cut because the balance does not cover more of it.",
        }
    return rendered
