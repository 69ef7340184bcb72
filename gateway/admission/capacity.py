"""How many requests a model may have in its queue: refuse early with a time to come back, instead of queueing for ever.

Counted here, request by request, against the engine's places and the operator's queue bound; the engine's own snapshot
(which also sees requests of other gateways) may close the door sooner. Pure: the time is passed in.
"""

from __future__ import annotations

from typing import Protocol

SNAPSHOT_FRESH_US = 2_000_000
"""A snapshot older than this says nothing about the queue now."""
MAX_RETRY_AFTER_S = 60
_SMOOTHING = 0.1
"""weight of the newest request in the mean service time"""


class OverloadedError(Exception):
    """The model's queue is full: answer 503 `server_is_overloaded` with Retry-After."""

    def __init__(self, model: str, waiting: int, bound: int, retry_after_s: int) -> None:
        super().__init__(f"{model}: {waiting} requests wait, the queue holds {bound}")
        self.model = model
        self.waiting = waiting
        self.bound = bound
        self.retry_after_s = retry_after_s


class QueueView(Protocol):
    """The part of the engine's snapshot that matters here."""

    @property
    def running(self) -> int:
        """Sequences that are being computed."""

    @property
    def waiting(self) -> int:
        """Sequences that wait."""


class Ticket:
    """One admitted request's places; give it back with `Capacity.leave`."""

    __slots__ = ("_left", "entered", "sequences")

    def __init__(self, sequences: int, entered: int) -> None:
        self.sequences = sequences
        self.entered = entered
        self._left = False


class Capacity:
    """Admission to one model. `places` sequences run at once, `queue_bound` more may wait."""

    def __init__(self, model: str, places: int, queue_bound: int) -> None:
        """ValueError unless there is at least one place and the bound is not negative."""
        if places < 1 or queue_bound < 0:
            raise ValueError(f"{model}: {places} places, queue of {queue_bound}")
        self.model = model
        self.places = places
        self.queue_bound = queue_bound
        self.in_flight = 0
        """sequences admitted and not yet left"""
        self.refused = 0
        self._service_us = 0.0
        self._seen: QueueView | None = None
        self._seen_at = 0
        self._entered_since = 0

    @property
    def waiting(self) -> int:
        """Sequences of ours beyond the places; what the engine's queue holds if it serves nobody else."""
        return max(0, self.in_flight - self.places)

    def enter(self, now: int, sequences: int = 1) -> Ticket:
        """Take places for a request of `sequences` choices at `now` (µs, monotonic). Raises OverloadedError.

        A request that alone is larger than everything is admitted when nothing else is there: it could never come in.
        """
        waiting = max(0, self.in_flight + sequences - self.places)
        if self._seen is not None and now - self._seen_at <= SNAPSHOT_FRESH_US:
            waiting = max(waiting, self._seen.waiting + self._entered_since + sequences - self._free(self._seen))
        if waiting > self.queue_bound and self.in_flight > 0:
            self.refused += 1
            raise OverloadedError(self.model, waiting - sequences, self.queue_bound, self._retry_after_s(waiting))
        self.in_flight += sequences
        self._entered_since += sequences
        return Ticket(sequences, now)

    def leave(self, ticket: Ticket, now: int, *, served: bool = True) -> None:
        """Give the places back, once; `served` requests teach the mean service time. A second call changes nothing."""
        if ticket._left:
            return
        ticket._left = True
        self.in_flight -= ticket.sequences
        self._entered_since = max(0, self._entered_since - ticket.sequences)
        if served:
            took = float(now - ticket.entered)
            self._service_us = (
                took if not self._service_us else self._service_us + _SMOOTHING * (took - self._service_us)
            )

    def observe(self, snapshot: QueueView, now: int) -> None:
        """Take the engine's own view of its queue (µs, monotonic)."""
        self._seen, self._seen_at, self._entered_since = snapshot, now, 0

    def resize(self, places: int, queue_bound: int) -> None:
        """Take new bounds while running; requests in flight stay. ValueError as at the start."""
        if places < 1 or queue_bound < 0:
            raise ValueError(f"{self.model}: {places} places, queue of {queue_bound}")
        self.places, self.queue_bound = places, queue_bound

    def _free(self, snapshot: QueueView) -> int:
        return max(0, self.places - snapshot.running)

    def _retry_after_s(self, waiting: int) -> int:
        """Time for the queue to shrink below its bound: excess requests, `places` served per mean service time."""
        excess = waiting - self.queue_bound
        seconds = excess * self._service_us / self.places / 1_000_000
        return min(MAX_RETRY_AFTER_S, max(1, round(seconds)))
