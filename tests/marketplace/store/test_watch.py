"""A look at an epoch sees every change at once, keeps no snapshot open, and comes back after a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text

from marketplace.store import epochs
from marketplace.store.watch import Watch, WatchError

if TYPE_CHECKING:
    from marketplace.store.db import Database
    from tests.marketplace.conftest import MakeDatabase


def test_every_change_is_seen(database: Database) -> None:
    watch, other = Watch(database, epochs.KEYS), Watch(database, epochs.ACCOUNTS)
    assert watch.value() == other.value() == 0
    for value in (1, 2, 3):
        with database.write() as unit:
            epochs.bump(unit, epochs.KEYS)
        assert (watch.value(), other.value()) == (value, 0)
    with database.read() as unit:
        assert epochs.current(unit, epochs.KEYS) == watch.value()
    watch.close()
    other.close()


def test_no_snapshot_stays_open_between_looks(database: Database) -> None:
    watch = Watch(database, epochs.KEYS)
    with database.write() as unit:
        epochs.bump(unit, epochs.KEYS)
    assert watch.value() == 1
    if database.dialect == "sqlite":
        raw = database._writer.raw_connection()
        busy, log, done = raw.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        raw.close()
        assert (busy, log, done) == (0, 0, 0)
    else:
        with database._writer.connect() as connection:
            held = connection.execute(
                text("SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'")
            )
            assert held.scalar_one() == 0
    watch.close()


def test_a_database_that_does_not_answer_is_an_error_and_the_next_look_works(make_database: MakeDatabase) -> None:
    database = make_database()
    watch = Watch(database, epochs.KEYS)
    with database._writer.begin() as connection:
        connection.execute(text("ALTER TABLE epoch RENAME TO elsewhere"))
    with pytest.raises(WatchError, match="the epoch of keys cannot be read"):
        watch.value()
    with database._writer.begin() as connection:
        connection.execute(text("ALTER TABLE elsewhere RENAME TO epoch"))
    assert watch.value() == 0
    watch.close()
