"""Leases of GPUs to inference engines on this node: asked for here, granted by the server, enforced here.

An engine may make a device context only while it holds a lease. Its fence number rises with every lease of the node,
so that an engine that slept through the end of one is known as late. The end of a lease is enforced: an engine that is
still there then is killed, because nothing else frees the memory of a GPU for certain.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from marketplace.agent import processes
from marketplace.agent.reconcile import SECOND
from marketplace.agent.records import write_whole
from marketplace.agent.wire import LeaseGrant, LeaseReport

TTL_S = 30
"""a lease that is not renewed for so long ends"""
_ANSWER_S = 30

State = Literal["Requested", "Held", "Refused", "Ended"]


class Wanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine asks for."""

    holder: str
    pid: int
    """the engine's process: it and what it started are killed when it outlives its lease"""
    count: int = 0
    gpus: list[str] = []
    min_vram_bytes: int = 0
    preemptible: bool = True
    notice_s: int = 30


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A lease as an engine sees it."""

    id: str
    state: State
    fence: int = 0
    gpus: list[str] = []
    """PCI slots"""
    uuids: list[str] = []
    """names by which the GPUs' driver knows them, in the order of `gpus`; empty where the node does not know one"""
    expires_at: int = 0
    revoke_at: int | None = None
    """the engine must be gone by then"""
    refused: str | None = None


class _Entry(msgspec.Struct, kw_only=True):
    wanted: Wanted
    started: int
    """when the process began: with its number it is known for certain"""
    lease: Lease
    gone: bool = False
    """whether it has ended and its process with it: the server is told until it no longer names the lease"""


class LeaseError(Exception):
    """The request cannot be fulfilled. `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        """`message` is for the engine's log."""
        super().__init__(message)
        self.status = status


