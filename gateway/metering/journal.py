"""The gateway's durable intent: holds and settlements are on disk here before anybody is told that they happened.

One SQLite file per gateway (WAL, synchronous=FULL: torn writes, checksums and replay come with it), written by one
thread with group commit: whatever is queued when the thread comes round goes into one transaction, so a lone record
is committed at once and a thousand concurrent ones share an fsync. The event loop never touches the disk.

What callers may rely on
- A future that resolved: the record is on disk, whatever happens to the process or the machine afterwards.
- A future that failed: the record is not in the journal and never will be (rows whose commit was ambiguous are
  deleted before the
  journal works again). A failed commit fails everything queued behind it too, so the lost records are always a suffix.
- After a write error the journal refuses (`JournalUnavailableError`) until a probe has been written; it probes by
  itself.
- Sequence numbers are given in order by the event loop and have no gaps on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

import msgspec

from gateway.metering import failpoints
from marketplace.ledger.records import JournalRecord, encode

_SCHEMA = (
    # One row per commit, named by the last of its records: a commit is one statement however much it carries.
    "CREATE TABLE IF NOT EXISTS journal (last_seq INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
)
_PROBE_SECONDS = 0.25
_PRUNE_SECONDS = 0.5
"""Applied records are deleted when the thread has been idle for this long, and at the latest every so often."""
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


class JournalUnavailableError(Exception):
    """The record was not written and will not be; the journal refuses work until its disk works again."""


class JournalInUseError(Exception):
    """Another process has this journal open."""


class JournalDamagedError(Exception):
    """The file is not a journal of this program, or is not the journal that was opened."""


class _Entry:
    """One queued record (or a barrier, whose record is None) and who waits for it."""

    __slots__ = ("body", "future", "record")

    def __init__(self, record: JournalRecord | None, future: asyncio.Future[None] | None) -> None:
        self.record = record
        self.body = None if record is None else msgspec.Raw(encode(record))
        self.future = future


_Batch = list[_Entry]


class Journal:
    """Open with `Journal.open`, read the tail with `replay`, then `start` it on an event loop.

    Every method but `replay` and `open` belongs to that loop's thread.
    """

    def __init__(self, path: Path, lock: IO[str], connection: sqlite3.Connection, node: str) -> None:
        self.path = path
        self.node = node
        """Identity of this file: the ledger counts applied records per node, so a new file starts a new count."""
        self.pruned_seq = int(_meta(connection, "pruned_seq") or 0)
        self.engine_epochs: dict[str, str] = json.loads(_meta(connection, "engine_epochs") or "{}")
        """Which engine process served each model last, by model."""
        self.next_seq = max(self.pruned_seq, _max_seq(connection)) + 1
        self.failure: str | None = None
        """Why the journal refuses work, or None while it works."""
        self.on_commit: Callable[[list[JournalRecord]], None] = _ignore
        """Called on the loop after each commit, before the futures of that commit resolve."""
        self.on_lost: Callable[[list[JournalRecord]], None] = _ignore
        """Called on the loop with records that will never be written, before their futures fail."""
        self.on_recovered: Callable[[], None] = lambda: None
        """Called on the loop when the journal works again after a failure."""
        self.commits = 0
        self._lock = lock
        self._connection = connection
        self._queue: SimpleQueue[_Entry | None] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._failure_seen = threading.Event()
        self._stopping = threading.Event()
        # Written by the loop, read by the writer thread: single assignments, so no lock.
        self._prune_to = self.pruned_seq
        self._new_epochs: str | None = None
        # Owned by the writer thread once it runs.
        self._committed_seq = self.next_seq - 1
        self._pruned_at = time.monotonic()
        self._unfolded = 0

    # -- opening -----------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: Path) -> Journal:
        """Open or create the journal and take its lock.

        Raises JournalInUseError when another process holds it, JournalDamagedError when the file is not a journal,
        OSError.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(path.suffix + ".lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise JournalInUseError(f"{path} is in use by another process") from error
        try:
            connection = _connect(path)
            try:
                with connection:
                    connection.execute("BEGIN IMMEDIATE")
                    for statement in _SCHEMA:
                        connection.execute(statement)
                    connection.execute("INSERT OR IGNORE INTO meta VALUES ('node', ?)", (f"gateway-{uuid.uuid4()}",))
                node = _meta(connection, "node")
                _make_room(connection)
            except BaseException:
                connection.close()
                raise
        except sqlite3.DatabaseError as error:
            lock.close()
            raise JournalDamagedError(f"{path}: {error}") from error
        assert node is not None
        return cls(path, lock, connection, node)

    def replay(self, after: int) -> Iterator[JournalRecord]:
        """Yield the durable records with seq > after, in order. Only before `start`. Raises JournalDamagedError."""
        assert self._thread is None, "the journal is running: its tail belongs to the writer thread"
        rows = self._connection.execute(
            "SELECT last_seq, body FROM journal WHERE last_seq > ? ORDER BY last_seq", (after,)
        )
        for last_seq, body in rows:
            try:
                records = _decode(body)
            except msgspec.MsgspecError as error:
                raise JournalDamagedError(f"{self.path}: records up to {last_seq}: {error}") from error
            yield from (record for record in records if record.seq > after)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the writer thread; callbacks and futures belong to `loop`."""
        assert self._thread is None, "already started"
        self._loop = loop
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    # -- the loop's side ---------------------------------------------------------------------------

    def append(self, record: JournalRecord) -> asyncio.Future[None]:
        """Queue the record, whose seq must be `next_seq`; the future resolves when it is on disk.

        Raises JournalUnavailableError at once (or through the future) when it cannot be written.
        """
        assert self._loop is not None, "not started"
        future: asyncio.Future[None] = self._loop.create_future()
        self._put(record, future)
        return future

    def append_nowait(self, record: JournalRecord) -> None:
        """Queue a record nobody waits for. Raises JournalUnavailableError when the journal is known not to work."""
        self._put(record, None)

    def _put(self, record: JournalRecord, future: asyncio.Future[None] | None) -> None:
        if self.failure is not None:
            raise JournalUnavailableError(self.failure)
        assert record.seq == self.next_seq, f"record {record.seq} is not the next, {self.next_seq}"
        entry = _Entry(record, future)
        self.next_seq += 1
        self._queue.put(entry)

    async def flush(self) -> None:
        """Return when everything appended so far is on disk. Raises JournalUnavailableError."""
        assert self._loop is not None, "not started"
        if self.failure is not None:
            raise JournalUnavailableError(self.failure)
        future: asyncio.Future[None] = self._loop.create_future()
        self._queue.put(_Entry(None, future))
        await future

    def mark_applied(self, seq: int) -> None:
        """The ledger has committed everything up to seq: those rows go with one of the next commits."""
        if seq > self._prune_to:
            self._prune_to = seq

    def note_engine_epoch(self, model: str, epoch: str) -> None:
        """Remember which engine process serves a model, for the recovery after a crash; written with the next commit,
        so at the latest with the first hold of a request to it.
        """
        if self.engine_epochs.get(model) != epoch:
            self.engine_epochs[model] = epoch
            self._new_epochs = json.dumps(self.engine_epochs)

    def resume_after(self, applied_seq: int) -> None:
        """Number new records above what the ledger has applied. Only before `start`.

        Raises JournalDamagedError when rows were pruned that this ledger never applied: it is older than the journal.
        """
        assert self._thread is None, "the journal is running"
        if applied_seq < self.pruned_seq:
            raise JournalDamagedError(
                f"{self.path}: the ledger was given records up to {self.pruned_seq} and knows of {applied_seq}: "
                "the database is older than the journal"
            )
        self.next_seq = max(self.next_seq, applied_seq + 1)
        self._committed_seq = self.next_seq - 1

    def close(self) -> None:
        """Write what is queued, stop the thread, release the file. Blocks for one commit."""
        self._stopping.set()
        if self._thread is not None:
            self._queue.put(None)
            self._failure_seen.set()
            self._thread.join()
            self._thread = None
        self.failure = "the journal is closed"
        self._connection.close()
        self._lock.close()

    def _resolve(self, batch: _Batch) -> None:
        records = [entry.record for entry in batch if entry.record is not None]
        if records:
            self.commits += 1
            self.on_commit(records)
        for entry in batch:
            if entry.future is not None and not entry.future.done():
                entry.future.set_result(None)

    def _fail(self, batch: _Batch, reason: str) -> None:
        """The writer could not commit `batch`: that and everything queued since is lost, as one suffix of the
        sequence.
        """
        self.failure = reason
        while True:
            try:
                entry = self._queue.get_nowait()
            except Empty:
                break
            if entry is not None:
                batch.append(entry)
        records = [entry.record for entry in batch if entry.record is not None]
        if records:
            self.next_seq = records[0].seq
            self.on_lost(records)
        for entry in batch:
            if entry.future is not None and not entry.future.done():
                entry.future.set_exception(JournalUnavailableError(reason))
                entry.future.exception()  # seen: a hold whose request is gone has nobody left to ask
        # Nothing is appended while `failure` is set, so the writer finds an empty queue when it goes on.
        self._failure_seen.set()

    def _recovered(self) -> None:
        self.failure = None
        self.on_recovered()

    # -- the writer thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            first: _Entry | None
            try:
                pending = self._prune_to > self.pruned_seq or self._new_epochs is not None
                first = self._queue.get(timeout=_PRUNE_SECONDS) if pending else self._queue.get()
            except Empty:
                self._commit([])
                continue
            batch: _Batch = []
            stop = first is None
            if first is not None:
                batch.append(first)
            try:
                while not stop:
                    entry = self._queue.get_nowait()
                    if entry is None:
                        stop = True
                    else:
                        batch.append(entry)
            except Empty:
                pass
            self._commit(batch)
            if stop:
                return

    def _commit(self, batch: _Batch) -> None:
        try:
            failpoints.hit("journal.before_insert")
            self._write(batch)
        except Exception as error:  # supervision boundary: a dead writer would leave requests waiting for ever
            self._give_up(batch, f"the journal cannot be written: {error}")
            return
        failpoints.hit("journal.after_commit")
        if batch:
            self._tell(lambda: self._resolve(batch))
        self._fold()

    def _write(self, batch: _Batch) -> None:
        bodies = [entry.body for entry in batch if entry.body is not None]
        last_seq, body = self._committed_seq + len(bodies), _join(bodies)
        insert = ("INSERT INTO journal VALUES (?, ?)", (last_seq, body))
        now = time.monotonic()
        prune = self._prune_to > self.pruned_seq and (not bodies or now - self._pruned_at > _PRUNE_SECONDS)
        if prune or self._new_epochs is not None:
            self._write_with_upkeep(insert if bodies else None, prune)
            self._pruned_at = now
        elif bodies:
            failpoints.hit("journal.before_commit")
            self._connection.execute(*insert)
        self._committed_seq = last_seq
        self._unfolded += len(body) + _COMMIT_BYTES

    def _write_with_upkeep(self, insert: tuple[str, tuple[int, bytes]] | None, prune: bool) -> None:
        prune_to, epochs = self._prune_to, self._new_epochs
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        if insert is not None:
            connection.execute(*insert)
        if prune:
            connection.execute("DELETE FROM journal WHERE last_seq <= ?", (prune_to,))
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('pruned_seq', ?)", (str(prune_to),))
        if epochs is not None:
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('engine_epochs', ?)", (epochs,))
        failpoints.hit("journal.before_commit")
        connection.execute("COMMIT")
        if prune:
            self.pruned_seq = prune_to
        if self._new_epochs is epochs:
            self._new_epochs = None

    def _fold(self) -> None:
        """Checkpoint a long write-ahead log here, not inside a commit that a request waits for."""
        if self._unfolded < _FOLD_BYTES:
            return
        self._unfolded = 0
        # An error is left to the next commit, which meets the same disk and reports it.
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def _give_up(self, batch: _Batch, reason: str) -> None:
        """Report the loss, then probe until a write succeeds again."""
        self._failure_seen.clear()
        if self._stopping.is_set() or not self._tell(lambda: self._fail(batch, reason)):
            self._tell(lambda: self._fail(batch, reason))
            return
        self._failure_seen.wait()
        while not self._stopping.wait(_PROBE_SECONDS):
            if self._probe():
                self._tell(self._recovered)
                return

    def _probe(self) -> bool:
        """Reopen, delete rows whose commit was ambiguous (their futures failed), and write something."""
        try:
            self._connection.close()
            connection = self._connection = _connect(self.path)
            if _meta(connection, "node") != self.node:
                return False  # the file was replaced under us: its content is not ours to continue
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("DELETE FROM journal WHERE last_seq > ?", (self._committed_seq,))
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('probed', ?)", (str(time.time_ns()),))
            failpoints.hit("journal.before_commit")
            connection.execute("COMMIT")
        except (sqlite3.Error, OSError):
            return False
        return True

    def _tell(self, callback: Callable[[], None]) -> bool:
        """Run the callback on the loop; False when the loop is gone (shutdown: nobody waits any more)."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            return False
        return True


def _ignore(records: list[JournalRecord]) -> None:
    """Default listener."""


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


def _max_seq(connection: sqlite3.Connection) -> int:
    (seq,) = connection.execute("SELECT coalesce(max(last_seq), 0) FROM journal").fetchone()
    return int(seq)
