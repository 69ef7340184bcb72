"""The gateway's durable intent: holds and settlements are on disk here before anybody is told that they happened.

One file per gateway, written by one thread with group commit: whatever is queued when the thread comes round goes into
one transaction, so a lone record is committed at once and a thousand concurrent ones share an fsync. The event loop
never touches the disk.

What callers may rely on
- A future that resolved: the record is on disk, whatever happens to the process or the machine afterwards.
- A future that failed: the record is not in the journal and never will be (what an ambiguous commit left behind is
  deleted before the journal works again). A failed commit fails everything queued behind it, too, so the lost records
  are always a suffix.
- After a write error the journal refuses (`JournalUnavailableError`) until a write has succeeded; it tries by itself.
- Sequence numbers are given in order by the event loop and have no gaps on disk.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec

from gateway.metering import failpoints
from gateway.metering.journal_file import JournalDamagedError, JournalFile, JournalInUseError
from marketplace.ledger.records import JournalRecord, encode

__all__ = ["Journal", "JournalDamagedError", "JournalInUseError", "JournalUnavailableError"]

_PROBE_SECONDS = 0.25
_LINGER_SECONDS = 0.05
"""How long a record that nobody waits for may wait for others: a commit costs the same for one as for hundreds."""
_PRUNE_SECONDS = 0.5
"""Applied records are deleted when the thread has been idle for this long, and at the latest every so often."""


class JournalUnavailableError(Exception):
    """The record was not written and will not be; the journal refuses work until its disk works again."""


class _Entry:
    """One queued record (or a barrier, whose record is None) and who waits for it."""

    __slots__ = ("body", "future", "record")

    def __init__(self, record: JournalRecord | None, future: asyncio.Future[None] | None) -> None:
        self.record = record
        self.body: msgspec.Raw | None = None
        """The record as it is written, from when it is handed to the writer."""
        self.future = future


_Batch = list[_Entry]


class Journal:
    """Open with `Journal.open`, read the tail with `replay`, then `start` it on an event loop.

    Every method but `replay` and `open` belongs to that loop's thread.
    """

    def __init__(self, file: JournalFile) -> None:
        self.node = file.node
        """Identity of the file: the ledger counts applied records per node."""
        self.engine_epochs = file.engine_epochs
        """Which engine process served each model last, by model."""
        self.next_seq = file.committed_seq + 1
        self.failure: str | None = None
        """Why the journal refuses work, or None while it works."""
        self.on_commit: Callable[[list[JournalRecord]], None] = _ignore
        """Called on the loop after each commit, before the futures of that commit resolve."""
        self.on_lost: Callable[[list[JournalRecord]], None] = _ignore
        """Called on the loop with records that will never be written, before their futures fail."""
        self.on_recovered: Callable[[], None] = lambda: None
        """Called on the loop when the journal works again after a failure."""
        self.commits = 0
        self._file = file
        self._queue: SimpleQueue[_Entry | None] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._failure_seen = threading.Event()
        self._stopping = threading.Event()
        # Written by the loop, read by the writer thread: single assignments, so no lock.
        self._prune_to = file.pruned_seq
        self._lingering: _Batch = []
        self._linger_timer: asyncio.TimerHandle | None = None
        self._releasing = False
        self._new_epochs: str | None = None
        # Owned by the writer thread once it runs.
        self._pruned_at = time.monotonic()

    # -- opening -----------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: Path) -> Journal:
        """Open or create the journal and take its lock. Raises JournalInUseError, JournalDamagedError, OSError."""
        return cls(JournalFile.open(path))

    def replay(self, after: int) -> Iterator[JournalRecord]:
        """Yield the durable records with seq > after, in order. Only before `start`. Raises JournalDamagedError."""
        assert self._thread is None, "the journal is running: its tail belongs to the writer thread"
        return self._file.replay(after)

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
        """Queue a record nobody waits for; it is written within moments, with others. Raises JournalUnavailableError
        when the journal is known not to work.
        """
        self._put(record, None)

    def _put(self, record: JournalRecord, future: asyncio.Future[None] | None) -> None:
        if self.failure is not None:
            raise JournalUnavailableError(self.failure)
        assert record.seq == self.next_seq, f"record {record.seq} is not the next, {self.next_seq}"
        assert self._loop is not None, "not started"
        entry = _Entry(record, future)
        self.next_seq += 1
        self._lingering.append(entry)
        if future is not None and not self._releasing:
            # Not before whoever appended has come to a stop: the writer would want the interpreter that he is using.
            self._releasing = True
            self._loop.call_soon(self._release)
        elif self._linger_timer is None and not self._releasing:
            self._linger_timer = self._loop.call_later(_LINGER_SECONDS, self._release)

    def _release(self) -> None:
        """Hand what lingers to the writer thread."""
        self._releasing = False
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        for entry in self._lingering:
            if entry.record is not None:
                entry.body = msgspec.Raw(encode(entry.record))
            self._queue.put(entry)
        self._lingering.clear()

    async def flush(self) -> None:
        """Return when everything appended so far is on disk. Raises JournalUnavailableError."""
        assert self._loop is not None, "not started"
        if self.failure is not None:
            raise JournalUnavailableError(self.failure)
        future: asyncio.Future[None] = self._loop.create_future()
        self._release()
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
        file = self._file
        if applied_seq < file.pruned_seq:
            raise JournalDamagedError(
                f"{file.path}: the ledger was given records up to {file.pruned_seq} and knows of {applied_seq}: "
                "the database is older than the journal"
            )
        file.committed_seq = max(file.committed_seq, applied_seq)
        self.next_seq = file.committed_seq + 1

    def close(self) -> None:
        """Take nothing more, write what is queued, stop the thread, let the file go. Blocks for one commit."""
        self.failure = "the journal is closed"
        self._stopping.set()
        if self._thread is not None:
            self._release()
            self._queue.put(None)
            self._failure_seen.set()
            self._thread.join()
            self._thread = None
        self._file.close()

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
        batch += self._lingering
        self._lingering.clear()
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
        if not self._stopping.is_set():
            self.failure = None
            self.on_recovered()

    # -- the writer thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            first: _Entry | None
            try:
                pending = self._prune_to > self._file.pruned_seq or self._new_epochs is not None
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
            # A failure empties the queue, and the word to stop with it: hence the second look.
            if stop or (self._stopping.is_set() and self._queue.empty()):
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
        self._file.fold()

    def _write(self, batch: _Batch) -> None:
        bodies = [entry.body for entry in batch if entry.body is not None]
        file, now, epochs = self._file, time.monotonic(), self._new_epochs
        prune = self._prune_to > file.pruned_seq and (not bodies or now - self._pruned_at > _PRUNE_SECONDS)
        if prune or epochs is not None:
            file.write_with_upkeep(bodies, self._prune_to if prune else None, epochs)
            self._pruned_at = now
            if self._new_epochs is epochs:
                self._new_epochs = None
        elif bodies:
            file.write(bodies)

    def _give_up(self, batch: _Batch, reason: str) -> None:
        """Report the loss, then probe until a write succeeds again."""
        self._failure_seen.clear()
        if not self._tell(lambda: self._fail(batch, reason)):
            return
        while not self._failure_seen.wait(_PROBE_SECONDS):
            if self._stopping.is_set():
                return  # the loop is waiting for this thread: it hears of the loss afterwards
        while not self._stopping.wait(_PROBE_SECONDS):
            if self._file.mend():
                self._tell(self._recovered)
                return

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
