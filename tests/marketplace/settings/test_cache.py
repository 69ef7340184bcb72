"""The copy in memory: at most a second old, read by one thread at a time, refreshed on demand."""

from __future__ import annotations

import threading

from marketplace.settings import service
from marketplace.settings.cache import POLL_US, SettingsCache
from marketplace.settings.rules import DEFAULTS
from marketplace.store.db import Database


def change(database: Database, **values: object) -> None:
    with database.write() as unit:
        service.change(unit, values, now=1)


def test_a_change_is_seen_within_a_second(database: Database) -> None:
    cache = SettingsCache()
    assert cache.read(database, 0) == DEFAULTS
    change(database, read_burst=7)
    assert cache.read(database, POLL_US - 1).read_burst == DEFAULTS.read_burst
    assert cache.read(database, POLL_US).read_burst == 7 and POLL_US < 1_000_000


def test_a_clock_that_was_put_back_hides_nothing(database: Database) -> None:
    cache = SettingsCache()
    cache.read(database, 10**12)
    change(database, read_burst=7)
    assert cache.read(database, 10**6).read_burst == 7


def test_refresh_does_not_wait(database: Database) -> None:
    cache = SettingsCache()
    cache.read(database, 0)
    change(database, read_burst=7)
    assert cache.refresh(database, 1).read_burst == 7
    assert cache.read(database, 2).read_burst == 7


def test_the_first_look_of_every_thread_is_at_what_is_stored(database: Database) -> None:
    change(database, read_burst=7)
    cache, seen, together = SettingsCache(), [], threading.Barrier(6)

    def look() -> None:
        together.wait()
        seen.append(cache.read(database, 5).read_burst)

    threads = [threading.Thread(target=look) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [7] * 6


def test_changing_to_the_same_is_no_change_and_the_epoch_rises_with_others(database: Database) -> None:
    with database.write() as unit:
        settings, changes = service.change(unit, {"read_burst": 9, "write_burst": DEFAULTS.write_burst}, now=1)
    assert [(item.name, item.old, item.new) for item in changes] == [("read_burst", DEFAULTS.read_burst, 9)]
    with database.read() as unit:
        assert service.current(unit) == settings and service.epoch(unit) == 1
