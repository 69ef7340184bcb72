"""Replica: one engine process under supervision. Spawned, given its GPUs, watched, restarted with back-off, drained at
the end, and when its lease of the GPUs ends."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.detokenizer import HasVocabulary
from engine.generation import EngineError
from engine.process import EXIT_CANNOT_START
from engine.wire import Snapshot
from gateway.fleet.leases import Ending, LocalLeaseKeeper, Tenancy, Terms
from marketplace.agent.leases import LeaseError

log = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-m", "engine.worker")
LOG_LIMIT = 16 << 20
"""Bytes at which the engine's log is put aside (as NAME.1) before the next start."""


class State(enum.StrEnum):
    """What a replica can do for a request."""

    STARTING = "starting"
    """The process loads its model."""
    READY = "ready"
    """It answers."""
    LEAVING = "leaving"
    """Its lease ends: it finishes what runs, and takes nothing new."""
    DOWN = "down"
    """It has gone and will be started again after the back-off."""
    STOPPED = "stopped"
    """It was stopped, or cannot start; nothing will start it again but start()."""


class StartError(Exception):
    """The engine cannot start however often it is tried; the message is its own."""


class Child(Protocol):
    """A process, here or on another machine."""

    @property
    def pid(self) -> int:
        """Its id on its machine; 0 while that is not known."""
        ...

    @property
    def stdin(self) -> asyncio.StreamWriter | None:
        """What it reads, where somebody may write to it."""
        ...

    async def wait(self) -> int:
        """Its exit status, once it has ended; below 0 for a signal."""
        ...

    def send_signal(self, signal: int, /) -> None:
        """Raises ProcessLookupError when it has gone."""
        ...


class Backoff(msgspec.Struct, frozen=True):
    """Delay before a restart: first_s, doubling with each failure up to most_s; healthy_s of service start it over."""

    first_s: float = 1.0
    most_s: float = 30.0
    healthy_s: float = 60.0

    def delay(self, failures: int) -> float:
        """Seconds to wait after this many failures in a row, at least one."""
        return min(self.most_s, self.first_s * 2.0 ** min(failures - 1, 30))


class Patience(msgspec.Struct, frozen=True):
    """How long a replica waits for its process, in seconds."""

    start_s: float = 600.0
    """From the spawn to the greeting (a large model loads for minutes)."""
    probe_s: float = 5.0
    """Between two questions for the engine's gauges."""
    stall_s: float = 60.0
    """For an answer to one: an engine that is silent for longer hangs in a step, and is killed."""
    kill_s: float = 3.0
    """Between the end of a drain and SIGKILL."""
    margin_s: float = 1.0
    """Between SIGKILL and the moment at which an engine without a lease must be gone."""

    @staticmethod
    def of(config: EngineConfig) -> Patience:
        """As this engine needs it: its own watchdog, which can say what hangs, gets the time to."""
        return Patience(stall_s=max(60.0, 2 * config.step_timeout_s))


