"""The journal on disk: a SQLite database (WAL, synchronous=FULL), one row per commit. Blocking; one thread at a time.

SQLite brings torn-write safety, checksums and replay. `journal.py` gives it a thread, futures and an event loop.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import sqlite3
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from gateway.metering import failpoints
from marketplace.ledger.records import JournalRecord

_SCHEMA = (
    # One row per commit, named by the last of its records: a commit is one statement however much it carries.
    "CREATE TABLE IF NOT EXISTS journal (last_seq INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
)
_ROOM = 2 * 1024 * 1024
"""Bytes written and deleted at opening, so that the write-ahead log has its place on the disk: an fsync of a file that
grows costs twice one that does not, because the file system must write its own journal, too.
"""
_FOLD_BYTES = 3 * 1024 * 1024
"""Written bytes after which the log is folded into the file and begun again from its start."""
_COMMIT_BYTES = 8 * 1024
"""What a commit writes besides its records, about: the pages that it touches."""

_join = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[JournalRecord]).decode


class JournalInUseError(Exception):
    """Another process has this journal open."""


class JournalDamagedError(Exception):
    """The file is not a journal of this program, or the ledger is older than it."""


class JournalFile:
    """Made by `open`, which takes the file's lock; `close` gives it back."""

    def __init__(self, path: Path, lock: IO[str], connection: sqlite3.Connection) -> None:
        self.path = path
        self.node = _meta(connection, "node") or ""
        """Identity of this file: the ledger counts applied records per node, so a new file starts a new count."""
        self.pruned_seq = int(_meta(connection, "pruned_seq") or 0)
        self.engine_epochs: dict[str, str] = json.loads(_meta(connection, "engine_epochs") or "{}")
        (last,) = connection.execute("SELECT coalesce(max(last_seq), 0) FROM journal").fetchone()
        self.committed_seq = max(self.pruned_seq, int(last))
        """The last record that is on disk, or was."""
        self._lock = lock
        self._connection = connection
        self._unfolded = 0

    @classmethod
    def open(cls, path: Path) -> JournalFile:
        """Open or create the file.

        Raises JournalInUseError when another process holds it, JournalDamagedError when it is not a journal, OSError.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(path.suffix + ".lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise JournalInUseError(f"{path} is in use by another process") from error
        try:
            return cls(path, lock, _prepare(path))
        except sqlite3.DatabaseError as error:
            lock.close()
            raise JournalDamagedError(f"{path}: {error}") from error

    def replay(self, after: int) -> Iterator[JournalRecord]:
        """Yield the records with seq > after, in order. Raises JournalDamagedError."""
        rows = self._connection.execute(
            "SELECT last_seq, body FROM journal WHERE last_seq > ? ORDER BY last_seq", (after,)
        )
        for last_seq, body in rows:
            try:
                records = _decode(body)
            except msgspec.MsgspecError as error:
                raise JournalDamagedError(f"{self.path}: records up to {last_seq}: {error}") from error
            yield from (record for record in records if record.seq > after)

    def write(self, bodies: Sequence[msgspec.Raw]) -> None:
        """Commit the encoded records that follow `committed_seq`. sqlite3.Error or OSError: whether they are there is
        unknown until `mend`.
        """
        insert = self._insert(bodies)
        failpoints.hit("journal.before_commit")
        self._connection.execute(*insert)
        self._wrote(bodies, len(insert[1][1]))

    def write_with_upkeep(self, bodies: Sequence[msgspec.Raw], prune_to: int | None, engine_epochs: str | None) -> None:
        """Like `write`, and in the same transaction delete the records up to prune_to and keep the epochs (JSON)."""
        insert = self._insert(bodies)
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        if bodies:
            connection.execute(*insert)
        if prune_to is not None:
            connection.execute("DELETE FROM journal WHERE last_seq <= ?", (prune_to,))
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('pruned_seq', ?)", (str(prune_to),))
        if engine_epochs is not None:
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('engine_epochs', ?)", (engine_epochs,))
        failpoints.hit("journal.before_commit")
        connection.execute("COMMIT")
        self._wrote(bodies, len(insert[1][1]))
        if prune_to is not None:
            self.pruned_seq = prune_to

    def _insert(self, bodies: Sequence[msgspec.Raw]) -> tuple[str, tuple[int, bytes]]:
        return "INSERT INTO journal VALUES (?, ?)", (self.committed_seq + len(bodies), _join(bodies))

    def _wrote(self, bodies: Sequence[msgspec.Raw], size: int) -> None:
        self.committed_seq += len(bodies)
        self._unfolded += size + _COMMIT_BYTES

    def fold(self) -> None:
        """Bring a long write-ahead log into the file: here, and not inside a commit that a request waits for."""
        if self._unfolded < _FOLD_BYTES:
            return
        self._unfolded = 0
        # An error is left to the next commit, which meets the same disk and reports it.
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def mend(self) -> bool:
        """After a failed write: open the file anew, delete rows whose commit was ambiguous, and write something.

        True when that worked: everything beyond `committed_seq` is gone for good.
        """
        try:
            self._connection.close()
            connection = self._connection = _connect(self.path)
            if _meta(connection, "node") != self.node:
                return False  # the file was replaced under us: its content is not ours to continue
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("DELETE FROM journal WHERE last_seq > ?", (self.committed_seq,))
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('mended', ?)", (str(time.time_ns()),))
            failpoints.hit("journal.before_commit")
            connection.execute("COMMIT")
        except (sqlite3.Error, OSError):
            return False
        return True

    def close(self) -> None:
        """Let the file go."""
        self._connection.close()
        self._lock.close()


def _prepare(path: Path) -> sqlite3.Connection:
    connection = _connect(path)
    try:
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA:
                connection.execute(statement)
            connection.execute("INSERT OR IGNORE INTO meta VALUES ('node', ?)", (f"gateway-{uuid.uuid4()}",))
        _make_room(connection)
    except BaseException:  # an interrupted start, too, lets the file go
        connection.close()
        raise
    return connection


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA wal_autocheckpoint=0")
    return connection


def _make_room(connection: sqlite3.Connection) -> None:
    """Give the write-ahead log its size on disk. Without room for it the journal still works, a little slower."""
    with contextlib.suppress(sqlite3.OperationalError):
        connection.execute("CREATE TABLE IF NOT EXISTS room (bytes BLOB)")
        connection.execute("INSERT INTO room VALUES (zeroblob(?))", (_ROOM,))
        connection.execute("DELETE FROM room")
        connection.execute("PRAGMA wal_checkpoint(RESTART)")


def _meta(connection: sqlite3.Connection, key: str) -> str | None:
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else str(row[0])
