"""Starts servers as child processes and ends them with everything that they started."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from benchmarks.rig.http import Endpoint, request
from benchmarks.rig.machine import is_running, process_tree

POLL_S = 0.05


class StartFailedError(Exception):
    """A server ended, or was not ready in time; the message ends with the last lines of its log."""


class ServerProcess:
    """A server in a session of its own, with its output in a log file."""

    def __init__(self, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.log = log
        self.started = time.perf_counter()
        self._known: set[int] = set()
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the server itself, the root of its tree."""
        return self.process.pid

    def descendants(self) -> list[int]:
        """Return the live processes below the server."""
        below = [pid for pid in process_tree(self.pid) if pid != self.pid]
        self._known.update(below)
        return below

    def wait_ready(self, endpoint: Endpoint, path: str, limit_s: float) -> float:
        """Wait until GET `path` answers 200 and return the seconds since the start. Raises StartFailedError."""
        return asyncio.run(self.ready(endpoint, path, limit_s))

    async def ready(self, endpoint: Endpoint, path: str, limit_s: float) -> float:
        """Do as wait_ready, inside a running event loop."""
        while True:
            if await status(endpoint, path) == 200:
                return time.perf_counter() - self.started
            code = self.process.poll()
            if code is not None:
                raise StartFailedError(f"{endpoint.label} ended with code {code}\n{self.tail()}")
            if time.perf_counter() - self.started > limit_s:
                raise StartFailedError(f"{endpoint.label} was not ready after {limit_s:.0f} s\n{self.tail()}")
            await asyncio.sleep(POLL_S)

    def tail(self, lines: int = 20) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, limit_s: float = 20.0) -> int | None:
        """Ask the server to end, wait, then kill what is left of its tree; return its exit code, None if killed."""
        self.descendants()
        code: int | None = None
        if self.process.poll() is None:
            self.process.terminate()
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
        for pid in self._known:
            _kill(pid)
        return code

    def kill(self) -> None:
        """kill -9 the server alone, and take its exit status."""
        self.descendants()
        _kill(self.pid)
        self.process.wait()

    def survivors(self) -> list[int]:
        """Return the processes once seen below the server that still run."""
        return sorted(pid for pid in self._known if is_running(pid))

    def __enter__(self) -> ServerProcess:
        """Return the server itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        """Stop the server."""
        self.stop()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


async def status(endpoint: Endpoint, path: str) -> int:
    """Return the HTTP status of GET `path`, 0 when nobody answers within 5 seconds."""
    try:
        async with asyncio.timeout(5):
            return (await request(endpoint, "GET", path)).status
    except TimeoutError:
        return 0
