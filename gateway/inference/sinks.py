"""Where a request's text goes: into an event stream, or into one body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from engine.answer import Delta
from gateway.inference import sse
from gateway.inference.errors import ApiError
from gateway.inference.outbox import Outbox
from gateway.inference.sse import DONE, Chunks, Pace, StopReason

Logprobs = Callable[[int, Delta], dict[str, Any] | None]
"""Renders the log-probabilities of a delta of choice `index`."""


class Sink(Protocol):
    """Takes what a request's actor reads from the engine."""

    def write(self, first: int, deltas: list[Delta], now: float) -> None:
        """New text of the choices from index `first` on; aborted ends arrive as "length"."""

    def release(self, first: int) -> None:
        """The choices from `first` on are settled: their ends may be told."""

    def finish(self, usage: dict[str, Any]) -> None:
        """All choices are settled."""

    def fail(self, error: ApiError | None) -> None:
        """There is no more to come, and why; None when nobody is there to be told."""

    @property
    def full(self) -> bool:
        """True while the reader is too far behind."""

    def when_room(self, callback: Callable[[], None]) -> None:
        """Whom to tell when it is not any more."""

    def pause_s(self, now: float) -> float:
        """How long to wait before the next write is worth it; not at all when it is not positive."""


class StreamSink:
    """Renders events into an outbox. The last end of each engine request waits for its settlement."""

    def __init__(
        self,
        outbox: Outbox,
        chunks: Chunks,
        choices: int,
        openings: dict[int, str],
        logprobs: Logprobs,
        pace: Pace,
        request_id: str,
    ) -> None:
        """`openings` is text that a choice begins with (an echoed prompt)."""
        self.outbox = outbox
        self._chunks = chunks
        self._logprobs = logprobs
        self._pace = pace
        self._request_id = request_id
        self._opened = False
        # Made before there is anything to open, when nobody waits for it.
        self._opening = b"".join(
            chunks.first(index) + (chunks.text(index, text, None) if (text := openings.get(index)) else b"")
            for index in range(choices)
        )
        self._held: dict[int, list[bytes]] = {}

    def write(self, first: int, deltas: list[Delta], now: float) -> None:
        """Put the text at once. Ends are held: who sees one may rely on the settlement."""
        parts: list[bytes] = []
        if not self._opened:
            self._opened = True
            parts.append(self._opening)
        for delta in deltas:
            index = first + delta.index
            if delta.text or delta.logprobs:
                logprobs = None if delta.logprobs is None else self._logprobs(index, delta)
                parts.append(self._chunks.text(index, delta.text, logprobs))
            if delta.finish_reason is not None:
                self._held.setdefault(first, []).append(self._end(index, delta))
        self.outbox.put(parts[0] if len(parts) == 1 else b"".join(parts))
        self._pace.wrote(now)

    def _end(self, index: int, delta: Delta) -> bytes:
        return self._chunks.finish(index, _reason(delta), delta.stop_reason)

    def release(self, first: int) -> None:
        """Put the ends that were held for the settlement; they go out with what follows."""
        self.outbox.defer(b"".join(self._held.pop(first, ())))

    def finish(self, usage: dict[str, Any]) -> None:
        """Put the usage chunk and the end of the stream."""
        self.outbox.close(self._chunks.usage(usage) + DONE)

    def fail(self, error: ApiError | None) -> None:
        """Put an error event, unless nothing was put before: then the response is an ordinary error."""
        event = b""
        if error is not None and (self._opened or self.outbox.writes):  # somebody may have been told to go on waiting
            event = sse.failure(error, self._request_id)
        self.outbox.close(event)

    @property
    def full(self) -> bool:
        """True while the client does not keep up."""
        return self.outbox.full

    def when_room(self, callback: Callable[[], None]) -> None:
        """Tell when the client has caught up."""
        self.outbox.on_room.append(callback)

    def pause_s(self, now: float) -> float:
        """Time to the next slot."""
        return self._pace.delay(now)


class Collected:
    """One choice of a body, as far as it has come."""

    __slots__ = ("deltas", "finish_reason", "stop_reason", "text", "vector")

    def __init__(self, opening: str) -> None:
        self.text = opening
        self.deltas: list[Delta] = []
        """Those with log-probabilities."""
        self.finish_reason = "length"
        self.stop_reason: StopReason = None
        self.vector: bytes | None = None
        """In the place of text: an embedding, float32, little-endian."""


class BodySink:
    """Collects whole choices."""

    PAUSE_S = 0.25
    """Between looks at an answer that nobody reads yet: often enough to extend its hold."""

    def __init__(self, choices: int, openings: dict[int, str]) -> None:
        self.choices = [Collected(openings.get(index, "")) for index in range(choices)]
        self.usage: dict[str, Any] | None = None
        self._begun = False

    def write(self, first: int, deltas: list[Delta], now: float) -> None:
        """Append."""
        self._begun = True
        for delta in deltas:
            choice = self.choices[first + delta.index]
            choice.text += delta.text
            if delta.logprobs is not None:
                choice.deltas.append(delta)
            if delta.finish_reason is not None:
                choice.finish_reason = _reason(delta)
                choice.stop_reason = delta.stop_reason
                choice.vector = delta.vector

    def release(self, first: int) -> None:
        """Nothing was held: nothing is told before the end."""

    def finish(self, usage: dict[str, Any]) -> None:
        """Keep the usage."""
        self.usage = usage

    def fail(self, error: ApiError | None) -> None:
        """The response raises the error itself."""

    @property
    def full(self) -> bool:
        """Bounded by the length of the answer."""
        return False

    def when_room(self, callback: Callable[[], None]) -> None:
        """There always is."""

    def pause_s(self, now: float) -> float:
        """The first token is seen when it comes, for the metrics; then a look four times a second will do."""
        return self.PAUSE_S if self._begun else 0.0


def _reason(delta: Delta) -> str:
    return "length" if delta.finish_reason in ("length", "abort") else str(delta.finish_reason)
