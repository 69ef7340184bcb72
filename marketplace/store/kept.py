"""Connections that stay open between units of work. SQLAlchemy spends several times as long on handing one out of its
pool, and on taking it back, as a database spends on beginning and ending a transaction."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine
from sqlalchemy.engine.interfaces import DBAPIConnection

IDLE_S = 1.0
"""After so long without use it is looked whether a connection to a server still stands."""


class Kept:
    """Connections of one engine. Safe to share between threads; each connection is with one of them at a time."""

    def __init__(self, engine: Engine, most: int) -> None:
        """So many stay open at most while nobody uses them; the engine's pool has room for them and for others."""
        self._engine = engine
        self._most = most
        self._remote = engine.dialect.name != "sqlite"
        self._idle: deque[tuple[Connection, float]] = deque()

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """Open a transaction for the length of the block: it is rolled back when the block raises."""
        connection = self._take()
        try:
            with connection.begin():
                yield connection
        except BaseException:
            connection.close()  # whatever is left of it, the pool looks
            raise
        self._give(connection)

    def close(self) -> None:
        """Close those that nobody uses."""
        while self._idle:
            self._idle.pop()[0].close()

    def _take(self) -> Connection:
        while self._idle:
            try:
                connection, used = self._idle.pop()  # the one that was used last knows its statements and pages
            except IndexError:
                break  # another thread was faster
            if not self._remote or time.monotonic() - used <= IDLE_S or self._stands(connection):
                return connection
            connection.invalidate()
            connection.close()
        return self._engine.connect()

    def _give(self, connection: Connection) -> None:
        if len(self._idle) < self._most:
            self._idle.append((connection, time.monotonic()))
        else:
            connection.close()

    def _stands(self, connection: Connection) -> bool:
        driver = connection.connection.driver_connection
        return driver is not None and stands(self._engine, driver)


def stands(engine: Engine, driver: DBAPIConnection) -> bool:
    """Whether a connection of an engine's driver still answers."""
    try:
        engine.dialect.do_ping(driver)
    except engine.dialect.loaded_dbapi.Error:
        return False
    return True
