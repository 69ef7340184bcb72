"""The engine process: loads the model, serves its Unix socket or a TCP port or both, steps the core.

One thread does it all, in this order, for as long as it lives: read what has arrived, step the core once, write each
connection's share of the step. Reading and writing cost microseconds beside a step, new tokens leave in the moment in
which they are known, and nothing is shared that would need a lock. When there is no work it sleeps in the selector.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from engine.config import EngineConfig
from engine.network import (
    MOST_STRANGERS,
    STRANGER_S,
    DeniedError,
    Gate,
    denied,
    listen_at,
    new_nonce,
    read_address,
    read_secret,
    shown,
    tune,
)
from engine.process import (
    EXIT_CANNOT_START,
    EXIT_STUCK,
    LISTENING,
    arguments,
    die_with_parent,
    listen,
    orphaned,
    remove,
)
from engine.sessions import Core, Sessions
from engine.watchdog import InFlight, Watchdog
from engine.weights.errors import WeightsError
from engine.wire import PROTOCOL, FrameReader, Welcome, WireError, decode_client

log = logging.getLogger("engine.worker")

READ_BYTES = 1 << 18
PARENT_CHECK_S = 2.0
LAST_WORDS_S = 1.0
"""After a drain, how long connections have to take the last frames."""


class LoadedCore(Core, Protocol):
    """A core with what the greeting tells about it."""

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer together."""
        ...

    @property
    def kv_tokens(self) -> int:
        """Capacity of the KV cache in tokens."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def dimensions(self) -> int:
        """Numbers of a vector of an embedding model, 0 for a model that generates."""
        ...

    def in_flight(self) -> list[InFlight]:
        """What is being computed; asked from another thread, when a step does not end."""
        ...


Load = Callable[[EngineConfig], LoadedCore]


class Connection:
    """One client: a non-blocking socket, its partial frame, and the output that it has not taken yet."""

    def __init__(self, sock: socket.socket, buffer_bytes: int, gate: Gate | None = None) -> None:
        self.sock = sock
        self.gate = gate
        """What it has to pass before it is a client."""
        self.reader = FrameReader()
        self.broken: str | None = None
        """Why the connection has to be dropped."""
        self.writing = False
        """True while the selector watches for room to write."""
        self._unsent = bytearray()
        self._limit = buffer_bytes

    @property
    def unsent(self) -> int:
        """Bytes of output that wait for the client to read."""
        return len(self._unsent)

    def send(self, frame: bytes) -> None:
        """Write the frame at once as far as the socket takes it; keep the rest, up to the limit."""
        if self.broken is not None:
            return
        self._unsent += frame
        if len(self._unsent) == len(frame):  # nothing was waiting before
            self.flush()
        if len(self._unsent) > self._limit:
            self.broken = f"it has not read {len(self._unsent)} bytes"

    def finish(self, patience_s: float) -> None:
        """Write what waits, all of it, within the patience; the connection is of no use afterwards."""
        self.sock.settimeout(patience_s)
        with contextlib.suppress(OSError):
            self.sock.sendall(self._unsent)

    def flush(self) -> None:
        """Write what waits, as far as the socket takes it."""
        try:
            sent = self.sock.send(self._unsent)
        except BlockingIOError:
            return
        except OSError as error:
            self.broken = str(error)
            return
        del self._unsent[:sent]


Listener = tuple[socket.socket, bytes | None]
"""A socket that listens, and the secret of those who may connect to it: None where its file says who may."""


class Server:
    """The loop of the engine process. run() returns when a drain has ended or the parent is gone."""

    def __init__(
        self,
        listeners: Sequence[Listener],
        sessions: Sessions,
        *,
        drain_s: float,
        buffer_bytes: int,
        parent: int,
        stranger_s: float = STRANGER_S,
    ) -> None:
        self._listeners = listeners
        self._stranger_s = stranger_s
        self._strangers: dict[Connection, float] = {}
        """Connections that have not proved themselves yet, the oldest first, and until when they may."""
        self._sessions = sessions
        self._drain_s = drain_s
        self._buffer_bytes = buffer_bytes
        self._parent = parent
        self._connections: set[Connection] = set()
        self._drain_until: float | None = None
        self._selector = selectors.DefaultSelector()
        self._signals, self._signalled = socket.socketpair()
        for sock in (self._signals, self._signalled):
            sock.setblocking(False)

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT has drained the engine (a second one ends the drain), or the parent is gone."""
        for listener, secret in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener, secret))
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signal)
        # The handlers do nothing: the byte that the interpreter writes for each signal wakes the selector.
        signal.set_wakeup_fd(self._signalled.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        next_check = 0.0
        while not self._drained():
            self._poll(self._patience())
            self._sessions.expire()
            if self._sessions.has_work():
                self._sessions.step()
                self._settle()
            if time.monotonic() >= next_check:
                if orphaned(self._parent):
                    log.warning("the parent process is gone; exiting")
                    return
                next_check = time.monotonic() + PARENT_CHECK_S
        self._last_words()

    def give_up(self, error: str) -> None:
        """Tell all clients that their requests have failed, from another thread than run()'s, which hangs in a step."""
        self._sessions.give_up(error)
        for connection in self._connections:
            connection.finish(LAST_WORDS_S)

    def _patience(self) -> float:
        """Seconds to sleep in the selector at most."""
        if self._sessions.has_work():
            return 0.0
        stranger = next(iter(self._strangers.values()), None)
        deadlines = [d for d in (self._sessions.next_deadline(), self._drain_until, stranger) if d is not None]
        return min([PARENT_CHECK_S, *(max(0.0, d - time.monotonic()) for d in deadlines)])

    def _poll(self, timeout: float) -> None:
        for key, mask in self._selector.select(timeout):
            if isinstance(key.data, Connection):
                if mask & selectors.EVENT_WRITE:
                    key.data.flush()
                if mask & selectors.EVENT_READ:
                    self._read(key.data)
            else:
                key.data()
        if self._strangers:
            self._dismiss(time.monotonic())
        self._settle()

    def _accept(self, listener: socket.socket, secret: bytes | None) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:  # the client gave up first, or descriptors ran out; neither may stop the engine
            log.warning("could not accept a connection: %s", error)
            return
        sock.setblocking(False)
        connection = Connection(sock, self._buffer_bytes, None if secret is None else Gate(secret, new_nonce()))
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        if connection.gate is None:
            self._sessions.join(connection)
            return
        try:
            tune(sock)
        except OSError as error:  # it has gone already
            connection.broken = str(error)
        self._strangers[connection] = time.monotonic() + self._stranger_s
        if len(self._strangers) > MOST_STRANGERS:
            next(iter(self._strangers)).broken = "too many that have not proved themselves"
        connection.send(connection.gate.challenge)

    def _dismiss(self, now: float) -> None:
        """End connections that do not prove themselves in time."""
        for connection, deadline in self._strangers.items():
            if deadline <= now and connection.broken is None:
                connection.broken = f"it has not proved itself within {self._stranger_s:g} s"

    def _let_in(self, connection: Connection, gate: Gate, data: bytes) -> None:
        """A stranger has said something: it is a client from now on, or it is dropped."""
        try:
            answer = gate.feed(data)
        except DeniedError as error:
            connection.send(denied(str(error)))
            connection.broken = str(error)
            return
        if answer is not None:
            connection.gate = None
            del self._strangers[connection]
            connection.send(answer)
            self._sessions.join(connection)

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.sock.recv(READ_BYTES)
            if not data:
                connection.broken = "closed"
            if connection.gate is not None:
                self._let_in(connection, connection.gate, data)
                return
            for body in connection.reader.feed(data):
                self._sessions.receive(connection, decode_client(body))
        except BlockingIOError:
            return
        except (OSError, WireError) as error:
            connection.broken = str(error)

    def _settle(self) -> None:
        """Drop broken connections; watch for room to write exactly where output waits."""
        for connection in [c for c in self._connections if c.broken is not None or c.writing != bool(c.unsent)]:
            if connection.broken is not None:
                if connection.broken != "closed":
                    log.warning("dropped a connection: %s", connection.broken)
                self._selector.unregister(connection.sock)
                connection.sock.close()
                self._connections.discard(connection)
                self._strangers.pop(connection, None)
                self._sessions.leave(connection)
                continue
            connection.writing = bool(connection.unsent)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.writing else 0)
            self._selector.modify(connection.sock, events, connection)

    def _on_signal(self) -> None:
        for _ in self._signals.recv(64):
            if self._drain_until is None:
                log.info("draining %d requests, for at most %g s", self._sessions.live, self._drain_s)
                self._sessions.draining = True
                self._drain_until = time.monotonic() + self._drain_s
            else:
                self._drain_until = time.monotonic()

    def _drained(self) -> bool:
        if self._drain_until is None:
            return False
        if self._sessions.live and time.monotonic() >= self._drain_until:
            log.warning("the drain is over; aborting %d requests", self._sessions.live)
            self._sessions.abort_all()
            while self._sessions.has_work() and self._sessions.live:
                self._sessions.step()
            return True
        return not self._sessions.live

    def _last_words(self) -> None:
        """Let connections take what was written for them before the process ends."""
        until = time.monotonic() + LAST_WORDS_S
        self._settle()
        while any(c.unsent for c in self._connections) and time.monotonic() < until:
            self._poll(0.05)


