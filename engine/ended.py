"""What is kept of requests that have ended: their final counts, for whoever asks within the retention."""

from __future__ import annotations

from collections import OrderedDict

from engine.wire import Counters, FinishReason, Usage

Ended = tuple[float, FinishReason, int, int, int, bool, int, int]
"""When a request ended, how, and its counters. A tuple of plain values, which the garbage collector need not
visit."""


class EndedRequests:
    """Final counts by request id, oldest first. Times are seconds of one clock."""

    def __init__(self, retention_s: float) -> None:
        """retention_s: how long they are kept."""
        self._retention_s = retention_s
        self._ended: OrderedDict[str, Ended] = OrderedDict()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ended

    def remember(self, request_id: str, counters: Counters, reason: FinishReason, now: float) -> None:
        """A request has ended."""
        self._ended[request_id] = (
            now,
            reason,
            counters.prompt,
            counters.cached,
            counters.completion,
            counters.started,
            counters.accepted,
            counters.rejected,
        )

    def usage(self, request_id: str) -> Usage | None:
        """Its final counts, if they are known."""
        ended = self._ended.get(request_id)
        return None if ended is None else Usage(Counters(*ended[2:]), ended[1])

    def forget(self, now: float) -> None:
        """Drop what is older than the retention."""
        oldest = now - self._retention_s
        while self._ended:
            request_id, ended = next(iter(self._ended.items()))
            if ended[0] > oldest:
                return
            del self._ended[request_id]
