"""A step that does not end: seen, told with what it computed, its requests failed, the process ended."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path

import pytest

from engine.client import EngineClient
from engine.generation import EngineError
from engine.process import EXIT_STUCK
from engine.sampling_params import SamplingParams
from engine.watchdog import Watchdog
from engine.wire import Progress
from tests.engine.processes import until_ready

SCRIPTED = """
from engine.script import Script, ScriptedCore
from engine.worker import main
raise SystemExit(main(load=lambda config: ScriptedCore(Script(hang_after_tokens=5, vocab_size=50))))
"""
REAL = """
import ctypes
from engine.core import EngineCore
from engine.worker import main
from tests.engine.conftest import FakeModel, FakeShape

def load(config):
    model = FakeModel(FakeShape())
    library = ctypes.{library}(None)
    # The device hangs when it has computed 20 tokens: a call that never returns, as of a driver
    model.before = lambda batch: library.pause() if sum(model.sizes) > 20 else None
    return EngineCore(config, model, free_bytes=1 << 20)

raise SystemExit(main(load=load))
"""


class End:
    """How a process ended whose step hung, and what its client was told."""

    def __init__(self, code: str, folder: Path, timeout_s: float) -> None:
        self.socket = folder / "engine.sock"
        self.config = json.dumps({"step_timeout_s": timeout_s, "max_context": 256})
        self.failure: Progress | EngineError
        asyncio.run(self._run(code))

    async def _run(self, code: str) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code, "--socket", str(self.socket), "--config", self.config),
            stderr=asyncio.subprocess.PIPE,
        )
        client = EngineClient(self.socket)
        ends: asyncio.Queue[Progress | EngineError] = asyncio.Queue()

        def hear(said: Progress | EngineError) -> None:
            if isinstance(said, EngineError) or said.finish_reason is not None:
                ends.put_nowait(said)

        async with asyncio.timeout(60):
            await until_ready(process)
            await client.connect()
            params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
            client.submit("stuck-1", range(7), params, on_progress=hear)
            self.failure = await ends.get()
            try:
                await client.wait_lost()
            finally:
                if process.returncode is None and client.connected:
                    process.kill()
                _, log = await process.communicate()
                await client.close()
        self.status = process.returncode
        self.log = log.decode()


@pytest.mark.parametrize("code", [SCRIPTED, REAL.format(library="CDLL")], ids=["scripted", "engine"])
def test_its_requests_fail_with_a_reason_the_log_says_what_hangs_and_the_process_ends(
    code: str, tmp_path: Path
) -> None:
    end = End(code, tmp_path, 1.0)
    assert isinstance(end.failure, Progress)
    assert end.failure.finish_reason == "error"
    assert end.failure.error == "a step has not ended for 1 s; the engine starts again"
    assert (end.failure.counters.prompt, end.failure.counters.completion > 0) == (7, True)
    assert (end.status, end.socket.exists()) == (EXIT_STUCK, False)
    lines = end.log.splitlines()
    assert lines[-1] == "error: a step has not ended for 1 s"
    (told,) = [json.loads(line.partition(" stuck ")[2]) for line in lines if " stuck " in line]
    assert told["seconds"] == 1.0
    assert {(part["request_id"], part["prompt"], part["tokens"]) for part in told["in_flight"]} == {("stuck-1", 7, 1)}
    assert any("in step" in line for line in lines), "where the step's thread is"


@pytest.mark.slow
def test_a_step_that_holds_the_interpreter_ends_the_process_too(tmp_path: Path) -> None:
    end = End(REAL.format(library="PyDLL"), tmp_path, 1.0)
    assert isinstance(end.failure, EngineError)
    assert end.failure.code == "engine_down"
    assert end.status == 1
    assert "Timeout (0:00:01.5" in end.log and "in step" in end.log


def test_what_ends_in_time_is_left_alone() -> None:
    seen: list[float] = []
    watchdog = Watchdog(0.05, seen.append)
    watchdog.start()
    looked = threading.Event()
    for _ in range(300):  # far longer in all than one may take
        with watchdog:
            looked.wait(0.001)
    looked.wait(0.2)  # nothing runs at all
    watchdog.stop()
    assert seen == []


def test_what_does_not_end_is_reported_and_its_end_waits_for_the_report() -> None:
    order: list[str] = []
    seen, told = threading.Event(), threading.Event()

    def on_stuck(seconds: float) -> None:
        seen.set()
        told.wait(10)
        order.append(f"stuck for {seconds:g} s")

    watchdog = Watchdog(0.02, on_stuck)
    watchdog.start()
    with watchdog:
        assert seen.wait(10)
        threading.Timer(0.02, told.set).start()
    order.append("ended")
    watchdog.stop()
    assert order[:2] == ["stuck for 0.02 s", "ended"]


def test_without_a_limit_nothing_is_watched() -> None:
    threads = threading.active_count()
    watchdog = Watchdog(0, lambda seconds: None, last_resort=True)
    watchdog.start()
    with watchdog:
        assert threading.active_count() == threads
    watchdog.stop()
