"""Who gets what: routes client frames to the core, and the core's progress to the connection that asked last.

Plain state without sockets, threads or a clock of its own, shared by the engine process and the scripted engine, so
that both mean the same by a repeated submit, an abort, a lost connection or a drain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from engine.wire import (
    Abort,
    AdapterQuery,
    AdapterReply,
    ClientFrame,
    Counters,
    Progress,
    Refused,
    Rested,
    RestQuery,
    Snapshot,
    SnapshotQuery,
    Step,
    Submit,
    Usage,
    UsageQuery,
    UsageReply,
    Welcome,
    encode,
)

log = logging.getLogger(__name__)


class Core(Protocol):
    """What an engine core offers to its process. One thread calls all of it."""

    @property
    def epoch(self) -> str:
        """Unique per engine process."""
        ...

    def submit(self, submit: Submit) -> Refused | None:
        """Queue a sequence, or say why not."""
        ...

    def abort(self, request_id: str) -> None:
        """End a live sequence; a coming step returns its last Progress."""
        ...

    def step(self) -> list[Progress]:
        """Run one step if there is work; return what there is to say."""
        ...

    def has_work(self) -> bool:
        """True when step() has something to do now."""
        ...

    def usage(self, request_ids: Sequence[str]) -> dict[str, Usage]:
        """Counters of the requests that are known, live or ended."""
        ...

    def adapter(self, query: AdapterQuery, answer: Callable[[AdapterReply], None]) -> None:
        """Load or unload an adapter; who uses it goes on. `answer` is called once, now or in a later step()."""
        ...

    def snapshot(self, query_id: int) -> Snapshot:
        """Queues and gauges."""
        ...

    def rest(self, asleep: bool) -> None:
        """Give back memory while there is no request, or take it again. ValueError where that cannot be."""
        ...


class Peer(Protocol):
    """One connection. Compared by identity."""

    def send(self, frame: bytes) -> None:
        """Write or buffer an encoded frame. Never raises and never blocks: a connection in trouble breaks itself."""
        ...


class Sessions:
    """Requests ↔ connections. Every live request has one owner, or none while its connection is lost.

    Each request is said to end exactly once to its owner. Not thread-safe: the thread that steps the core calls it all.
    """

    def __init__(
        self,
        core: Core,
        welcome: Welcome,
        *,
        clock: Callable[[], float],
        grace_s: float = 0.0,
        watch: AbstractContextManager[None] | None = None,
    ) -> None:
        """grace_s: how long requests of a lost connection run on, unless they are submitted again, before an abort.
        `watch` is entered around each step of the core."""
        self._core = core
        self._welcome = encode(welcome)
        self._clock = clock
        self._grace_s = grace_s
        self._owner: dict[str, Peer | None] = {}
        self._requests: dict[Peer, set[str]] = {}
        self._aborters: dict[str, list[Peer]] = {}
        self._orphans: dict[str, float] = {}
        self._step_due = False
        self._watch = watch or nullcontext()
        self.draining = False
        """While True, new requests are refused; those that run go on."""

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._owner)

    def has_work(self) -> bool:
        """True when step() should be called now."""
        return self._step_due or self._core.has_work()

    def next_deadline(self) -> float | None:
        """Clock time at which expire() has something to do."""
        return min(self._orphans.values(), default=None)

    def join(self, peer: Peer) -> None:
        """A connection has opened: greet it."""
        self._requests[peer] = set()
        peer.send(self._welcome)

    def leave(self, peer: Peer) -> None:
        """A connection is gone: its requests are aborted, now or after the grace."""
        for request_id in self._requests.pop(peer, ()):
            self._owner[request_id] = None
            if self._grace_s > 0:
                self._orphans[request_id] = self._clock() + self._grace_s
            else:
                self._abort(request_id)
        for aborters in self._aborters.values():
            if peer in aborters:
                aborters.remove(peer)

    def expire(self) -> None:
        """Abort the requests whose grace is over."""
        now = self._clock()
        for request_id in [r for r, deadline in self._orphans.items() if deadline <= now]:
            del self._orphans[request_id]
            self._abort(request_id)

    def abort_all(self) -> None:
        """Abort every live request (the end of a drain)."""
        for request_id in list(self._owner):
            self._abort(request_id)

    def receive(self, peer: Peer, frame: ClientFrame) -> None:
        """Act on a frame that a connection sent."""
        match frame:
            case Submit():
                self._submit(peer, frame)
            case Abort():
                self._abort_for(peer, frame.request_id)
            case UsageQuery():
                known = self._core.usage(frame.request_ids)
                peer.send(encode(UsageReply(frame.query_id, self._core.epoch, known)))
            case SnapshotQuery():
                peer.send(encode(self._core.snapshot(frame.query_id)))
            case AdapterQuery():
                self._core.adapter(frame, lambda reply: self._tell(peer, reply))
            case RestQuery():
                peer.send(encode(self._rest(frame)))

    def step(self) -> None:
        """Step the core once and send each connection its share as one frame."""
        self._step_due = False
        outgoing: dict[Peer, list[Progress]] = {}
        with self._watch:
            said = self._core.step()
        for progress in said:
            request_id = progress.request_id
            owner = self._owner.get(request_id)
            if owner is not None:
                outgoing.setdefault(owner, []).append(progress)
            if progress.finish_reason is not None:
                self._forget(request_id)
                for aborter in self._aborters.pop(request_id, ()):
                    if aborter is not owner:
                        outgoing.setdefault(aborter, []).append(_ending(progress))
        for peer, said in outgoing.items():
            peer.send(encode(Step(said)))

    def give_up(self, error: str) -> None:
        """Tell everybody that their requests have failed, of a process that ends now: the core, which may be in the
        midst of a step, is only read, and nothing is forgotten."""
        known = self._core.usage(list(self._owner))
        for peer, request_ids in self._requests.items():
            said = [
                Progress(
                    request_id=request_id,
                    counters=known[request_id].counters if request_id in known else Counters(),
                    finish_reason="error",
                    error=error,
                )
                for request_id in sorted(request_ids)
            ]
            if said:
                peer.send(encode(Step(said)))

    def _tell(self, peer: Peer, reply: AdapterReply) -> None:
        """Answer one who may have left meanwhile."""
        if peer in self._requests:
            peer.send(encode(reply))

    def _rest(self, query: RestQuery) -> Rested:
        began = self._clock()
        if query.asleep and self._owner:
            return Rested(query.query_id, False, error=f"{len(self._owner)} requests run or wait")
        try:
            self._core.rest(query.asleep)
        except (ValueError, RuntimeError) as error:  # of a device that has no room, too: the engine stays as it is
            return Rested(query.query_id, not query.asleep, error=str(error))
        return Rested(query.query_id, query.asleep, self._clock() - began)

    def _submit(self, peer: Peer, submit: Submit) -> None:
        request_id = submit.request_id
        if request_id in self._owner:
            self._own(peer, request_id)
            return
        ended = self._core.usage([request_id]).get(request_id)
        if ended is not None and ended.finish_reason is not None:
            said = Progress(request_id=request_id, counters=ended.counters, finish_reason=ended.finish_reason)
            peer.send(encode(Step([said])))
            return
        if self.draining:
            refused: Refused | None = Refused(request_id, "draining", "the engine is shutting down")
        else:
            try:
                refused = self._core.submit(submit)
            except ValueError as error:  # a value that the core cannot take is the sender's fault, not a reason to die
                refused = Refused(request_id, "invalid", str(error))
        if refused is not None:
            peer.send(encode(refused))
            return
        self._own(peer, request_id)

    def _own(self, peer: Peer, request_id: str) -> None:
        previous = self._owner.get(request_id)
        if previous is not None:
            self._requests[previous].discard(request_id)
        self._orphans.pop(request_id, None)
        self._owner[request_id] = peer
        self._requests[peer].add(request_id)

    def _forget(self, request_id: str) -> None:
        owner = self._owner.pop(request_id, None)
        if owner is not None:
            self._requests[owner].discard(request_id)
        self._orphans.pop(request_id, None)

    def _abort(self, request_id: str) -> None:
        self._core.abort(request_id)
        self._step_due = True  # a core with nothing else to do still has this end to tell

    def _abort_for(self, peer: Peer, request_id: str) -> None:
        if request_id in self._owner:
            self._aborters.setdefault(request_id, []).append(peer)
            self._abort(request_id)
            return
        ended = self._core.usage([request_id]).get(request_id)
        if ended is None:
            said = Progress(request_id=request_id, finish_reason="abort")
        else:
            said = Progress(
                request_id=request_id, counters=ended.counters, finish_reason=ended.finish_reason or "abort"
            )
        peer.send(encode(Step([said])))


def _ending(progress: Progress) -> Progress:
    """The end alone, for a connection that asked to abort a request whose output goes elsewhere."""
    return Progress(
        request_id=progress.request_id,
        counters=progress.counters,
        finish_reason=progress.finish_reason,
        error=progress.error,
    )
