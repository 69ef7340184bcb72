"""A replica keeps an engine process running, says what state it is in, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import uvloop

from engine.answer import Delta
from engine.config import EngineConfig
from engine.generation import EngineError, GenerateRequest, Generation
from engine.sampling_params import SamplingParams
from engine.script import Script
from engine.wire import Snapshot
from gateway.fleet import replicas
from gateway.fleet.replicas import Backoff, Patience, Replica, StartError, State
from tests.engine.byte_tokenizer import ByteTokenizer


class Clock:
    """Time that passes when the replica sleeps, and when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


class Stage:
    """A replica of the scripted engine, and every state it was in."""

    def __init__(self, folder: Path, script: Script, patience: Patience | None = None) -> None:
        self.clock = Clock()
        self.log = folder / "logs" / "engine.log"
        self.replica = Replica(
            EngineConfig(served_name="shown"),
            socket_path=folder / "engine.sock",
            log_path=self.log,
            tokenizer=ByteTokenizer(),
            command=[sys.executable, "-m", "engine.scripted", "--script", msgspec.json.encode(script).decode()],
            patience=patience,
            clock=self.clock,
            sleep=self.clock.sleep,
        )
        self.states: list[str] = []
        self.changed = asyncio.Event()
        self.replica.on_state(self._note)

    def _note(self, replica: Replica) -> None:
        assert replica is self.replica
        self.states.append(replica.state)
        self.changed.set()

    async def until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self.changed.clear()
            await self.changed.wait()

    async def kill(self) -> None:
        """kill -9 of the engine; returns when it serves again."""
        assert self.replica.pid is not None
        times = self.states.count("ready")
        os.kill(self.replica.pid, signal.SIGKILL)
        await self.until(lambda: self.states.count("ready") > times)

    def generate(self, request_id: str, max_tokens: int = 1000) -> Generation:
        params = SamplingParams(max_tokens=max_tokens)
        return self.replica.client.generate(GenerateRequest(request_id=request_id, prompt_ids=[1, 2, 3], params=params))


async def everything(generation: Generation) -> list[Delta]:
    deltas: list[Delta] = []
    while new := await generation.next():
        deltas += new
    return deltas


def run(
    folder: Path,
    scene: Callable[[Stage], Awaitable[None]],
    script: Script | None = None,
    patience: Patience | None = None,
    loop: str = "asyncio",
) -> Stage:
    async def main() -> Stage:
        stage = Stage(folder, script or Script(vocab_size=256, tokens=500, interval_ms=2), patience)
        try:
            async with asyncio.timeout(60):
                await scene(stage)
        finally:
            await stage.replica.stop(0)
        assert stage.replica.state is State.STOPPED
        assert stage.replica.pid is None
        assert not stage.replica.client.connected
        return stage

    return uvloop.run(main()) if loop == "uvloop" else asyncio.run(main())


