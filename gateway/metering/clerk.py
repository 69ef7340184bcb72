"""Who writes the ledger: takes batches of journal records, answers what each did to it, one after the other.

In service it is a process of its own: the work of a transaction would hold the interpreter that every stream of the
gateway needs, for milliseconds. It knows nothing that is not in the database or in the batch it was given, so it may be
killed at any moment: the batch is given to the next one, and the ledger ignores what it already has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, Protocol

import msgspec

from gateway.metering import failpoints
from marketplace.ledger.apply import AppliedBatch, apply_batch
from marketplace.ledger.records import JournalRecord
from marketplace.store.db import Database, WriteUnit

COMMAND = (sys.executable, "-m", "gateway.metering.clerk")
NICE = 5
"""The ledger may lag a little; streams may not."""
CLOSE_S = 10.0
_LENGTH = struct.Struct("<I")


class ClerkError(Exception):
    """A batch was not applied, or it is not known whether it was: apply it again."""


class Clerk(Protocol):
    """Applies batches. One at a time."""

    async def start(self) -> None:
        """Be ready for the first batch. Raises ClerkError."""

    async def apply(self, records: Sequence[JournalRecord]) -> AppliedBatch:
        """Return what the batch did, once it is committed. Raises ClerkError and whatever the database raises."""

    async def close(self) -> None:
        """Return when nothing is being written any more."""


class ThreadClerk:
    """Works in a thread of this process."""

    def __init__(self, database: Database, node: str) -> None:
        self._database = database
        self._node = node
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="clerk")

    async def start(self) -> None:
        """Nothing to do: the thread starts with its first batch."""

    async def apply(self, records: Sequence[JournalRecord]) -> AppliedBatch:
        """Apply in the thread. Raises what the database raises."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._apply, records)

    async def close(self) -> None:
        """Wait for the end of the transaction that the thread may be in."""
        await asyncio.to_thread(self._executor.shutdown)

    def _apply(self, records: Sequence[JournalRecord]) -> AppliedBatch:
        failpoints.hit("settler.before_apply")
        applied = self._database.transact(lambda unit: self._work(unit, records))
        failpoints.hit("settler.after_apply")
        return applied

    def _work(self, unit: WriteUnit, records: Sequence[JournalRecord]) -> AppliedBatch:
        applied = apply_batch(unit, self._node, records)
        failpoints.hit("settler.inside_apply")
        return applied


class Post(msgspec.Struct, frozen=True):
    """First frame to the process: where the ledger is, and whose journal it applies."""

    database_url: str
    node: str


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """A batch was not applied."""

    why: str


class Applied(msgspec.Struct, tag="applied", frozen=True):
    """A batch is in the ledger."""

    batch: AppliedBatch


_encode = msgspec.msgpack.Encoder().encode
_read_post = msgspec.msgpack.Decoder(Post).decode
_read_records = msgspec.msgpack.Decoder(list[JournalRecord]).decode
_read_outcome: msgspec.msgpack.Decoder[Applied | Failed] = msgspec.msgpack.Decoder(Applied | Failed)


class ProcessClerk:
    """Works in a process of its own, which is started again when it has died."""

    def __init__(self, database_url: str, node: str) -> None:
        self._post = Post(database_url, node)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Id of the process; None when none was started yet."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process ahead of its first batch. Raises ClerkError."""
        await self._running()

    async def apply(self, records: Sequence[JournalRecord]) -> AppliedBatch:
        """Apply in the process. Raises ClerkError; the next call finds or starts a process that is well."""
        process = await self._running()
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None and stdout is not None, "both are pipes"
        try:
            stdin.write(_frame(_encode(list(records))))
            await stdin.drain()
            (size,) = _LENGTH.unpack(await stdout.readexactly(_LENGTH.size))
            outcome = _read_outcome.decode(await stdout.readexactly(size))
        except (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError) as error:
            await self._dismiss(process)
            raise ClerkError(f"the process that writes the ledger has gone: {error}") from error
        except asyncio.CancelledError:  # its answer would be taken for that to the next batch
            self._process = None
            _kill(process)
            raise
        if isinstance(outcome, Failed):
            raise ClerkError(outcome.why)
        return outcome.batch

    async def close(self) -> None:
        """Let the process finish what it is in, and end it."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None, "it is a pipe"
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), CLOSE_S)
        except TimeoutError:
            _kill(process)
            await process.wait()

    async def _running(self) -> asyncio.subprocess.Process:
        process = self._process
        if process is not None and process.returncode is None:
            return process
        try:
            process = await asyncio.create_subprocess_exec(
                *COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
        except OSError as error:
            raise ClerkError(f"the process that writes the ledger cannot be started: {error}") from error
        assert process.stdin is not None, "it is a pipe"
        # The address may hold a password: it does not belong on a command line.
        process.stdin.write(_frame(_encode(self._post)))
        self._process = process
        return process

    async def _dismiss(self, process: asyncio.subprocess.Process) -> None:
        """Make sure that a process is gone before the next one begins."""
        self._process = None
        _kill(process)
        await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _frame(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def _next(source: BinaryIO) -> bytes | None:
    """Body of the next frame; None when there is no more."""
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    body = source.read(size)
    return body if len(body) == size else None


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """The process: apply batches until the gateway closes the pipe, or is gone."""
    first = _next(source)
    if first is None:
        return
    post = _read_post(first)
    database = Database(post.database_url)
    try:
        while (body := _next(source)) is not None:
            sink.write(_frame(_encode(_outcome(database, post.node, _read_records(body)))))
            sink.flush()
    except BrokenPipeError:  # the gateway was killed: the next one asks the ledger what it has
        return
    finally:
        database.close()


def _outcome(database: Database, node: str, records: Sequence[JournalRecord]) -> Applied | Failed:
    try:
        return Applied(database.transact(lambda unit: apply_batch(unit, node, records)))
    except Exception as error:  # supervision boundary: the gateway logs it, waits, and asks again
        return Failed(f"{type(error).__name__}: {error}")


def main() -> None:
    """Take over standard input and output."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for the gateway, which closes the pipe when it has finished
    with contextlib.suppress(OSError):
        os.nice(NICE)
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
