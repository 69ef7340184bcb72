"""The comparison of what clients saw with what the ledger says: every kind of contradiction is found."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.rig.books import Books, Record, Seen, differences

FINISHED = Seen("r1", 200, done=True, failed=False, counts=(10, 4, 7), contents=3)
BROKEN_OFF = Seen("r1", 200, done=False, failed=False, counts=None, contents=2)
FAILED = Seen("r1", 200, done=True, failed=True, counts=None, contents=2)
REFUSED = Seen("r1", 503, done=False, failed=False, counts=None, contents=0)
BILLED = Record((10, 4, 7), "finished", True, 1700)
FREE = Record((10, 4, 2), "engine_error", False, 0)


def books(record: Record | None = BILLED, charges: int = 1, open_hold: bool = False) -> Books:
    return Books(
        {} if record is None else {"r1": record},
        {"r1": charges} if charges else {},
        ("r1",) if open_hold else (),
        frozenset({"r1"}),
    )


@pytest.mark.parametrize(
    ("one", "ledger"),
    [
        (FINISHED, books()),
        (FINISHED, books(dataclasses.replace(BILLED, cost=0), charges=0)),
        (BROKEN_OFF, books()),
        (BROKEN_OFF, books(FREE, charges=0)),
        (BROKEN_OFF, books(None, charges=0)),
        (FAILED, books(FREE, charges=0)),
        (REFUSED, books(None, charges=0)),
        (dataclasses.replace(FINISHED, counts=None), books()),
    ],
)
def test_books_that_agree(one: Seen, ledger: Books) -> None:
    assert differences([one], ledger, sent=1) == []


@pytest.mark.parametrize(
    ("one", "ledger", "word"),
    [
        (FINISHED, books(None, charges=0), "not on the books"),
        (FINISHED, books(FREE, charges=0), "booked as engine_error"),
        (FINISHED, books(charges=0), "was not charged"),
        (FINISHED, books(charges=2), "charged 2 times"),
        (FINISHED, books(dataclasses.replace(BILLED, counts=(10, 4, 8))), "the client was told"),
        (FINISHED, books(open_hold=True), "still open"),
        (FAILED, books(), "ended with an error"),
        (REFUSED, books(), "ended with an error"),
        (BROKEN_OFF, books(FREE, charges=1), "without a billable record"),
    ],
)
def test_every_contradiction_is_found(one: Seen, ledger: Books, word: str) -> None:
    assert any(word in finding for finding in differences([one], ledger, sent=1))


def test_more_holds_than_requests_is_a_request_that_ran_twice() -> None:
    ledger = dataclasses.replace(books(), known=frozenset({"r1", "r2"}))
    assert differences([FINISHED], ledger, sent=1) == ["2 holds for 1 requests"]


def test_one_request_id_for_two_answers() -> None:
    assert "2 answers carried the request id r1" in differences([FINISHED, FINISHED], books(), sent=2)
