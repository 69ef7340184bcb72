from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.metering import failpoints
from gateway.metering.journal import Journal, JournalDamagedError, JournalInUseError, JournalUnavailableError
from marketplace.ledger.records import Checkpoint, JournalRecord
from tests.gateway.metering.journal_watch import JournalWatch, ThreadWatch


def note(seq: int) -> Checkpoint:
    return Checkpoint(seq, f"r{seq}", seq, 0, seq, 1)


def append(journal: Journal, count: int = 1) -> list[asyncio.Future[None]]:
    return [journal.append(note(journal.next_seq)) for _ in range(count)]


def read(path: Path, after: int = 0) -> list[int]:
    journal = Journal.open(path)
    try:
        return [record.seq for record in journal.replay(after)]
    finally:
        journal.close()


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken journal is tried again soon."""
    monkeypatch.setattr("gateway.metering.journal._PROBE_SECONDS", 0.01)


def with_journal(path: Path, work: Callable[[Journal], Any]) -> Any:
    """Run an async function with a started journal."""

    async def main() -> Any:
        journal = Journal.open(path)
        journal.start(asyncio.get_running_loop())
        try:
            return await work(journal)
        finally:
            await asyncio.to_thread(journal.close)

    return asyncio.run(main())


def test_what_was_acknowledged_is_read_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def work(journal: Journal) -> list[JournalRecord]:
        seen: list[JournalRecord] = []
        journal.on_commit = seen.extend
        await asyncio.gather(*append(journal, 5))
        journal.append_nowait(note(6))
        await journal.flush()
        return seen

    seen = with_journal(path, work)
    assert [record.seq for record in seen] == [1, 2, 3, 4, 5, 6]
    assert read(path) == [1, 2, 3, 4, 5, 6]
    assert read(path, after=4) == [5, 6]
    reopened = Journal.open(path)
    assert (reopened.next_seq, list(reopened.replay(5))) == (7, [note(6)])
    reopened.close()


def test_what_is_queued_together_is_committed_together(tmp_path: Path) -> None:
    async def work(journal: Journal) -> int:
        await asyncio.gather(*append(journal, 500))
        return journal.commits

    assert with_journal(tmp_path / "journal.sqlite", work) <= 10


def test_the_commit_listener_hears_before_the_caller(tmp_path: Path) -> None:
    async def work(journal: Journal) -> list[str]:
        order: list[str] = []
        journal.on_commit = lambda records: order.append("listener")
        (future,) = append(journal)
        future.add_done_callback(lambda done: order.append("caller"))
        await future
        await asyncio.sleep(0)
        return order

    assert with_journal(tmp_path / "journal.sqlite", work) == ["listener", "caller"]


def test_a_record_out_of_order_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    async def work(journal: Journal) -> None:
        with pytest.raises(AssertionError, match="is not the next"):
            journal.append(note(2))
        assert journal.next_seq == 1

    with_journal(tmp_path / "journal.sqlite", work)


def test_only_one_process_may_have_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    first = Journal.open(path)
    with pytest.raises(JournalInUseError, match="another process"):
        Journal.open(path)
    first.close()
    second = Journal.open(path)
    assert second.node == first.node
    second.close()


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"this is not a database, whatever it is" * 100)
    with pytest.raises(JournalDamagedError, match="not a database"):
        Journal.open(path)


def test_a_record_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def work(journal: Journal) -> None:
        await asyncio.gather(*append(journal, 3))

    with_journal(path, work)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE journal SET body = ? WHERE last_seq = 3", (b"\xc1",))
    connection.close()
    journal = Journal.open(path)
    with pytest.raises(JournalDamagedError, match="records up to 3"):
        list(journal.replay(0))
    journal.close()


def test_applied_records_are_pruned_and_numbers_go_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def work(journal: Journal) -> None:
        await asyncio.gather(*append(journal, 10))
        journal.mark_applied(7)
        journal.mark_applied(4)  # late news changes nothing
        upkeep = ThreadWatch(journal._file, "write_with_upkeep")
        await asyncio.gather(*append(journal, 1))
        await upkeep.until(lambda: journal._file.pruned_seq == 7)
        journal.mark_applied(11)

    with_journal(path, work)
    journal = Journal.open(path)
    assert (list(journal.replay(0)), journal._file.pruned_seq, journal.next_seq) == ([], 11, 12)
    journal.close()


def test_of_a_commit_that_is_partly_applied_only_the_rest_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def work(journal: Journal) -> None:
        await asyncio.gather(*append(journal, 10))
        journal.mark_applied(7)

    with_journal(path, work)
    assert read(path, after=7) == [8, 9, 10]


def test_an_idle_journal_prunes_by_itself(tmp_path: Path) -> None:
    async def work(journal: Journal) -> int:
        upkeep = ThreadWatch(journal._file, "write_with_upkeep")
        await asyncio.gather(*append(journal, 3))
        journal.mark_applied(3)
        await asyncio.gather(*append(journal, 1))  # wakes the thread, which from now on looks by itself
        journal.mark_applied(4)
        append(journal, 1)
        journal.mark_applied(5)
        await upkeep.until(lambda: journal._file.pruned_seq == 5)
        return journal._file.pruned_seq

    assert with_journal(tmp_path / "journal.sqlite", work) == 5


def test_a_ledger_older_than_the_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def work(journal: Journal) -> None:
        await asyncio.gather(*append(journal, 5))
        journal.mark_applied(5)

    with_journal(path, work)
    journal = Journal.open(path)
    with pytest.raises(JournalDamagedError, match="older than the journal"):
        journal.resume_after(4)
    journal.resume_after(9)  # the journal is the older one: its numbers must rise above what the ledger knows
    assert journal.next_seq == 10
    journal.close()


def test_engine_epochs_are_remembered_with_the_next_record(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def work(journal: Journal) -> None:
        journal.note_engine_epoch("a", "one")
        journal.note_engine_epoch("b", "two")
        await asyncio.gather(*append(journal, 1))
        journal.note_engine_epoch("a", "three")
        await asyncio.gather(*append(journal, 1))

    with_journal(path, work)
    journal = Journal.open(path)
    assert journal.engine_epochs == {"a": "three", "b": "two"}
    journal.close()


def test_a_failed_write_fails_everything_behind_it_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def work(journal: Journal) -> None:
        lost: list[int] = []
        journal.on_lost = lambda records: lost.extend(record.seq for record in records)
        await asyncio.gather(*append(journal, 3))

        def fail() -> None:
            raise sqlite3.OperationalError("database or disk is full")

        failpoints.arm("journal.before_commit", fail)
        futures = append(journal, 4)
        journal.append_nowait(note(8))
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert all(isinstance(result, JournalUnavailableError) for result in results)
        assert lost == [4, 5, 6, 7, 8]
        assert journal.failure is not None and "disk is full" in journal.failure
        with pytest.raises(JournalUnavailableError):
            append(journal)
        with pytest.raises(JournalUnavailableError):
            await journal.flush()
        failpoints.disarm()
        await JournalWatch(journal).recovered.wait()
        assert journal.failure is None
        assert journal.next_seq == 4
        await asyncio.gather(*append(journal, 2))

    with_journal(path, work)
    assert read(path) == [1, 2, 3, 4, 5]


def test_rows_whose_commit_was_ambiguous_are_gone_before_it_works_again(tmp_path: Path) -> None:
    """A commit may reach the disk and be reported as failed: the caller was told it failed, so it must not stay."""
    path = tmp_path / "journal.sqlite"

    async def work(journal: Journal) -> None:
        await asyncio.gather(*append(journal, 2))
        journal._file._connection.close()  # the next write fails …
        with sqlite3.connect(path) as other:  # … but its row is there
            other.execute("INSERT OR REPLACE INTO journal VALUES (3, x'00')")
        other.close()
        watch = JournalWatch(journal)
        (future,) = append(journal)
        with pytest.raises(JournalUnavailableError):
            await future
        await watch.recovered.wait()
        await asyncio.gather(*append(journal, 1))

    with_journal(path, work)
    assert read(path) == [1, 2, 3]


def test_a_file_replaced_under_a_failed_journal_is_not_taken_for_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    def remove() -> None:
        for name in ("", "-wal", "-shm"):
            Path(f"{path}{name}").unlink(missing_ok=True)

    async def work(journal: Journal) -> None:
        await asyncio.gather(*append(journal, 2))
        journal._file._connection.close()
        await asyncio.to_thread(remove)
        tries = ThreadWatch(journal._file, "mend")
        append(journal)
        await JournalWatch(journal).failed.wait()
        await tries.until(lambda: tries.count >= 3)
        assert journal.failure is not None, "an empty file is not this journal"

    with_journal(path, work)


def test_close_writes_what_is_queued(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def main() -> None:
        journal = Journal.open(path)
        journal.start(asyncio.get_running_loop())
        append(journal, 50)
        await asyncio.to_thread(journal.close)
        with pytest.raises(JournalUnavailableError, match="closed"):
            append(journal)

    asyncio.run(main())
    assert len(read(path)) == 50


@pytest.mark.parametrize("from_the_loop", [False, True])
def test_a_broken_journal_can_be_closed_while_records_wait(tmp_path: Path, from_the_loop: bool) -> None:
    async def main() -> None:
        journal = Journal.open(tmp_path / "journal.sqlite")
        journal.start(asyncio.get_running_loop())

        def fail() -> None:
            raise sqlite3.OperationalError("disk I/O error")

        failpoints.arm("journal.before_commit", fail)
        futures = append(journal, 3)
        if from_the_loop:
            journal.close()
        else:
            await asyncio.wait_for(asyncio.to_thread(journal.close), 10)
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert all(isinstance(result, JournalUnavailableError) for result in results)

    asyncio.run(main())


def test_a_long_write_ahead_log_is_folded_and_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.sqlite"
    monkeypatch.setattr("gateway.metering.journal_file._ROOM", 4_096)
    monkeypatch.setattr("gateway.metering.journal_file._FOLD_BYTES", 64 * 1024)

    def logged() -> int:
        return Path(f"{path}-wal").stat().st_size

    async def work(journal: Journal) -> int:
        for _ in range(100):
            await asyncio.gather(*append(journal, 50))
        return logged()

    assert with_journal(path, work) < 512 * 1024
    assert len(read(path)) == 5000


def acknowledged(folder: Path) -> list[str]:
    told = folder / "told"
    return told.read_text().split("\n")[:-1] if told.exists() else []


def test_a_full_disk_refuses_and_loses_nothing_that_was_acknowledged(tmp_path: Path, victims: Any) -> None:
    victims.start(victim="journal", folder=tmp_path, max_bytes=300_000)
    assert victims.wait() == 0
    lines = acknowledged(tmp_path)
    assert lines[-1] == "refused"
    assert "lost" in lines
    told = {int(line) for line in lines if line.isdigit()}
    assert len(told) > 50
    assert told <= set(read(tmp_path / "journal.sqlite"))


def test_nothing_acknowledged_is_lost_when_the_process_is_killed(tmp_path: Path, victims: Any) -> None:
    """Ten kills at random moments, over one file that lives on."""
    moments = random.Random(4)
    told = 0
    for round_ in range(10):
        before = len(acknowledged(tmp_path))
        victims.start(victim="journal", folder=tmp_path)
        wanted = before + moments.randrange(1, 300)
        victims.until(lambda wanted=wanted: len(acknowledged(tmp_path)) >= wanted)
        victims.kill()
        assert victims.wait() == -9
        lines = acknowledged(tmp_path)
        seqs = read(tmp_path / "journal.sqlite")
        assert {int(line) for line in lines} <= set(seqs), f"round {round_}"
        assert seqs == list(range(1, len(seqs) + 1))
        told = len(lines)
    assert told > 100
