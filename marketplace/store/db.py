"""The database and its two units of work.

A ReadUnit can only select; a WriteUnit can also change, and is one transaction: committed when its block ends, rolled
back when the block raises. Services take a unit and never commit, so what belongs together is decided by the caller.

SQLite: the driver's own transaction control is switched off, because it begins a transaction only at the first change
and never as IMMEDIATE: two writers would then deadlock when they upgrade. Writers take BEGIN IMMEDIATE, and one at a
time in this process; readers see a snapshot through the write-ahead log. synchronous=FULL: a committed unit survives
a power failure. PostgreSQL: READ COMMITTED with explicit row locks for writers, a read-only REPEATABLE READ snapshot
for readers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, TypeVarTuple

from sqlalchemy import (
    URL,
    CompoundSelect,
    Connection,
    CursorResult,
    Delete,
    Engine,
    Insert,
    Row,
    Select,
    Table,
    Update,
    create_engine,
    event,
    make_url,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError, DisconnectionError
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection

from marketplace.store import bulk
from marketplace.store.kept import IDLE_S, Kept, stands
from marketplace.store.prepared import Prepared, on_driver, several

Clock = Callable[[], int]
"""Returns microseconds since 1970, UTC."""
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

BUSY_TIMEOUT_S = 10.0
KEPT_READERS = 8
KEPT_OF_SERVER = 4
"""PostgreSQL's readers and its writers share one pool: so many of each stay open, and most of the pool is for both."""
_RETRY_STATES = frozenset({"40001", "40P01"})  # serialization failure, deadlock
_ATTEMPTS = 5


class StoreError(Exception):
    """The database address is not usable, or a unit of work is used against its rules."""


class ReadUnit:
    """A consistent snapshot of the database that can only be read."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def dialect(self) -> str:
        """ "sqlite" or "postgresql"."""
        return self._connection.dialect.name

    def select(
        self, statement: Select[*Ts] | CompoundSelect[*Ts], values: Mapping[str, Any] | None = None
    ) -> CursorResult[*Ts]:
        """Run a SELECT, with `values` for the parameters that it names: one that is made once, and asked often, costs a
        fifth of one that is made for each question. StoreError for any other statement."""
        _only_select(statement)
        return self._connection.execute(statement, values)

    def rows(self, statement: Prepared, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Run a SELECT that is prepared. StoreError for any other statement."""
        _only_select(statement.statement)
        return statement.rows(self._connection, values)

    def several(self, asked: Sequence[tuple[Prepared, Mapping[str, Any]]]) -> list[list[tuple[Any, ...]]]:
        """Run SELECTs that are prepared, and return the rows of each: PostgreSQL is asked for all of them at once.
        StoreError for any other statement."""
        for statement, _ in asked:
            _only_select(statement.statement)
        return several(self._connection, asked)

    def stream(self, statement: Select[*Ts] | CompoundSelect[*Ts], size: int = 1000) -> Iterator[Row[*Ts]]:
        """Run a SELECT and yield its rows, keeping only `size` of them in memory at a time."""
        _only_select(statement)
        yield from self._connection.execute(statement, execution_options={"yield_per": size})


