"""The replicas of one model as one: started and stopped together; each request is given a seat at one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

from engine.client import EngineClient
from engine.generation import EngineError, GenerateRequest
from engine.wire import Counters, Snapshot, Usage, UsageReply
from gateway.fleet.replicas import Replica, State
from gateway.fleet.router import Gauges, Router, Routing, Sent, prefix_of

SNAPSHOT_S = 1.0
"""How long replicas have to answer a scrape."""


class Seat:
    """A request's place at one replica, from being sent until it is over."""

    __slots__ = ("_pool", "_sent", "client", "epoch", "replica")

    def __init__(self, pool: Pool, replica: int, client: EngineClient, sent: Sent | None) -> None:
        self.replica = replica
        self.client = client
        self.epoch = "" if client.welcome is None else client.welcome.epoch
        """Of the engine process that was asked."""
        self._pool = pool
        self._sent = sent

    def began(self, cached_tokens: int) -> None:
        """The first token is there; so much of the prompt was cached."""
        if self._sent is not None:
            self._pool.router.began(self._sent, cached_tokens)

    def leave(self) -> None:
        """The request is over at this replica, however it ended. A second call changes nothing."""
        if self._sent is not None:
            self._pool.router.ended(self._sent)


class Pool:
    """The replicas of one model. Belongs to one event loop."""

    def __init__(
        self, replicas: Sequence[Replica], *, places: int = 1, page_size: int = 16, routing: Routing = "prefix"
    ) -> None:
        """At least one replica; each runs `places` sequences at once."""
        self.replicas = tuple(replicas)
        self.router = Router(len(self.replicas), places, page_size=page_size, routing=routing)
        self._epochs = [""] * len(self.replicas)
        self._seen: list[Snapshot | None] = [None] * len(self.replicas)
        self._on_state: list[Callable[[Pool], None]] = []
        for replica in self.replicas:
            replica.on_state(self._changed)

    # -- the processes --------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start every replica, and return at once."""
        for replica in self.replicas:
            replica.launch()

    async def ready(self, *, once: bool = False) -> None:
        """Wait until every replica answers. StartError where one never will; `once`: where a start fails."""
        await asyncio.gather(*(replica.ready(once=once) for replica in self.replicas))

    async def stop(self, drain_s: float | None = None) -> None:
        """Drain and end every replica."""
        await asyncio.gather(*(replica.stop(drain_s) for replica in self.replicas))

    def on_state(self, callback: Callable[[Pool], None]) -> None:
        """Call back, in the event loop, after every change of a replica's state."""
        self._on_state.append(callback)

    @property
    def state(self) -> State:
        """That of the replica that is best off."""
        order = (State.READY, State.STARTING, State.LEAVING, State.DOWN, State.STOPPED)
        return min((replica.state for replica in self.replicas), key=order.index)

    @property
    def last_error(self) -> str | None:
        """Why a replica that does not serve went away or did not start."""
        return next((r.last_error for r in self.replicas if r.state is not State.READY and r.last_error), None)

    @property
    def restarts(self) -> int:
        """Times that a process was started again."""
        return sum(replica.restarts for replica in self.replicas)

    @property
    def epoch(self) -> str:
        """Changes with every new process among those that serve; empty until all have served."""
        epochs = [replica.client.welcome.epoch for replica in self.replicas if replica.client.welcome is not None]
        return "+".join(epochs) if len(epochs) == len(self.replicas) else ""

    @property
    def ready_replicas(self) -> int:
        """How many serve now."""
        return sum(replica.state is State.READY for replica in self.replicas)

    # -- requests -------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """True while a replica answers."""
        return self.client.connected

    @property
    def client(self) -> EngineClient:
        """The connection to a replica that answers, for questions that any can answer; to the first where none does."""
        for replica in self.replicas:
            if replica.client.connected:
                return replica.client
        return self.replicas[0].client

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer together at every replica; 0 while none has said so."""
        told = [replica.client.welcome.max_context for replica in self.replicas if replica.client.welcome is not None]
        return min(told, default=0)

    def place(self, request: GenerateRequest, avoid: Collection[int] = ()) -> Seat:
        """Choose the replica for a request, not one of `avoid`. EngineError where there is none to choose from."""
        among = [
            index
            for index, replica in enumerate(self.replicas)
            if replica.client.connected and index not in avoid and replica.state is not State.LEAVING
        ]
        if not among:
            raise EngineError("engine_down", "the engine is not running")
        if len(self.replicas) == 1:
            return Seat(self, 0, self.replicas[0].client, None)
        for index in among:
            self._look(index)
        prefix = prefix_of(request.prompt_ids, request.salt, self.router.page_size)
        chosen = self.router.choose(prefix, among)
        return Seat(self, chosen, self.replicas[chosen].client, self.router.send(chosen, prefix, request.n))

    def _look(self, index: int) -> None:
        """Take what the replica has said of itself since the last look."""
        replica = self.replicas[index]
        welcome = replica.client.welcome
        assert welcome is not None, "it was connected once"
        if welcome.epoch != self._epochs[index]:
            self._epochs[index] = welcome.epoch
            self.router.joined(index, welcome.kv_tokens)
        seen = replica.snapshot
        if seen is not None and seen is not self._seen[index]:
            self._seen[index] = seen
            pages = seen.kv_pages_used + seen.kv_pages_cached
            self.router.observe(
                index, Gauges(seen.running + seen.waiting, seen.queued_tokens, pages * self.router.page_size)
            )

    def _changed(self, replica: Replica) -> None:
        if replica.state is State.DOWN:
            index = self.replicas.index(replica)
            self._epochs[index] = ""
            self.router.lost(index)
        for callback in self._on_state:
            callback(self)

    # -- questions ------------------------------------------------------------------------------------

    async def usage(self, request_ids: Sequence[str]) -> UsageReply | None:
        """What the replicas remember of requests; None unless all of them answer."""
        if not all(replica.client.connected for replica in self.replicas):
            return None
        replies = await asyncio.gather(*(replica.client.usage(request_ids) for replica in self.replicas))
        known: dict[str, Usage] = {}
        for reply in replies:
            for request_id, usage in reply.known.items():
                known[request_id] = _further(known.get(request_id), usage)
        return UsageReply(0, "+".join(reply.epoch for reply in replies), known)

    async def abort(self, request_id: str) -> None:
        """End a sequence, at whichever replica it is."""
        waits = [replica.client.abort(request_id) for replica in self.replicas if replica.client.connected]
        await asyncio.gather(*waits)

    async def snapshot(self) -> Snapshot | None:
        """Queues and gauges of the replicas that answer in time, added up; None where none does."""
        asked = [r.client for r in self.replicas if r.client.connected]
        replies = await asyncio.gather(*(_ask(client) for client in asked))
        told = [reply for reply in replies if reply is not None]
        return _sum(told) if told else None


async def _ask(client: EngineClient) -> Snapshot | None:
    try:
        async with asyncio.timeout(SNAPSHOT_S):
            return await client.snapshot()
    except (EngineError, TimeoutError):
        return None


_LARGEST = ("last_step_ms", "wait_ms")


def _sum(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Counts add up; of durations the longest is told."""
    if len(snapshots) == 1:
        return snapshots[0]
    columns = {name: [getattr(s, name) for s in snapshots] for name in Snapshot.__struct_fields__}
    total: dict[str, Any] = {
        name: max(values) if name in _LARGEST else sum(values)
        for name, values in columns.items()
        if name not in ("query_id", "epoch")
    }
    return Snapshot(query_id=0, epoch="+".join(columns["epoch"]), **total)


def _further(known: Usage | None, other: Usage) -> Usage:
    """Of two replicas that know a request, because it was sent again, the one that runs it or went further."""

    def progress(usage: Usage) -> tuple[bool, int, bool]:
        counters: Counters = usage.counters
        return usage.finish_reason is None, counters.completion, counters.started

    return other if known is None or progress(other) > progress(known) else known
