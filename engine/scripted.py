"""A scripted engine: the engine's socket and frames with no model. Answers, delays and faults follow a script.

For tests of what happens when an engine is slow, refuses or dies, and for measuring a gateway by itself: a thousand
streams cost one timer and one frame per tick. Runs in a test's event loop (ScriptedEngine) or as `python -m
engine.scripted`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import cast

import msgspec

from engine.config import EngineConfig
from engine.process import EXIT_CANNOT_START, arguments, die_with_parent, listen, remove
from engine.script import Script, ScriptedCore
from engine.sessions import Sessions
from engine.wire import PROTOCOL, FrameReader, Welcome, WireError, decode_client

log = logging.getLogger("engine.scripted")

TIMER_S = 0.002
"""How late a timer of the event loop may come."""


class ScriptedEngine:
    """Serves a script on a Unix socket in the running event loop: `async with ScriptedEngine(path, script) as engine`.

    `engine.core.script` may be replaced at any time; new requests follow the new script.
    """

    def __init__(
        self,
        path: Path,
        script: Script | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        buffer_bytes: int = 16 << 20,
        grace_s: float = 0.0,
    ) -> None:
        self.path = path
        self._clock = clock
        self._grace_s = grace_s
        self._buffer_bytes = buffer_bytes
        self._first_script = script or Script()
        self._peers: set[_Peer] = set()
        self._server: asyncio.Server | None = None
        self._timer: asyncio.Handle | None = None
        self._inode = 0
        self._idle = asyncio.Event()
        self.core = ScriptedCore(self._first_script, clock)
        self.sessions: Sessions
        self.on_fault: Callable[[], None] = self.die
        """Called when the script's die_after_tokens is reached."""

    async def start(self) -> None:
        """Listen. Starting again after die() or stop() is a new process as far as clients can tell: a new epoch."""
        self.core = ScriptedCore(self.core.script, self._clock)
        self.sessions = Sessions(self.core, self._welcome(), clock=self._clock, grace_s=self._grace_s)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Peer(self), sock=listen(self.path))
        self._inode = self.path.stat().st_ino

    async def stop(self) -> None:
        """End all connections and remove the socket."""
        self.die()
        remove(self.path, self._inode)

    def die(self) -> None:
        """End as a killed process does: no last frames, and the stale socket stays."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._server is not None:
            self._server.close()
            self._server = None
        for peer in list(self._peers):
            peer.transport.abort()
        self._peers.clear()

    def stall(self) -> None:
        """Say nothing more, as an engine that hangs in a step; connections stay open."""
        self.core.stalled = True

    def resume(self) -> None:
        """Go on after a stall."""
        self.core.resume()
        for peer in self._peers:
            peer.catch_up()
        self.kick()

    async def drain(self, drain_s: float) -> None:
        """Refuse new requests, let the running ones end within drain_s seconds, abort the rest."""
        self.sessions.draining = True
        self.kick()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._idle.wait()
        self.sessions.abort_all()
        self.sessions.step()

    async def __aenter__(self) -> ScriptedEngine:
        """Start serving."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop serving."""
        await self.stop()

    def kick(self) -> None:
        """See to it that the next step runs when it is due."""
        if self._server is None or self.core.stalled:
            return
        if not self.sessions.live:
            self._idle.set()
        else:
            self._idle.clear()
        due = self.core.due_in()
        if self.sessions.has_work():
            due = 0.0
        deadline = self.sessions.next_deadline()
        if deadline is not None:
            due = min(max(0.0, deadline - self._clock()), float("inf") if due is None else due)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is None or any(peer.paused for peer in self._peers if self.core.script.interval_ms == 0):
            return
        loop = asyncio.get_running_loop()
        if due > 0 and self.core.script.tick_ms < 1:
            due = max(0.0, due - TIMER_S)  # finer than a timer: from here on it looks at the clock
        self._timer = loop.call_soon(self._step) if due == 0 else loop.call_later(due, self._step)

    def _step(self) -> None:
        self._timer = None
        self.sessions.expire()
        self.sessions.step()
        if self.core.must_die:
            self.on_fault()
        else:
            self.kick()

    def _welcome(self) -> Welcome:
        script = self.core.script
        return Welcome(
            protocol=PROTOCOL,
            epoch=self.core.epoch,
            model=script.model,
            max_context=script.max_context,
            vocab_size=script.vocab_size,
            kv_tokens=script.kv_tokens,
            pid=os.getpid(),
            dimensions=script.dimensions,
        )

    def joined(self, peer: _Peer) -> None:
        """A connection has opened."""
        self._peers.add(peer)
        self.sessions.join(peer)

    def left(self, peer: _Peer) -> None:
        """A connection is gone."""
        self._peers.discard(peer)
        self.sessions.leave(peer)
        self.kick()

    @property
    def buffer_bytes(self) -> int:
        """Unread output at which a connection is dropped."""
        return self._buffer_bytes