def load_core(config: EngineConfig) -> LoadedCore:
    """Load the model. Imported here so that this module, and its start-up errors, do not wait for torch."""
    from engine.core import EngineCore
    from engine.rest import RestingCore

    return RestingCore(EngineCore.load(config))


def main(argv: Sequence[str] | None = None, load: Load = load_core) -> int:
    """Run the engine process; return its exit status. A start that cannot succeed is one line, `error: …`, status 3."""
    parser = arguments("Headrace engine process", network=True)
    options = parser.parse_args(argv)
    if options.socket is None and options.listen is None:
        parser.error("give --socket, --listen or both")
    faulthandler.enable()
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s.%(msecs)03d %(name)s %(message)s", datefmt="%H:%M:%S"
    )
    parent = die_with_parent(options.parent)
    started = time.monotonic()
    try:
        config = msgspec.json.decode(options.config, type=EngineConfig)
        secret = b"" if options.listen is None else read_secret(os.environ)
        address = None if options.listen is None else read_address(options.listen)
        log.info("loading %s", config.model)
        core = load(config)
        log.info("loaded in %.2f s", time.monotonic() - started)
        # What is loaded stays: without it, each full collection would walk all of the model's objects during a step.
        gc.collect()
        gc.freeze()
        listeners: list[Listener] = []
        if address is not None:
            listeners.append((listen_at(*address), secret))
        if options.socket is not None:
            listeners.append((listen(options.socket), None))
    except (WeightsError, ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return EXIT_CANNOT_START
    except Exception as error:  # the edge of the process: whatever it is, the log's last line says so in one line
        log.exception("loading failed")
        print(f"error: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 1
    return _serve(options, core, config, listeners, parent, started)


def _serve(
    options: argparse.Namespace,
    core: LoadedCore,
    config: EngineConfig,
    listeners: Sequence[Listener],
    parent: int,
    started: float,
) -> int:
    path: Path | None = options.socket
    inode = path.stat().st_ino if path is not None else 0
    welcome = Welcome(
        protocol=PROTOCOL,
        epoch=core.epoch,
        model=config.served_name or config.model,
        max_context=core.max_context,
        vocab_size=core.vocab_size,
        kv_tokens=core.kv_tokens,
        pid=os.getpid(),
        dimensions=core.dimensions,
    )

    def stuck(seconds: float) -> None:
        """A step does not end: say so, with what it computes and where it hangs, fail its requests, end the process."""
        try:
            error = f"a step has not ended for {seconds:g} s"
            batch = [part._asdict() for part in core.in_flight()]
            log.error("stuck %s", msgspec.json.encode({"seconds": seconds, "in_flight": batch}).decode())
            faulthandler.dump_traceback(all_threads=True)
            print(f"error: {error}", file=sys.stderr, flush=True)
            server.give_up(f"{error}; the engine starts again")
            if path is not None:
                remove(path, inode)
        finally:
            os._exit(EXIT_STUCK)  # no clean end is possible beside a thread that hangs

    watchdog = Watchdog(config.step_timeout_s, stuck, last_resort=True)
    sessions = Sessions(core, welcome, clock=time.monotonic, grace_s=options.grace_s, watch=watchdog)
    server = Server(
        listeners,
        sessions,
        drain_s=options.drain_s,
        buffer_bytes=int(options.buffer_mib * 2**20),
        parent=parent,
        stranger_s=options.stranger_s,
    )
    for listener, secret in listeners:
        if secret is not None:
            print(f"{LISTENING}{shown(*listener.getsockname()[:2])}", flush=True)
    log.info(
        "ready in %.2f s: context %d, KV cache %d tokens", time.monotonic() - started, core.max_context, core.kv_tokens
    )
    try:
        watchdog.start()
        server.run()
    except Exception as error:  # the edge of the process: clients see the connection end, the log says why
        log.exception("the engine failed")
        print(f"error: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 1
    finally:
        watchdog.stop()
        if path is not None:
            remove(path, inode)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
