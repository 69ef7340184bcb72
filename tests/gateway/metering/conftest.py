"""Fixtures of the metering tests: a running metering over a real ledger, and victims to kill."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.metering.journal import Journal
from tests.gateway.metering.bench import Bench


class Victims:
    """Forks victims through crash_site.py, one at a time."""

    def __init__(self, process: subprocess.Popen[str], news: int) -> None:
        """`news` is a pipe on which there is something to read whenever a victim was told more."""
        self._process = process
        self._news = news
        self._pid = 0

    def start(self, **spec: Any) -> None:
        """Let one begin."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(spec, default=str) + "\n")
        self._process.stdin.flush()
        self._pid = int(self._line())

    def until(self, reached: Callable[[], bool]) -> None:
        """Return when something holds of what the victim was told."""
        while not reached():
            ready, _, _ = select.select([self._news], [], [], 20)
            assert ready, "the victim does nothing"
            os.read(self._news, 65536)

    def kill(self, after_s: float = 0.0) -> None:
        """SIGKILL it, at a moment `after_s` from now: nothing announces the moments between those it tells of."""
        time.sleep(after_s)
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
    news, told = os.pipe()
    os.set_blocking(told, False)
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("crash_site.py")), str(told)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        pass_fds=[told],
    ) as process:
        os.close(told)
        yield Victims(process, news)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 0
    os.close(news)


@pytest.fixture
def bench(tmp_path: Path, clocks: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """bench(work, balance) runs the async function `work` with a Bench. A broken journal is tried again soon."""
    monkeypatch.setattr("gateway.metering.journal._PROBE_SECONDS", 0.01)

    def run(work: Callable[[Bench], Awaitable[Any]], balance: int = 10**9) -> Any:
        async def main() -> Any:
            journal = Journal.open(tmp_path / "journal.sqlite")
            journal.start(asyncio.get_running_loop())
            try:
                return await work(Bench(journal, clocks, balance))
            finally:
                await asyncio.to_thread(journal.close)

        return asyncio.run(main())

    return run
