"""Ends what is over: reservations, and saved environments (whose nodes remove the disks by themselves at the same
time). Each is a transaction of its own that looks again: it may be killed at any line and run again, and several may
run at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from marketplace.environments import service as environments
from marketplace.events.transitions import SYSTEM, Scene
from marketplace.reservations import running
from marketplace.store.db import Clock, Database, ReadUnit, WriteUnit
from marketplace.store.ids import Random

PASS = 200
"""Most things of one pass."""

Due = Callable[[ReadUnit, int, int], Sequence[str]]
"""Ids of what is over at a time, at most so many."""
End = Callable[[WriteUnit, str, Scene], bool]
"""Ends one, if it is over still; says whether it did."""


class Expiry:
    """Watches one sort of things of one database."""

    def __init__(self, database: Database, due: Due, end: End, *, clock: Clock, random: Random) -> None:
        self._database = database
        self._due = due
        self._end = end
        self._clock = clock
        self._random = random

    def run(self, stopping: Callable[[], bool] = lambda: False) -> int:
        """End what is over, until nothing is or `stopping` says so; returns how many were ended."""
        with self._database.read() as unit:
            over = self._due(unit, self._clock(), PASS)
        done = 0
        for one in over:
            if stopping():
                break
            done += self._database.transact(partial(self._end_one, one=one))
        return done

    def _end_one(self, unit: WriteUnit, one: str) -> bool:
        return self._end(unit, one, Scene(SYSTEM, self._clock(), self._random))


def of_reservations(database: Database, *, clock: Clock, random: Random) -> Expiry:
    """Ends reservations."""
    return Expiry(database, running.due, running.expire, clock=clock, random=random)


def of_environments(database: Database, *, clock: Clock, random: Random) -> Expiry:
    """Ends saved environments."""
    return Expiry(database, environments.overdue, environments.expire, clock=clock, random=random)
