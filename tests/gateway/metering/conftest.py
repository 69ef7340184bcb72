"""Fixtures of the metering tests: a running metering over a real ledger, and victims to kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


class Victims:
    """Forks victims through crash_site.py, one at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._pid = 0

    def start(self, **spec: Any) -> None:
        """Let one begin."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(spec, default=str) + "\n")
        self._process.stdin.flush()
        self._pid = int(self._line())

    def kill(self) -> None:
        """SIGKILL it."""
        os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        """Its exit status, negative for a signal."""
        return int(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@pytest.fixture(scope="session")
def victims() -> Iterator[Victims]:
    """Processes to be killed."""
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("crash_site.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    ) as process:
        yield Victims(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 0