def test_it_starts_serves_and_drains(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        replica = stage.replica
        await replica.start()
        assert replica.client.welcome is not None
        assert replica.client.welcome.model == "shown"
        assert replica.client.welcome.pid == replica.pid
        with pytest.raises(RuntimeError, match="running already"):
            replica.launch()
        generation = stage.generate("a", 200)
        await generation.next()
        stopping = asyncio.create_task(replica.stop(30))
        deltas = await everything(generation)
        assert deltas[-1].finish_reason == "length"
        await stopping

    stage = run(tmp_path, scene)
    assert stage.states == ["starting", "ready", "stopped"]
    assert not (tmp_path / "engine.sock").exists()
    assert stage.log.stat().st_mode & 0o777 == 0o600


def test_a_drain_that_takes_too_long_is_cut_with_final_counters(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.replica.start()
        generation = stage.generate("a", 100_000)
        await generation.next()
        await asyncio.gather(stage.replica.stop(0.1), everything(generation))
        assert (await generation.final()).completion > 0

    script = Script(vocab_size=256, tokens=100_000, interval_ms=2, max_context=200_000)
    assert run(tmp_path, scene, script).states == ["starting", "ready", "stopped"]


def test_a_killed_engine_ends_its_requests_is_started_again_and_serves(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        replica = stage.replica
        await replica.start()
        epoch = replica.client.welcome.epoch if replica.client.welcome else ""
        generation = stage.generate("a")
        await generation.next()
        again = asyncio.create_task(stage.kill())
        async with asyncio.timeout(2):
            with pytest.raises(EngineError) as caught:
                await everything(generation)
        assert caught.value.code == "engine_down"
        with pytest.raises(EngineError) as refused:
            stage.generate("meanwhile")
        assert refused.value.code == "engine_down"
        await again
        assert replica.client.welcome is not None
        assert replica.client.welcome.epoch != epoch
        assert replica.restarts == 1
        assert replica.last_error == "killed by SIGKILL"
        assert (await everything(stage.generate("a", 5)))[-1].finish_reason == "length"

    stage = run(tmp_path, scene)
    assert stage.states == ["starting", "ready", "down", "starting", "ready", "stopped"]


def test_the_delay_doubles_and_is_forgotten_after_a_healthy_minute(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.replica.start()
        for _ in range(3):
            await stage.kill()
        stage.clock.now += 59
        await stage.kill()
        stage.clock.now += 60
        await stage.kill()
        await stage.kill()

    assert run(tmp_path, scene).clock.slept == [1, 2, 4, 8, 1, 2]


def test_delays_are_bounded() -> None:
    backoff = Backoff()
    assert [backoff.delay(n) for n in (1, 2, 3, 4, 5, 6, 7, 10_000)] == [1, 2, 4, 8, 16, 30, 30, 30]


def children() -> set[str]:
    """Process ids of this process's children, zombies included. A thread may end while its list is read."""
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.update((task / "children").read_text().split())
    return found


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8])
def test_a_stop_in_the_midst_of_a_start_leaves_no_process(turns: int, loop: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        stage.replica.launch()
        for _ in range(turns):
            await asyncio.sleep(0)

    before = children()
    run(tmp_path, scene, loop=loop)
    assert children() <= before


def test_what_can_never_start_is_an_error_and_not_a_loop(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        with pytest.raises(StartError, match=r"^m\.gguf: tensor x is missing$"):
            await stage.replica.start()
        assert stage.replica.last_error == "m.gguf: tensor x is missing"
        with pytest.raises(StartError, match="tensor x"):
            await stage.replica.start()  # it may be tried again, once the file has been mended

    stage = run(tmp_path, scene, Script(fail_start="m.gguf: tensor x is missing"))
    assert stage.states == ["starting", "stopped", "starting", "stopped"]
    assert stage.clock.slept == []


def test_a_command_that_does_not_exist_is_a_start_error(tmp_path: Path) -> None:
    async def main() -> str:
        replica = Replica(
            EngineConfig(), socket_path=tmp_path / "s", log_path=tmp_path / "log", command=[str(tmp_path / "none")]
        )
        with pytest.raises(StartError) as caught:
            await replica.start()
        await replica.stop()
        return str(caught.value)

    assert "No such file or directory" in asyncio.run(main())


def test_an_engine_with_another_vocabulary_is_a_start_error(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        with pytest.raises(StartError, match="257 is larger than the tokenizer's of 256"):
            await stage.replica.start()

    assert run(tmp_path, scene, Script(vocab_size=257)).states == ["starting", "stopped"]


def test_an_engine_that_dies_while_loading_is_tried_again_until_it_is_stopped(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        spawned: asyncio.Queue[int] = asyncio.Queue()
        spawn = stage.replica._spawn

        async def spawn_and_tell() -> asyncio.subprocess.Process:
            process = await spawn()
            spawned.put_nowait(process.pid)
            return process

        stage.replica._spawn = spawn_and_tell  # type: ignore[method-assign]
        stage.replica.launch()
        for _ in range(2):
            stage.states.clear()
            os.kill(await spawned.get(), signal.SIGKILL)
            await stage.until(lambda: "down" in stage.states)
        waiting = asyncio.create_task(stage.replica.ready())
        await asyncio.sleep(0)
        await stage.replica.stop(0)
        with pytest.raises(StartError, match="stopped"):
            await waiting

    stage = run(tmp_path, scene, Script(start_ms=60_000))
    assert stage.clock.slept == [1, 2]


def test_an_engine_that_is_not_ready_in_time_is_killed(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        stage.replica.launch()
        await stage.until(lambda: "down" in stage.states)
        assert stage.replica.last_error == "it was not ready within 0.1 s"

    script, patience = Script(start_ms=60_000), Patience(start_s=0.1)
    assert run(tmp_path, scene, script, patience).states[:2] == ["starting", "down"]


def test_an_engine_that_hangs_is_killed_and_started_again(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.replica.start()
        generation = stage.generate("a")
        with pytest.raises(EngineError) as caught:
            await everything(generation)
        assert caught.value.code == "engine_down"
        await stage.until(lambda: stage.states.count("ready") == 2)
        assert stage.replica.last_error == "it has not answered for 0.2 s"

    script = Script(vocab_size=256, tokens=100, stall_after_tokens=10)
    stage = run(tmp_path, scene, script, Patience(probe_s=0.05, stall_s=0.2))
    assert stage.states == ["starting", "ready", "down", "starting", "ready", "stopped"]


def test_gauges_are_at_hand_while_it_is_ready(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.replica.start()
        await everything(stage.generate("a", 5))
        ask, asked = stage.replica.client.snapshot, asyncio.Event()

        async def ask_and_tell() -> Snapshot:
            gauges = await ask()
            asked.set()
            return gauges

        stage.replica.client.snapshot = ask_and_tell  # type: ignore[method-assign]
        await asked.wait()
        assert stage.replica.snapshot is not None
        assert stage.replica.snapshot.completion_tokens == 5
        await stage.replica.stop(0)
        assert stage.replica.snapshot is None

    assert run(tmp_path, scene, patience=Patience(probe_s=0.02)).states[-1] == "stopped"


def test_a_connection_that_breaks_is_opened_again_without_a_restart(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        replica = stage.replica
        await replica.start()
        pid = replica.pid
        await replica.client.close()
        await stage.until(lambda: stage.states.count("ready") == 2)
        assert (replica.pid, replica.restarts) == (pid, 0)
        assert (await everything(stage.generate("a", 5)))[-1].finish_reason == "length"

    assert run(tmp_path, scene).states == ["starting", "ready", "starting", "ready", "stopped"]


def test_a_large_log_is_put_aside_before_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "LOG_LIMIT", 10)

    async def scene(stage: Stage) -> None:
        stage.log.parent.mkdir()
        stage.log.write_text("error: of long ago\n")
        await stage.replica.start()
        await stage.kill()
        assert stage.replica.last_error == "killed by SIGKILL"

    stage = run(tmp_path, scene)
    assert "ready" in stage.log.read_text()
    assert "ready" in stage.log.with_name("engine.log.1").read_text()
