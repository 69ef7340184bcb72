"""Leases of GPUs on a node: asked for, granted, renewed, revoked, and enforced on real processes."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from marketplace.agent.lease_door import LeaseClient, lease_app
from marketplace.agent.leases import TTL_S, Lease, LeaseBook, LeaseError, Wanted
from marketplace.agent.reconcile import SECOND
from marketplace.agent.serving import served, unix_listener
from marketplace.agent.wire import LeaseGrant

SLOT = "0000:65:00.0"
NOW = 1_000 * SECOND


@pytest.fixture
def engine() -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds a GPU, with a child."""
    process = subprocess.Popen(["sh", "-c", "sleep 60 & echo up; wait"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    with process:
        yield process
        process.kill()


def wanted(engine: subprocess.Popen[bytes], count: int = 1) -> Wanted:
    return Wanted(holder="replica-1", pid=engine.pid, count=count)


def granted(book: LeaseBook, engine: subprocess.Popen[bytes]) -> Lease:
    asked = book.request(wanted(engine), NOW)
    book.hear([LeaseGrant(id=asked.id, fence=7, gpus=[SLOT])], NOW)
    return book.look(asked.id)


def test_a_lease_is_asked_for_granted_renewed_and_given_back(engine: subprocess.Popen[bytes]) -> None:
    book = LeaseBook()
    lease = granted(book, engine)
    assert (lease.state, lease.fence, lease.gpus) == ("Held", 7, [SLOT])
    assert [(one.state, one.gpus) for one in book.reports()] == [("Held", [SLOT])]
    assert book.renew(lease.id, 7, NOW + 10 * SECOND).expires_at == NOW + (10 + TTL_S) * SECOND
    with pytest.raises(LeaseError, match="fence"):
        book.renew(lease.id, 6, NOW)
    book.release(lease.id)
    assert [one.state for one in book.reports()] == ["Released"]
    with pytest.raises(LeaseError, match="no such lease"):
        book.renew(lease.id, 7, NOW)


def test_a_gpu_is_held_until_the_process_is_gone(engine: subprocess.Popen[bytes]) -> None:
    book = LeaseBook()
    book.release(granted(book, engine).id)
    assert book.held() == {SLOT}, "the process could still use it"
    assert book.enforce(NOW) != [], "who gave it back and stays is ended"
    engine.wait(5)
    assert book.enforce(NOW) == []
    assert book.held() == frozenset()


def test_an_engine_that_outlives_its_lease_is_killed_with_its_children(engine: subprocess.Popen[bytes]) -> None:
    book = LeaseBook()
    lease = granted(book, engine)
    assert book.enforce(NOW + (TTL_S - 1) * SECOND) == []
    assert engine.poll() is None
    assert book.enforce(NOW + (TTL_S + 1) * SECOND) == [lease.id]
    assert engine.wait(5) == -9
    book.enforce(NOW + (TTL_S + 1) * SECOND)
    assert [one.state for one in book.reports()] == ["Released"]


def test_a_revoked_lease_ends_at_its_deadline_however_often_it_is_renewed(engine: subprocess.Popen[bytes]) -> None:
    book = LeaseBook()
    lease = granted(book, engine)
    deadline = NOW + 20 * SECOND
    book.hear([LeaseGrant(id=lease.id, fence=7, gpus=[SLOT], revoke_at=deadline)], NOW)
    assert book.renew(lease.id, 7, deadline).revoke_at == deadline
    assert book.enforce(deadline - 1) == []
    assert book.enforce(deadline) == [lease.id]


def test_leases_survive_the_agent_and_not_another_process_of_the_same_number(
    engine: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    file = tmp_path / "leases.json"
    lease = granted(LeaseBook(file), engine)
    again = LeaseBook(file)
    assert again.look(lease.id) == lease
    file.write_bytes(file.read_bytes().replace(b'"started":', b'"started":1'))
    other, killed = LeaseBook(file), []
    other = LeaseBook(file, kill=killed.append)
    assert other.enforce(NOW + 99 * SECOND) == []
    assert killed == [], "the number belongs to somebody else now"


def test_what_the_server_no_longer_names_has_been_taken_away(engine: subprocess.Popen[bytes]) -> None:
    book = LeaseBook()
    lease = granted(book, engine)
    book.hear([], NOW + SECOND)
    assert book.enforce(NOW + SECOND) == [lease.id]


def test_a_request_without_an_answer_runs_out_and_nothing_was_held(engine: subprocess.Popen[bytes]) -> None:
    book = LeaseBook()
    lease = book.request(wanted(engine), NOW)
    assert book.held() == frozenset()
    assert book.enforce(NOW + 31 * SECOND) == []
    with pytest.raises(LeaseError):
        book.look(lease.id)
    assert engine.poll() is None
    with pytest.raises(LeaseError, match="count of GPUs"):
        book.request(wanted(engine, count=0), NOW)
    engine.kill()
    engine.wait(5)
    with pytest.raises(LeaseError, match="no process"):
        book.request(wanted(engine), NOW)


def test_engines_speak_to_the_agent_over_its_socket(engine: subprocess.Popen[bytes], tmp_path: Path) -> None:
    book = LeaseBook()

    async def when(true: Callable[[], object]) -> None:
        while not true():
            await book.wait(1)

    async def server() -> None:
        """Grants the first request, and takes it away again; refuses the second."""
        await when(book.reports)
        (asked,) = book.reports()
        book.hear([LeaseGrant(id=asked.id, fence=1, gpus=[SLOT])], NOW)

    async def run() -> None:
        path = tmp_path / "leases.sock"
        async with served(lease_app(book, lambda: NOW), unix_listener(path)):
            assert path.stat().st_mode & 0o077 == 0
            client = LeaseClient(path)
            lease, _ = await asyncio.gather(client.acquire(wanted(engine)), server())
            assert (lease.state, lease.gpus) == ("Held", [SLOT])
            assert (await client.renew(lease)).expires_at == NOW + TTL_S * SECOND
            watching = asyncio.ensure_future(client.watch(lease))
            book.hear([LeaseGrant(id=lease.id, fence=1, gpus=[SLOT], revoke_at=NOW + SECOND)], NOW)
            assert (await watching).revoke_at == NOW + SECOND
            await client.release(lease)
            with pytest.raises(LeaseError) as caught:
                await client.renew(lease)
            assert caught.value.status == 404
            with pytest.raises(LeaseError) as caught:
                await client.acquire(Wanted(holder="x", pid=0, count=1))
            assert caught.value.status == 400
            await client.close()

    asyncio.run(run())
