"""An engine process on another machine, as seen by who lives there beside it: started, listened to, signalled."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple

from engine.network import SECRET_VARIABLE, shown
from engine.process import EXIT_CANNOT_START, LISTENING

LOG_KEPT = 1 << 20
"""Characters of what a process says that wait to be asked for; older ones are forgotten."""


class Order(NamedTuple):
    """What to run, wherever it is run."""

    command: Sequence[str]
    """Of the engine; empty is the built-in one of that machine."""
    config: str
    """EngineConfig as JSON."""
    drain_s: float
    secret: str
    """Of those who may connect to it."""

    def __repr__(self) -> str:
        """Without the secret."""
        return f"Order({shlex.join(self.command)} {self.config})"


class Report(NamedTuple):
    """An engine process at one moment."""

    pid: int
    said: str = ""
    """What it wrote since the last report."""
    address: str = ""
    """Where it listens; empty before it is ready."""
    status: int | None = None
    """How it ended; None while it runs."""


class EngineHost:
    """One engine process on this machine. It ends with the thread that started it, which is the one that calls this."""

    def __init__(self, order: Order, host: str) -> None:
        """The engine will listen at a free port of `host`. Nothing is started."""
        self._order = order
        self._host = host
        self._process: subprocess.Popen[bytes] | None = None
        self._readers: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._said = ""
        self._address = ""

    def start(self) -> Report:
        """Start it. A command that cannot be run is reported as an engine that does not start."""
        order = self._order
        command = (
            *(order.command or (sys.executable, "-m", "engine.worker")),
            *("--listen", shown(self._host, 0)),
            *("--config", order.config),
            *("--drain-s", str(order.drain_s)),
            *("--parent", str(os.getpid())),
        )
        try:
            process = self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env=environment_of(order, os.environ),
            )
        except OSError as error:
            return Report(0, f"error: {error}\n", status=EXIT_CANNOT_START)
        for stream in (process.stdout, process.stderr):
            assert stream is not None, "both are pipes"
            reader = threading.Thread(target=self._read, args=(stream,), daemon=True)
            reader.start()
            self._readers.append(reader)
        return Report(process.pid)

    def look(self, patience_s: float) -> Report:
        """How it is after patience_s seconds, or as soon as it has ended."""
        process = self._process
        assert process is not None, "it was started"
        try:
            status: int | None = process.wait(patience_s)
        except subprocess.TimeoutExpired:
            status = None
        else:
            for reader in self._readers:  # its last words; a grandchild that holds the pipe is not waited for
                reader.join(1.0)
        with self._lock:
            said, self._said = self._said, ""
            return Report(process.pid, said, self._address, status)

    def signal(self, number: int) -> None:
        """Send it a signal, SIGKILL to its children too. Of one that has gone nothing is said."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        if number == signal.SIGKILL:
            os.killpg(process.pid, number)  # not reaped yet, so the id is still its own
        else:
            process.send_signal(number)

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            for raw in stream:
                line = raw.decode("utf-8", "replace")
                with self._lock:
                    if line.startswith(LISTENING):
                        self._address = line.removeprefix(LISTENING).strip()
                    self._said = (self._said + line)[-LOG_KEPT:]


def environment_of(order: Order, here: Mapping[str, str]) -> dict[str, str]:
    """The engine's environment: this one's, with the secret, without the number of threads that Ray sets for tasks of
    its own."""
    kept = {name: value for name, value in here.items() if name != "OMP_NUM_THREADS"}
    return {**kept, SECRET_VARIABLE: order.secret}