class _Peer(asyncio.Protocol):
    """One connection of the scripted engine."""

    transport: asyncio.Transport

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self._reader = FrameReader()
        self._unheard: list[bytes] = []
        self.paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports are none by inheritance
        self._engine.joined(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.left(self)

    def data_received(self, data: bytes) -> None:
        if self._engine.core.stalled:
            self._unheard.append(data)
            return
        try:
            for body in self._reader.feed(data):
                self._engine.sessions.receive(self, decode_client(body))
        except WireError as error:
            log.warning("dropped a connection: %s", error)
            self.transport.abort()
        self._engine.kick()

    def catch_up(self) -> None:
        """Read what arrived during a stall."""
        unheard, self._unheard = b"".join(self._unheard), []
        if unheard:
            self.data_received(unheard)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self._engine.kick()

    def send(self, frame: bytes) -> None:
        """Write a frame; drop the connection when the client leaves too much unread."""
        self.transport.write(frame)
        if self.transport.get_write_buffer_size() > self._engine.buffer_bytes:
            log.warning("dropped a connection: it has not read %d bytes", self.transport.get_write_buffer_size())
            self.transport.abort()


async def serve(path: Path, script: Script, *, drain_s: float, grace_s: float, buffer_bytes: int) -> None:
    """Serve the script until SIGTERM or SIGINT; drain; return. The script's death is a SIGKILL of this process."""
    await asyncio.sleep(script.start_ms / 1000)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with ScriptedEngine(path, script, grace_s=grace_s, buffer_bytes=buffer_bytes) as engine:
        engine.on_fault = lambda: os.kill(os.getpid(), signal.SIGKILL)
        log.info("ready")
        await stop.wait()
        stop.clear()
        drain = asyncio.create_task(engine.drain(drain_s))
        hurry = asyncio.create_task(stop.wait())
        await asyncio.wait({drain, hurry}, return_when=asyncio.FIRST_COMPLETED)
        if not drain.done():
            drain.cancel()
            await engine.drain(0.0)
        hurry.cancel()
        await asyncio.sleep(0.02)  # the transports' buffers empty into the sockets


def main(argv: Sequence[str] | None = None) -> int:
    """Run a scripted engine process; return its exit status. It takes the options of engine.worker and `--script`."""
    parser = arguments("Headrace scripted engine: the engine's protocol without a model")
    parser.add_argument("--script", default="{}", help="Script as JSON")
    options = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    die_with_parent(options.parent)
    try:
        script = msgspec.json.decode(options.script, type=Script)
        config = msgspec.json.decode(options.config, type=EngineConfig)
        if config.served_name:
            script = msgspec.structs.replace(script, model=config.served_name)
        if script.fail_start:
            raise ValueError(script.fail_start)
        asyncio.run(
            serve(
                options.socket,
                script,
                drain_s=options.drain_s,
                grace_s=options.grace_s,
                buffer_bytes=int(options.buffer_mib * 2**20),
            )
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_CANNOT_START
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
