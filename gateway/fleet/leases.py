"""The GPUs that an engine may use: leased from this node's agent, or from a keeper of our own where there is no agent.

An engine's process exists before its lease does, because the agent knows a lease by the process that it kills when the
lease is outlived. Until then the process is a shell at a gate: it reads the names of its GPUs and becomes the engine,
or ends when the gateway does. So no context is ever made on a device without a lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec

from marketplace.agent.lease_door import AgentAwayError
from marketplace.agent.leases import Lease, LeaseError, Wanted

log = logging.getLogger(__name__)

RENEW_S = 10.0
"""Between two renewals of a lease."""
RETRY_S = 1.0
"""Before an agent that did not answer is asked again."""
LAST_S = 10.0
"""Before a lease ends that cannot be renewed: an engine is told to finish then."""
NEVER = 2**63 - 1
"""End of a lease that needs no renewal."""
_SECOND = 1_000_000
_GATE = 'IFS= read -r CUDA_VISIBLE_DEVICES && export CUDA_VISIBLE_DEVICES && exec "$@" </dev/null'


def wall_us() -> int:
    """Microseconds since 1970, UTC: the agent's clock, because it is the same machine's."""
    return time.time_ns() // 1000


class LeaseKeeper(Protocol):
    """Who says which GPUs an engine may use: LeaseClient of the node's agent, or LocalLeaseKeeper."""

    async def acquire(self, wanted: Wanted) -> Lease:
        """Lease GPUs to a process. LeaseError where they are not to be had, AgentAwayError where nobody answers."""
        ...

    async def renew(self, lease: Lease) -> Lease:
        """Hold on to it. LeaseError for one that has ended, or whose fence is an older one."""
        ...

    async def watch(self, lease: Lease) -> Lease:
        """Return when the lease is to end (`revoke_at`), or after a while as it is. LeaseError."""
        ...

    async def release(self, lease: Lease) -> None:
        """Give it back: nothing of the process uses its GPUs any more. LeaseError."""
        ...

    async def close(self) -> None:
        """Let go of the connection, if there is one."""
        ...


class LocalLeaseKeeper:
    """Stands in for the agent on a machine without one: whatever devices there are may be used, until `revoke`."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._fence = 0
        self._changed = asyncio.Event()

    async def acquire(self, wanted: Wanted) -> Lease:
        """Grant it, without a limit of time; it names no GPUs, and so hides none."""
        self._fence += 1
        lease = Lease(id=f"local-{self._fence}", state="Held", fence=self._fence, expires_at=NEVER)
        self._leases[lease.id] = lease
        return lease

    async def renew(self, lease: Lease) -> Lease:
        """The lease as it is. LeaseError."""
        held = self._leases.get(lease.id)
        if held is None:
            raise LeaseError(404, "there is no such lease, or it has ended")
        if held.fence != lease.fence:
            raise LeaseError(409, "the fence is not that of this lease")
        return held

    async def watch(self, lease: Lease) -> Lease:
        """Return when it is revoked. LeaseError when it is given back."""
        while (held := await self.renew(lease)).revoke_at is None:
            await self._changed.wait()
        return held

    async def release(self, lease: Lease) -> None:
        """Forget it."""
        self._leases.pop(lease.id, None)
        self._change()

    async def close(self) -> None:
        """Nothing is open."""

    def revoke(self, by: int) -> None:
        """Have every engine end by that moment, in µs."""
        self._leases = {
            id: msgspec.structs.replace(lease, revoke_at=by) for id, lease in self._leases.items()
        }  # a later word replaces an earlier one
        self._change()

    def _change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """Under which terms an engine gets its GPUs."""

    keeper: LeaseKeeper
    gpus: int = 0
    """How many; 0 begins at once, on what there is, and tells the process nothing."""
    holder: str = "engine"
    """What the operator of the node knows the engine by."""
    preemptible: bool = True
    """Whether a rental may take the GPUs."""
    notice_s: int = 30
    """Seconds that the engine needs to leave."""
    renew_s: float = RENEW_S
    now: Callable[[], int] = wall_us
    """The agent's clock."""

    def gated(self, command: Sequence[str]) -> tuple[str, ...]:
        """The command, waiting at the gate where it needs a lease of GPUs."""
        return ("/bin/sh", "-c", _GATE, "engine", *command) if self.gpus else tuple(command)


class Ending(msgspec.Struct, frozen=True):
    """The engine has to go."""

    by: int
    """The moment, in µs, at which it must be gone."""
    why: str


class Tenancy:
    """One engine process on its leased GPUs, from the request until they are given back."""

    def __init__(self, terms: Terms) -> None:
        """Nothing is asked for yet."""
        self._terms = terms
        self._now = terms.now
        self._lease: Lease | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.ending: Ending | None = None
        """Why and when the lease ends, once it is known."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done as soon as it is."""

    async def begin(self, pid: int) -> Lease:
        """Lease the GPUs to a process. LeaseError, whose message says why there are none."""
        terms = self._terms
        lease = self._lease = await terms.keeper.acquire(
            Wanted(
                holder=terms.holder,
                pid=pid,
                count=terms.gpus,
                preemptible=terms.preemptible,
                notice_s=terms.notice_s,
            )
        )
        if not all(lease.uuids):
            raise LeaseError(502, f"the node's agent does not know the names of {', '.join(lease.gpus)}")
        self._start(self._watch(lease))
        if lease.expires_at != NEVER:
            self._start(self._renew(lease))
        return lease

    async def end(self) -> None:
        """Give the lease back: the process is gone."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.ended.cancel()
        if self._lease is not None:
            with contextlib.suppress(LeaseError):  # an agent sees by itself that the process is gone
                await self._terms.keeper.release(self._lease)

    def seconds_left(self, ending: Ending) -> float:
        """Seconds until the engine must be gone."""
        return max(0.0, (ending.by - self._now()) / _SECOND)

    async def _renew(self, lease: Lease) -> None:
        """Hold on until told otherwise; also while the engine finishes."""
        pause = self._terms.renew_s
        while True:
            await asyncio.sleep(pause)
            try:
                lease = await self._terms.keeper.renew(lease)
            except AgentAwayError as error:
                pause = min(RETRY_S, self._terms.renew_s)
                if self._now() >= lease.expires_at - LAST_S * _SECOND:
                    self._ends(lease.expires_at, f"the lease of its GPUs cannot be renewed: {error}")
            except LeaseError as error:
                self._ends(self._now(), f"the lease of its GPUs has ended: {error}")
                return
            else:
                pause = self._terms.renew_s
                self._look(lease)

    async def _watch(self, lease: Lease) -> None:
        while self.ending is None:
            try:
                self._look(await self._terms.keeper.watch(lease))
            except AgentAwayError:  # renewing notices, too, and minds the time
                await asyncio.sleep(RETRY_S)
            except LeaseError as error:
                self._ends(self._now(), f"the lease of its GPUs has ended: {error}")

    def _look(self, lease: Lease) -> None:
        if lease.revoke_at is not None:
            self._ends(lease.revoke_at, "its GPUs are wanted for a rental")

    def _ends(self, by: int, why: str) -> None:
        if self.ending is None:
            self.ending = Ending(by, why)
            self.ended.set_result(None)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work, name="lease"))