class LeaseBook:
    """All leases of this node. For one event loop; the time comes as an argument."""

    def __init__(self, file: Path | None = None, *, kill: Callable[[int], None] = processes.kill) -> None:
        """`file` keeps the leases for the agent's next process; `kill` ends a process."""
        self._entries: dict[str, _Entry] = {}
        self._file = file
        self._kill = kill
        if file is not None and file.exists():
            self._entries = msgspec.json.decode(file.read_bytes(), type=dict[str, _Entry])
        self._changes = asyncio.Event()
        self._changed = False
        self.closed = False
        """Whether the agent is about to go: nobody waits any more."""
        self.uuids: dict[str, str] = {}
        """UUID of the GPU in each PCI slot, as far as they are known"""

    def request(self, wanted: Wanted, now: int) -> Lease:
        """Ask for a lease. Raises LeaseError for a process that is not there."""
        started = processes.started(wanted.pid)
        if started is None:
            raise LeaseError(400, f"there is no process {wanted.pid}")
        if wanted.count < 1 and not wanted.gpus:
            raise LeaseError(400, "ask for a count of GPUs, or name them")
        lease = Lease(id=secrets.token_hex(16), state="Requested", expires_at=now + _ANSWER_S * SECOND)
        self._entries[lease.id] = _Entry(wanted=wanted, started=started, lease=lease)
        self._note()
        return lease

    def renew(self, id: str, fence: int, now: int) -> Lease:
        """Hold on for another while. It needs no server: who holds a GPU keeps it when the server is gone.

        Raises LeaseError 404 for one that has ended, 409 for an older fence.
        """
        entry = self._live(id)
        if entry.lease.fence != fence:
            raise LeaseError(409, "the fence is not that of this lease")
        if entry.lease.state == "Held":
            entry.lease = msgspec.structs.replace(entry.lease, expires_at=now + TTL_S * SECOND)
            self._note()
        return entry.lease

    def release(self, id: str) -> None:
        """Give it back. The process may not use the GPUs any more; it is gone, or will be at once."""
        entry = self._entries.get(id)
        if entry is not None and entry.lease.state != "Ended":
            self._end(entry)

    def look(self, id: str) -> Lease:
        """The lease as it is. Raises LeaseError 404."""
        return self._live(id).lease

    def hear(self, grants: list[LeaseGrant], now: int) -> None:
        """Take the server's word on all leases. One that it no longer names, or grants no more, has been taken away."""
        named = {grant.id: grant for grant in grants}
        for id, entry in list(self._entries.items()):
            grant, lease = named.get(id), entry.lease
            if grant is None and entry.gone:
                del self._entries[id]
                self._note()
            elif grant is None or (grant.refused is not None and lease.state == "Held"):
                if lease.state == "Held" and lease.revoke_at is None:
                    entry.lease = msgspec.structs.replace(lease, revoke_at=now)
                    self._note()
            elif grant.refused is not None and lease.state == "Requested":
                entry.lease = msgspec.structs.replace(lease, state="Refused", refused=grant.refused)
                self._note()
            elif lease.state in ("Requested", "Held") and grant.gpus:
                expires = now + TTL_S * SECOND if lease.state == "Requested" else lease.expires_at
                held = msgspec.structs.replace(
                    lease,
                    state="Held",
                    fence=grant.fence,
                    gpus=grant.gpus,
                    uuids=[self.uuids.get(slot, "") for slot in grant.gpus],
                    expires_at=expires,
                    revoke_at=grant.revoke_at,
                )
                if held != lease:
                    entry.lease = held
                    self._note()

    def enforce(self, now: int) -> list[str]:
        """End what is over: kill the engines that are still there. Return the leases that were outlived."""
        outlived = []
        for id, entry in list(self._entries.items()):
            lease = entry.lease
            alive = processes.started(entry.wanted.pid) == entry.started
            over = lease.expires_at <= now or (lease.revoke_at is not None and lease.revoke_at <= now)
            if lease.state == "Ended" and not alive:
                if not entry.gone:
                    entry.gone = True
                    self._note()
            elif lease.state in ("Refused", "Requested") and (over or not alive):
                del self._entries[id]
                self._note()
            elif lease.state in ("Held", "Ended") and (over or not alive):
                if alive:
                    outlived.append(id)
                    for pid in processes.descendants(entry.wanted.pid):  # parents first: they start no new ones
                        self._kill(pid)
                elif lease.state == "Held":
                    self._end(entry)
        return outlived

    def held(self) -> frozenset[str]:
        """PCI slots that engines hold, or may still hold because their process lives."""
        return frozenset(slot for entry in self._entries.values() if not entry.gone for slot in entry.lease.gpus)

    def reports(self) -> list[LeaseReport]:
        """All leases for the server."""
        states: dict[State, Literal["Requested", "Held", "Released"]] = {
            "Requested": "Requested",
            "Held": "Held",
            "Ended": "Released",
        }
        return [
            LeaseReport(
                id=entry.lease.id,
                holder=entry.wanted.holder,
                state=states[entry.lease.state],
                fence=entry.lease.fence,
                count=entry.wanted.count,
                gpus=entry.lease.gpus or entry.wanted.gpus,
                min_vram_bytes=entry.wanted.min_vram_bytes,
                preemptible=entry.wanted.preemptible,
                notice_s=entry.wanted.notice_s,
            )
            for entry in self._entries.values()
            if entry.lease.state in states
        ]

    def changed(self) -> bool:
        """Whether anything changed since the last time this was asked."""
        changed, self._changed = self._changed, False
        return changed

    async def wait(self, timeout_s: float) -> None:
        """Until a lease changes, at most so long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changes.wait()
        except TimeoutError:
            return
        self._changes.clear()

    def close(self) -> None:
        """Wake whoever waits: the agent goes. The leases are kept for its next process."""
        self.closed = True
        self._changes.set()

    def _live(self, id: str) -> _Entry:
        entry = self._entries.get(id)
        if entry is None or entry.lease.state == "Ended":
            raise LeaseError(404, "there is no such lease, or it has ended")
        return entry

    def _end(self, entry: _Entry) -> None:
        alive = processes.started(entry.wanted.pid) == entry.started
        entry.gone = not alive
        entry.lease = msgspec.structs.replace(
            entry.lease, state="Ended", expires_at=0 if alive else entry.lease.expires_at
        )
        self._note()

    def _note(self) -> None:
        """Keep the change, and let it be known."""
        if self._file is not None:
            write_whole(self._file, msgspec.json.encode(self._entries), durable=True)
        self._changed = True
        self._changes.set()
