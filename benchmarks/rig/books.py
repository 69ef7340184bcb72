"""Holds what clients saw against what the ledger says: a finished answer is billed once, and as it was.

A client's view of a request is `Seen`; the ledger's is `Record`. `differences` is pure. Nothing here goes through the
project's own services: the tables are read as an outsider would read them.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.rig.http import Reply


@dataclass(frozen=True, slots=True)
class Seen:
    """One request as its client saw it."""

    request_id: str
    """From the x-request-id header; empty when no headers came."""
    status: int
    done: bool
    """[DONE] came."""
    failed: bool
    """An error event came before it."""
    counts: tuple[int, int, int] | None
    """prompt, cached and completion tokens of the usage event"""
    contents: int
    """Events with content that came."""

    @property
    def finished(self) -> bool:
        """True when the client was told that its answer is complete: this one must be on the books."""
        return self.status == 200 and self.done and not self.failed


def seen(reply: Reply) -> Seen:
    """Return what a reply shows of its request."""
    usage = reply.usage
    return Seen(
        request_id=reply.headers.get("x-request-id", ""),
        status=reply.status,
        done=reply.done,
        failed=reply.error is not None,
        counts=None if usage is None else (usage.prompt_tokens, usage.cached, usage.completion_tokens),
        contents=len(reply.contents),
    )


@dataclass(frozen=True, slots=True)
class Record:
    """One usage record."""

    counts: tuple[int, int, int]
    outcome: str
    billable: bool
    cost: int


@dataclass(frozen=True, slots=True)
class Books:
    """What the ledger holds of requests."""

    records: Mapping[str, Record] = field(default_factory=dict)
    charges: Mapping[str, int] = field(default_factory=dict)
    """Number of charging transactions by request id."""
    open_holds: tuple[str, ...] = ()
    known: frozenset[str] = frozenset()
    """Every request that ever had a hold."""


def read_books(database: Path) -> Books:
    """Read a ledger in SQLite, without taking part in its locking for longer than one snapshot."""
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        connection.execute("BEGIN")
        records = {
            row[0]: Record((row[1], row[2], row[3]), row[4], bool(row[5]), row[6])
            for row in connection.execute(
                "SELECT request_id, prompt, cached, completion, outcome, billable, cost FROM usage_record"
            )
        }
        charges = Counter(
            key.removeprefix("usage:")
            for (key,) in connection.execute(
                "SELECT idempotency_key FROM ledger_tx WHERE idempotency_key LIKE 'usage:%'"
            )
        )
        holds = connection.execute("SELECT request_id, state FROM hold").fetchall()
    return Books(
        records,
        charges,
        tuple(sorted(request for request, state in holds if state == "open")),
        frozenset(request for request, _ in holds),
    )


def wait_until_closed(database: Path, requests: int, limit_s: float = 20.0) -> Books:
    """Return the books as soon as they hold `requests` requests, all ended. Raises TimeoutError: some never did.

    The ledger follows the journal by some milliseconds, so a request just answered may not be there yet.
    """
    until = time.monotonic() + limit_s
    while (books := read_books(database)).open_holds or len(books.known) < requests:
        if time.monotonic() > until:
            raise TimeoutError(f"{len(books.known)} of {requests} requests, open holds: {books.open_holds[:5]}")
        time.sleep(0.1)
    return books


def differences(sightings: Iterable[Seen], books: Books, sent: int) -> list[str]:
    """Return every way in which the ledger contradicts the clients, empty when all is well.

    `sent` is the number of requests that were sent, those whose clients saw nothing at all included.
    """
    found = [f"hold of {request} is still open" for request in books.open_holds]
    found += [f"{request} was charged {times} times" for request, times in books.charges.items() if times > 1]
    found += [
        f"{request} was charged without a billable record"
        for request in books.charges
        if request not in books.records or not books.records[request].billable
    ]
    if len(books.known) > sent:
        found.append(f"{len(books.known)} holds for {sent} requests")
    ids = Counter(one.request_id for one in sightings if one.request_id)
    found += [f"{times} answers carried the request id {request}" for request, times in ids.items() if times > 1]
    for one in sightings:
        found += _differences_of(one, books)
    return found


def _differences_of(one: Seen, books: Books) -> list[str]:
    record = books.records.get(one.request_id)
    if one.finished:
        if record is None:
            return [f"{one.request_id} was answered in full and is not on the books"]
        wrong = []
        if one.counts is not None and one.counts != record.counts:
            wrong.append(f"{one.request_id}: the client was told {one.counts}, the books say {record.counts}")
        if not record.billable or record.outcome != "finished":
            wrong.append(f"{one.request_id} was answered in full and is booked as {record.outcome}, free")
        if record.cost > 0 and one.request_id not in books.charges:
            wrong.append(f"{one.request_id} costs {record.cost} and was not charged")
        return wrong
    if record is not None and record.billable and (one.failed or one.status not in (0, 200)):
        return [f"{one.request_id} ended with an error for the client and was charged as {record.outcome}"]
    return []