class Replica:
    """Keeps one engine process running and its client connected. Belongs to one event loop.

    `client` is one object for all restarts: while the engine is away it refuses with EngineError("engine_down").
    """

    _connect_s = math.inf
    """Longest that one attempt to connect may take."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        socket_path: Path,
        log_path: Path,
        tokenizer: HasVocabulary | None = None,
        command: Sequence[str] = ENGINE_COMMAND,
        drain_s: float = 30.0,
        terms: Terms | None = None,
        environment: Mapping[str, str] | None = None,
        backoff: Backoff | None = None,
        patience: Patience | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`command` gets --socket, --config, --drain-s and --parent appended; `terms` say who gives it its GPUs, by
        default it may use what is there; `environment` is added to this process's own. clock and sleep serve the
        back-off.
        """
        self.config = config
        self.socket_path = socket_path
        self.log_path = log_path
        self.client = EngineClient(socket_path, tokenizer)
        self.state = State.STOPPED
        self.last_error: str | None = None
        """Why the engine went away or did not start, last time it did."""
        self.restarts = 0
        """Times that the process was started again."""
        self.snapshot: Snapshot | None = None
        """The engine's gauges as of the last probe; None while it is not ready."""
        self.pid: int | None = None
        """The process that runs now."""
        self._command = tuple(command)
        self._drain_s = self._last_drain_s = drain_s
        self._environment = {**os.environ, **environment} if environment else None
        self._terms = terms or Terms(keeper=LocalLeaseKeeper())
        self._backoff = backoff or Backoff()
        self._patience = patience or Patience.of(config)
        self._clock = clock
        self._sleep = sleep
        self._on_state: list[Callable[[Replica], None]] = []
        self._changed = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._fault: str | None = None
        self._fatal: str | None = None
        self._began = False
        self._ready_at: float | None = None
        self._log_from = 0

    def on_state(self, callback: Callable[[Replica], None]) -> None:
        """Call back, in the event loop, after every change of `state`."""
        self._on_state.append(callback)

    def launch(self) -> None:
        """Start the process and its supervision, and return at once. Raises RuntimeError when it is running already."""
        if self._supervisor is not None and not self._supervisor.done():
            raise RuntimeError("the replica is running already")
        self._fatal = None
        self._become(State.STARTING)
        self._supervisor = asyncio.create_task(self._supervise(), name=f"replica {self.socket_path.name}")
        self._supervisor.add_done_callback(self._given_up)

    async def ready(self, *, once: bool = False) -> None:
        """Wait until the engine answers. Raises StartError when it never will: it refuses to start, or was stopped;
        `once`: when a start fails, though the next one may not."""
        while self.state not in (State.READY, State.STOPPED) and not (once and self.state is State.DOWN):
            await self._changed.wait()
        if self.state is not State.READY:
            raise StartError(self._fatal or (once and self.last_error) or "the engine was stopped")

    async def start(self) -> None:
        """launch() and wait until ready(). A bad configuration or model is a StartError, not endless restarts."""
        self.launch()
        await self.ready()

    async def stop(self, drain_s: float | None = None) -> None:
        """Let running requests finish within drain_s seconds (None: as configured), abort the rest, end the process."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            self._last_drain_s = self._drain_s if drain_s is None else drain_s
            supervisor.cancel()
            await asyncio.wait({supervisor})
        self._become(State.STOPPED)

    async def _supervise(self) -> None:
        """Run the process again and again. Being cancelled is the order to drain and end it."""
        failures, was_ready = 0, False
        while True:
            self._become(State.STARTING)
            status, served_s = await self._run()
            reason = self._fault or self._reason(status)
            if self._began or reason != self.last_error:  # who waits for a GPU for a day need not say so all day
                log.error("the engine is down: %s", reason)
            self.last_error = reason
            was_ready = was_ready or served_s > 0
            if not was_ready and (status == EXIT_CANNOT_START or self._fatal is not None):
                self._fatal = self.last_error
                self._become(State.STOPPED)
                return
            failures = 1 if served_s >= self._backoff.healthy_s else failures + 1
            self._become(State.DOWN)
            await self._sleep(self._backoff.delay(failures))
            self.restarts += int(self._began)

    def _given_up(self, supervisor: asyncio.Task[None]) -> None:
        """Nobody supervises any more: say so to those who wait, above all when it was not meant to happen."""
        error = None if supervisor.cancelled() else supervisor.exception()
        if error is not None:
            log.error("the engine cannot be supervised", exc_info=error)
            self.last_error = self._fatal = str(error)
            self._become(State.STOPPED)

    async def _run(self) -> tuple[int, float]:
        """One life of the process: spawn, serve, end. Returns its exit status and for how many seconds it served."""
        self._fault = self._fatal = self._ready_at = None
        self._began = False
        process = await self._spawn()
        exited = asyncio.create_task(process.wait())
        tenancy = Tenancy(self._terms)
        try:
            if await self._enter(process, tenancy):
                ending = await self._live(process, exited, tenancy)
                if ending is not None:
                    await self._leave(process, exited, ending, tenancy.seconds_left(ending))
            served_s = self._served_s()
        except asyncio.CancelledError:
            await self._drain(process, exited, self._last_drain_s)
            raise
        finally:
            await self._end(process, exited)
            await tenancy.end()
        return exited.result(), served_s

    def _served_s(self) -> float:
        return 0.0 if self._ready_at is None else max(self._clock() - self._ready_at, 1e-9)

    async def _enter(self, process: Child, tenancy: Tenancy) -> bool:
        """Lease the process its GPUs, and tell it where it waits for them. False where there are none."""
        try:
            lease = await tenancy.begin(process.pid)
        except LeaseError as error:
            self._fault = f"it has no GPU: {error}"
            return False
        self._began = True
        if process.stdin is not None:
            log.info("the engine has the GPUs %s, under the fence %d", ", ".join(lease.gpus), lease.fence)
            process.stdin.write(f"{','.join(lease.uuids)}\n".encode())
            with contextlib.suppress(ConnectionError):  # it has ended, which is noticed below
                await process.stdin.drain()
            process.stdin.close()
        return True

    async def _live(self, process: Child, exited: asyncio.Task[int], tenancy: Tenancy) -> Ending | None:
        """Return when the process has gone or is of no use, or its lease is to end: that, and until when."""
        life = asyncio.create_task(self._answer(process, exited))
        try:
            await asyncio.wait((life, tenancy.ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            life.cancel()
            await asyncio.wait({life})
        if life.cancelled():
            return tenancy.ending
        life.result()
        return None

    async def _answer(self, process: Child, exited: asyncio.Task[int]) -> None:
        await self._connect(exited, self._patience.start_s)
        if self.client.connected:
            self._ready_at = self._clock()
            await self._serve(process, exited)

    async def _leave(self, process: Child, exited: asyncio.Task[int], ending: Ending, left_s: float) -> None:
        """Finish what runs as far as there is time, and abort the rest: its clients and the ledger are told."""
        self._fault = self.last_error = ending.why
        log.warning("the engine has to go within %.1f s: %s", left_s, ending.why)
        self._become(State.LEAVING)
        patience = self._patience
        # Never none: of two signals that come at once, a process sees one.
        drain_s = max(0.1, left_s - patience.kill_s - patience.margin_s)
        await self._drain(process, exited, min(max(0.1, self._drain_s), drain_s))

    async def _spawn(self) -> Child:
        self.socket_path.unlink(missing_ok=True)
        output = self._open_log()
        # A session of its own, so that Ctrl-C at the terminal reaches the gateway alone, which drains the engine.
        spawning = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *self._terms.gated(
                    (
                        *self._command,
                        *("--socket", str(self.socket_path)),
                        *("--config", msgspec.json.encode(self.config).decode()),
                        *("--drain-s", str(self._drain_s)),
                        *("--parent", str(os.getpid())),
                    )
                ),
                stdin=asyncio.subprocess.PIPE if self._terms.gpus else asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=self._environment,
            )
        )
        try:
            process = await asyncio.shield(spawning)
        except asyncio.CancelledError:  # in the midst of a spawn, which would leave a process that nobody knows
            process = await spawning
            process.kill()
            await process.wait()
            raise
        finally:
            os.close(output)
        self.pid = process.pid
        return process

    def _open_log(self) -> int:
        """Open the log for appending, remember where this process's part begins, put a large one aside."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        if self.log_path.exists() and self.log_path.stat().st_size > LOG_LIMIT:
            self.log_path.rename(self.log_path.with_name(self.log_path.name + ".1"))
        descriptor = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._log_from = os.fstat(descriptor).st_size
        return descriptor

    async def _connect(self, exited: asyncio.Task[int], patience_s: float) -> None:
        """Return when the client is connected, or it is in vain: the process has gone, is not ours, takes too long."""
        deadline = time.monotonic() + patience_s
        while not exited.done():
            left = deadline - time.monotonic()
            if left <= 0:
                self._fault = f"it was not ready within {patience_s:g} s"
                return
            if self._listens():
                try:
                    await self.client.connect(timeout_s=min(left, self._connect_s))
                    return
                except EngineError as error:
                    if error.code in ("protocol", "denied"):
                        self._fault = self._fatal = error.message
                        return
            await asyncio.wait({exited}, timeout=0.02)

    def _listens(self) -> bool:
        """Whether the engine can be connected to."""
        return self.socket_path.exists()

    async def _serve(self, process: Child, exited: asyncio.Task[int]) -> None:
        """Return when the process has gone, or hangs. A connection lost while the process lives is opened again."""
        while self.client.connected and not exited.done():
            self._become(State.READY)
            lost = asyncio.create_task(self.client.wait_lost())
            probe = asyncio.create_task(self._probe())
            try:
                await asyncio.wait({exited, lost, probe}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                lost.cancel()
                probe.cancel()
                self.snapshot = None
            if self._fault is not None:
                # Its stacks, which the fault handler writes to the log, are the only witness of where it hangs.
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGABRT)
                await asyncio.wait({exited}, timeout=self._patience.kill_s)
                return
            await asyncio.wait({exited}, timeout=0.1)  # a dying process loses its connection a moment before it is gone
            if not exited.done():
                self._become(State.STARTING)
                await self.client.close()
                await self._connect(exited, self._patience.stall_s)

    async def _probe(self) -> None:
        """Ask for the gauges from time to time. Returns when an answer takes too long or nobody can give it."""
        patience = self._patience
        while True:
            try:
                async with asyncio.timeout(patience.stall_s):
                    self.snapshot = await self.client.snapshot()
            except TimeoutError:
                self._fault = f"it has not answered for {patience.stall_s:g} s"
                return
            except EngineError:
                return
            await asyncio.sleep(patience.probe_s)

    async def _drain(self, process: Child, exited: asyncio.Task[int], drain_s: float) -> None:
        """SIGTERM: finish what runs; at the end of the drain another one: abort the rest and say so."""
        for patience in (drain_s, self._patience.kill_s):
            if exited.done():
                return
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            await asyncio.wait({exited}, timeout=patience)

    async def _end(self, process: Child, exited: asyncio.Task[int]) -> None:
        """Leave nothing behind: neither the process and its children nor the connection."""
        await self._kill(process, exited)
        await exited
        self.pid = None
        await self.client.close()

    async def _kill(self, process: Child, exited: asyncio.Task[int]) -> None:
        if not exited.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _reason(self, status: int) -> str:
        """The process's own last `error:` line, or how it ended."""
        with self.log_path.open("rb") as file:
            file.seek(max(self._log_from, self.log_path.stat().st_size - 65536))
            lines = file.read().decode("utf-8", "replace").splitlines()
        errors = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
        if errors:
            return errors[-1]
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exit status {status}; its log is {self.log_path}"

    def _become(self, state: State) -> None:
        if state is self.state:
            return
        self.state = state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for callback in self._on_state:
            callback(self)