class WriteUnit(ReadUnit):
    """One transaction that may change the database. It is committed or rolled back by `Database.write` alone."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._afterwards: list[Callable[[], None]] = []
        self._waiting: list[tuple[Table, bulk.Rows]] | None = None

    def afterwards(self, tell: Callable[[], None]) -> None:
        """Call this once the unit is committed, and never if it is not: for what a process remembers of its own
        changes. It cannot fail and takes no time."""
        self._afterwards.append(tell)

    def committed(self) -> None:
        """Tell those who wait for it. For `Database.write` alone."""
        for tell in self._afterwards:
            tell()

    def execute(self, statement: Insert | Update | Delete) -> CursorResult[*tuple[Any, ...]]:
        """Run one INSERT, UPDATE or DELETE."""
        return self._connection.execute(statement)

    def change(self, statement: Prepared, values: Mapping[str, Any]) -> int:
        """Run an INSERT, UPDATE or DELETE that is prepared, and return how many rows it changed."""
        return statement.change(self._connection, values)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block of `insert_rows` only: all of it is done at its end, by PostgreSQL in one statement. What one of them
        raises, the block raises."""
        assert self._waiting is None, "blocks are not within each other"
        waiting: list[tuple[Table, bulk.Rows]] = []
        self._waiting = waiting
        try:
            yield
        finally:
            self._waiting = None
        bulk.insert_rows(self._connection, waiting)

    def insert_rows(self, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert any number of rows in one statement. All give values for the same columns; the others stay empty."""
        if self._waiting is None:
            bulk.insert_rows(self._connection, [(table, rows)])
        else:
            self._waiting.append((table, rows))

    def update_rows(self, table: Table, key: str, columns: tuple[str, ...], rows: Sequence[Mapping[str, Any]]) -> None:
        """Set `columns` of any number of rows in one statement, each found by its `key`."""
        bulk.update_rows(self._connection, table, key, columns, rows)

    def insert_missing(self, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert the rows whose keys are not there yet and leave the others as they are (ON CONFLICT DO NOTHING)."""
        build = postgresql.insert if self.dialect == "postgresql" else sqlite.insert
        if rows:
            self._connection.execute(build(table).on_conflict_do_nothing(), rows)


def _only_select(statement: object) -> None:
    if not isinstance(statement, Select | CompoundSelect):
        raise StoreError(f"a read takes a SELECT, not {type(statement).__name__}")


class Database:
    """Engines for one address: `sqlite:///PATH` or `postgresql+psycopg://…`. Safe to share between threads."""

    def __init__(self, url: str) -> None:
        """Prepare the engines; nothing is opened yet. StoreError when the address names another kind of database."""
        parsed = make_url(url)
        self.url = url
        self.dialect = parsed.get_backend_name()
        self._writing = threading.Lock()
        self._writer_thread: int | None = None
        if self.dialect == "sqlite":
            if parsed.database in (None, "", ":memory:"):
                raise StoreError("SQLite needs a file: money is not kept in memory")
            self._writer = _sqlite_engine(url, writer=True)
            self._reader = _sqlite_engine(url, writer=False)
        elif self.dialect == "postgresql":
            if parsed.drivername == "postgresql":
                parsed = parsed.set(drivername="postgresql+psycopg")
            self._writer = _postgres_engine(parsed)
            self._reader = self._writer.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        else:
            raise StoreError(f"unsupported database {self.dialect!r}: use sqlite:/// or postgresql+psycopg://")
        shared = self.dialect == "postgresql"
        self._readers = Kept(self._reader, KEPT_OF_SERVER if shared else KEPT_READERS)
        self._writers = Kept(self._writer, KEPT_OF_SERVER if shared else 1)

    @contextmanager
    def read(self) -> Iterator[ReadUnit]:
        """Open a snapshot for the length of the block."""
        with self._readers.begin() as connection:
            yield ReadUnit(connection)

    @contextmanager
    def write(self) -> Iterator[WriteUnit]:
        """Open a transaction for the length of the block. On SQLite, writers of this process queue here.

        StoreError when this thread already has one open: it would wait for itself.
        """
        with self._alone(), self._writers.begin() as connection:
            unit = WriteUnit(connection)
            yield unit
        unit.committed()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Be the only writer of this process, where the database has one at a time."""
        if self.dialect != "sqlite":
            yield
            return
        if self._writer_thread == threading.get_ident():
            raise StoreError("this thread already has a write unit open")
        with self._writing:
            self._writer_thread = threading.get_ident()
            try:
                yield
            finally:
                self._writer_thread = None

    def transact(self, work: Callable[[WriteUnit], T]) -> T:
        """Run `work` in a write unit, again from its beginning when PostgreSQL broke a deadlock by rolling it back."""
        for _ in range(_ATTEMPTS - 1):
            try:
                with self.write() as unit:
                    return work(unit)
            except DBAPIError as error:
                if getattr(error.orig, "sqlstate", None) not in _RETRY_STATES:
                    raise
        with self.write() as unit:
            return work(unit)

    @property
    def driver_error(self) -> type[Exception]:
        """What the driver raises when it fails: for who uses `connection`."""
        error: type[Exception] = self._reader.dialect.loaded_dbapi.Error
        return error

    def connection(self) -> PoolProxiedConnection:
        """A connection of the driver that only reads, outside of any unit. Raises SQLAlchemyError."""
        return self._reader.raw_connection()

    def migrate(self) -> str:
        """Bring the schema to its newest version and return that version. Safe when several processes start at once."""
        from marketplace.store.migrate import upgrade  # Alembic is only needed here, and slow to import

        with self._writing:
            return upgrade(self._writer)

    def close(self) -> None:
        """Close every connection. The database may be used again after it."""
        self._readers.close()
        self._writers.close()
        self._reader.dispose()
        self._writer.dispose()


def _postgres_engine(url: URL) -> Engine:
    """An engine that looks whether a connection still stands before it is used again, if it was idle for a moment: a
    server that went away meanwhile is nobody's error."""
    engine = create_engine(url, pool_size=8, max_overflow=8, pool_use_lifo=True)

    @event.listens_for(engine, "checkout")
    def _look(driver: DBAPIConnection, record: ConnectionPoolEntry, _fairy: PoolProxiedConnection) -> None:
        if time.monotonic() - record.info.get("used", 0.0) > IDLE_S and not stands(engine, driver):
            raise DisconnectionError("the connection no longer stands")

    @event.listens_for(engine, "checkin")
    def _used(_driver: DBAPIConnection | None, record: ConnectionPoolEntry) -> None:
        record.info["used"] = time.monotonic()

    return engine


def _sqlite_engine(url: str, *, writer: bool) -> Engine:
    engine = create_engine(
        url,
        connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
        pool_size=2 if writer else 8,  # who migrates writes beside the connection that is kept
        max_overflow=0 if writer else 16,
        pool_use_lifo=True,  # the one that was used last knows its statements and pages
    )

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        if writer:
            cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA foreign_keys=ON")
        # Without it INSERT OR REPLACE would remove an append-only row past its trigger.
        cursor.execute("PRAGMA recursive_triggers=ON")
        cursor.execute(f"PRAGMA query_only={'OFF' if writer else 'ON'}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        on_driver(connection, "BEGIN IMMEDIATE" if writer else "BEGIN")

    return engine
