"""Headrace itself as a measured server: its own `serve` command, with data, port and engine of one's choice."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import orjson

from benchmarks.rig.http import Endpoint
from benchmarks.rig.listener import free_port
from benchmarks.rig.processes import ServerProcess
from engine.script import Script

LABEL = "headrace"
READY_PATH = "/readyz"
MODEL = "smollm2-135m"
COMMAND = str(Path(sys.executable).with_name("headrace"))


@dataclass(slots=True)
class House:
    """One installation on this machine: a data folder, a port and an engine, real or scripted."""

    data: Path
    model: str = MODEL
    script: Script | None = None
    """Serve this script in place of the model (the model's tokenizer is still used)."""
    port: int = field(default_factory=free_port)
    options: tuple[str, ...] = ()
    """More options of `headrace serve`."""

    @property
    def database(self) -> Path:
        """The ledger's file."""
        return self.data / "headrace.db"

    @property
    def engine_socket(self) -> Path:
        """The Unix socket of the running engine."""
        (socket,) = self.data.glob("**/*.sock")
        return socket

    def spawn(self) -> ServerProcess:
        """Start the gateway, which starts its engine, and return at once."""
        argv = [COMMAND, "serve", "--host", "127.0.0.1", "--port", str(self.port)]
        argv += ["--data", str(self.data), "--model", self.model, *self.options]
        if self.script is not None:
            engine = [sys.executable, "-m", "engine.scripted", "--script", msgspec.json.encode(self.script).decode()]
            argv += ["--engine-command", shlex.join(engine)]
        self.data.parent.mkdir(parents=True, exist_ok=True)
        return ServerProcess(argv, self.data.with_name(f"{self.data.name}.log"))

    def endpoint(self, pid: int | None = None) -> Endpoint:
        """Return how to reach the gateway, with the key of its first start once there is one."""
        first_run = self.data / "first-run.json"
        key = orjson.loads(first_run.read_bytes())["api_key"] if first_run.exists() else ""
        return Endpoint(LABEL, "127.0.0.1", self.port, self.model, key, pid)

    def start(self, limit_s: float = 120.0) -> tuple[ServerProcess, Endpoint]:
        """Start, and return when requests are answered. Raises StartFailedError."""
        server = self.spawn()
        try:
            server.wait_ready(self.endpoint(), READY_PATH, limit_s)
        except BaseException:
            server.stop()
            raise
        return server, self.endpoint(server.pid)

    def audit(self) -> tuple[int, str]:
        """Run `headrace audit` on the data; return its exit status and what it said."""
        done = subprocess.run(
            [COMMAND, "audit", "--data", str(self.data)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ},
            timeout=300,
        )
        return done.returncode, done.stdout + done.stderr
