"""Ends saved environments whose time is over. Each is a transaction of its own that looks again: it may be killed at
any line and run again, and several may run at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from marketplace.environments import service as environments
from marketplace.events.transitions import SYSTEM, Scene
from marketplace.store.db import Clock, Database, WriteUnit
from marketplace.store.ids import Random

PASS = 200
"""Most environments of one pass."""


class EnvironmentExpiry:
    """Watches the saved environments of one database. Their nodes remove the disks by themselves at the same time."""

    def __init__(self, database: Database, *, clock: Clock, random: Random) -> None:
        self._database = database
        self._clock = clock
        self._random = random

    def run(self, stopping: Callable[[], bool] = lambda: False) -> int:
        """End what is over, until nothing is or `stopping` says so; returns how many were ended."""
        with self._database.read() as unit:
            over = environments.overdue(unit, self._clock(), PASS)
        done = 0
        for environment_id in over:
            if stopping():
                break
            done += self._database.transact(partial(self._end, environment_id=environment_id))
        return done

    def _end(self, unit: WriteUnit, environment_id: str) -> bool:
        return environments.expire(unit, environment_id, Scene(SYSTEM, self._clock(), self._random))
