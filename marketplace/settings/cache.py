"""The settings in memory: whoever needs them often looks at a copy that is at most a second old."""

from __future__ import annotations

import threading

from marketplace.settings import service
from marketplace.settings.rules import DEFAULTS, AppSettings
from marketplace.store.db import Database

POLL_US = 900_000
"""How old a copy may get before the epoch is compared: a change is seen within a second."""


class SettingsCache:
    """A copy of the settings. Safe to share between threads; one of them reads, the others go on with the copy."""

    def __init__(self) -> None:
        self._settings = DEFAULTS
        self._epoch = -1
        self._checked_at: int | None = None
        self._reading = threading.Lock()

    def read(self, database: Database, now: int) -> AppSettings:
        """Return the settings of at most a second ago. `now` is in µs; a clock that was put back does not hide a
        change."""
        checked_at = self._checked_at
        if checked_at is not None and 0 <= now - checked_at < POLL_US:
            return self._settings
        # The first reader waits for nobody and must not get the defaults; later ones have an older copy meanwhile.
        if self._reading.acquire(blocking=checked_at is None):
            try:
                self._load(database, now)
            finally:
                self._reading.release()
        return self._settings

    def refresh(self, database: Database, now: int) -> AppSettings:
        """Read the settings now, whatever the epoch says."""
        with self._reading:
            self._epoch = -1
            self._load(database, now)
            return self._settings

    def _load(self, database: Database, now: int) -> None:
        with database.read() as unit:
            epoch = service.epoch(unit)
            if epoch != self._epoch:
                self._settings = service.current(unit)
        self._epoch, self._checked_at = epoch, now
