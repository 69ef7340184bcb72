"""Replicas in actors, without Ray: what stands in for it runs actors in threads of this process, on 127.0.0.1.

Ray's own part is tested in test_ray.py, where the package is installed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.config import EngineConfig
from engine.generation import EngineError, GenerateRequest, Generation
from engine.network import SECRET_VARIABLE
from engine.sampling_params import SamplingParams
from engine.weights.sources import ModelSource
from gateway.fleet import ray as through_ray
from gateway.fleet.offers import Offer, Served
from gateway.fleet.ray import ON_NODE, RayReplica, join, name_anywhere, resources_of
from gateway.fleet.remote import EngineHost, Order, environment_of
from gateway.fleet.replicas import StartError, State
from gateway.settings import SettingError, Settings
from tests.engine.byte_tokenizer import ByteTokenizer
from tests.engine.processes import everything, worker_command

SECRET = "a secret of the test"
SCRIPT = {"vocab_size": 256, "tokens": 500, "interval_ms": 2}


class LostError(Exception):
    """An actor that does not answer any more."""


class FakeActor:
    """An actor: its methods run in a thread of its own, one after the other."""

    def __init__(self, host: EngineHost) -> None:
        self.host = host
        self.lost = False
        self.mute = threading.Event()
        """Set: it answers. (Cleared: it hangs.)"""
        self.mute.set()
        self.thread = ThreadPoolExecutor(1)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if not self.mute.is_set() and not self.lost:
                self.mute.wait(20)
            if self.lost:
                raise LostError
            result = getattr(self.host, name)(*arguments)
            if self.lost:
                raise LostError
            return result

        def remote(*arguments: Any) -> asyncio.Future[Any]:
            done: Future[Any] = self.thread.submit(call, *arguments)
            return asyncio.wrap_future(done)

        return SimpleNamespace(remote=remote)

    def lose(self) -> None:
        """Its machine is gone, and its process."""
        self.lost = True
        self.mute.set()
        self.host.signal(signal.SIGKILL)


class FakeRay:
    """As much of the package as is used."""

    def __init__(self) -> None:
        self.exceptions = SimpleNamespace(RayError=LostError)
        self.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
        self.actors: list[FakeActor] = []
        self.options: list[dict[str, Any]] = []

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: f"node{len(self.actors)}")

    def remote(self, kind: type[EngineHost]) -> Any:
        def make(order: Order) -> FakeActor:
            self.actors.append(FakeActor(kind(order)))  # type: ignore[call-arg]  # an actor knows its host
            return self.actors[-1]

        def options(**options: Any) -> Any:
            self.options.append(options)
            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=options)

    def kill(self, actor: FakeActor) -> None:
        actor.lose()


class Stage:
    """One replica on stand-ins for machines."""

    def __init__(self, folder: Path, ray: FakeRay, command: list[str]) -> None:
        self.ray = ray
        self.log = folder / "engine.log"
        self.replica = RayReplica(
            EngineConfig(served_name="shown"),
            resources={"num_cpus": 1, "num_gpus": 0},
            order=Order(command, "{}", 5.0, SECRET),
            socket_path=folder / "engine.sock",
            log_path=self.log,
            tokenizer=ByteTokenizer(),
            sleep=lambda seconds: asyncio.sleep(0),
        )
        self.states: list[str] = []
        self._changed = asyncio.Event()
        self.replica.on_state(self._note)

    def _note(self, replica: Any) -> None:
        self.states.append(replica.state)
        self._changed.set()

    async def ready_again(self) -> None:
        while self.states.count("ready") < 2:
            self._changed.clear()
            await self._changed.wait()

    def generate(self, request_id: str, max_tokens: int = 500) -> Generation:
        params = SamplingParams(max_tokens=max_tokens)
        return self.replica.client.generate(GenerateRequest(request_id=request_id, prompt_ids=[1, 2], params=params))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    made = FakeRay()
    monkeypatch.setattr(through_ray, "ray", lambda: made)
    return made


def run(folder: Path, ray: FakeRay, scene: Callable[[Stage], Awaitable[None]], command: list[str]) -> Stage:
    async def main() -> Stage:
        stage = Stage(folder, ray, command)
        try:
            async with asyncio.timeout(60):
                await scene(stage)
        finally:
            await stage.replica.stop(0)
        assert (stage.replica.state, stage.replica.pid) == (State.STOPPED, None)
        return stage

    try:
        return asyncio.run(main())
    finally:
        for actor in ray.actors:
            actor.lose()
            actor.thread.shutdown()


def test_an_engine_is_placed_answers_without_ray_and_drains(fake: FakeRay, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        replica = stage.replica
        await replica.start()
        welcome = replica.client.welcome
        assert welcome is not None and (welcome.model, welcome.pid) == ("shown", replica.pid)
        line = await asyncio.to_thread(Path(f"/proc/{replica.pid}/cmdline").read_text)
        assert "--listen" in line and SECRET not in line
        generation = stage.generate("a", 1000)  # two seconds: it is there when the word to stop comes, and ends
        await generation.next()
        _, deltas = await asyncio.gather(replica.stop(30), everything(generation))
        assert deltas[-1].finish_reason == "length"

    stage = run(tmp_path, fake, scene, worker_command(**{**SCRIPT, "tokens": 1000}))
    assert stage.states == ["starting", "ready", "stopped"]
    assert fake.options == [
        {"num_cpus": 1, "num_gpus": 0, "scheduling_strategy": "SPREAD", "max_restarts": 0, "max_task_retries": 0}
    ]
    said = stage.log.read_text()
    assert said.startswith(f"{ON_NODE}node1 (127.0.0.1)\n") and "draining 1 requests" in said
    assert SECRET not in said


def test_a_lost_machines_requests_fail_and_its_replica_starts_elsewhere(fake: FakeRay, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.replica.start()
        generation = stage.generate("a")
        await generation.next()
        fake.actors[0].lose()
        with pytest.raises(EngineError) as caught:
            await everything(generation)
        assert caught.value.code == "engine_down"
        await stage.ready_again()
        assert stage.replica.last_error == "its actor or its machine is lost: LostError"
        assert stage.replica.restarts == 1
        assert (await everything(stage.generate("b", 5)))[-1].finish_reason == "length"

    stage = run(tmp_path, fake, scene, worker_command(**SCRIPT))
    assert "node2" in stage.log.read_text()


def test_a_machine_that_says_nothing_is_given_up(
    fake: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.replica.start()
        monkeypatch.setattr(through_ray, "LOST_S", 0.1)
        fake.actors[0].mute.clear()
        await asyncio.wait_for(_until_down(stage), 20)
        monkeypatch.setattr(through_ray, "LOST_S", 20.0)
        assert stage.replica.last_error == "its machine has not answered for 0.1 s"
        await stage.ready_again()

    assert len(run(tmp_path, fake, scene, worker_command(**SCRIPT)).ray.actors) >= 2


async def _until_down(stage: Stage) -> None:
    while "down" not in stage.states:
        stage._changed.clear()
        await stage._changed.wait()


def test_what_can_never_start_says_why(fake: FakeRay, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        with pytest.raises(StartError, match="No such file or directory"):
            await stage.replica.start()

    assert run(tmp_path, fake, scene, [str(tmp_path / "none")]).states == ["starting", "stopped"]


def test_an_engine_that_ends_by_itself_tells_its_last_words(tmp_path: Path) -> None:
    host = EngineHost(
        Order(["/bin/sh", "-c", "echo so it began; echo error: no more >&2; exit 7"], "{}", 1.0, SECRET), "h"
    )
    assert host.start().pid > 0
    report = host.look(20)
    assert report.status == 7
    assert sorted(report.said.splitlines()) == ["error: no more", "so it began"]
    assert host.look(0).said == ""
    host.signal(signal.SIGKILL)
    host.signal(signal.SIGTERM)


def test_the_environment_has_the_secret_and_not_rays_threads() -> None:
    order = Order([], "{}", 1.0, SECRET)
    assert environment_of(order, {"A": "1", "OMP_NUM_THREADS": "1"}) == {"A": "1", SECRET_VARIABLE: SECRET}
    assert SECRET not in repr(order)


def test_what_a_machine_needs_to_have() -> None:
    engine = EngineConfig()
    replace = msgspec.structs.replace
    assert resources_of(engine, False) == {"num_cpus": 1, "num_gpus": 0}
    assert resources_of(replace(engine, threads=4, tensor_parallel=2), False) == {"num_cpus": 8, "num_gpus": 0}
    assert resources_of(replace(engine, tensor_parallel=2), True) == {"num_cpus": 1, "num_gpus": 2}


def test_models_are_named_so_that_any_machine_finds_them(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"")
    for model, name in (
        ("smollm2-135m", "smollm2-135m"),
        ("org/name", "org/name"),
        (os.path.relpath(tmp_path / "m.gguf"), str(tmp_path / "m.gguf")),
    ):
        source = ModelSource(tmp_path / "m.gguf", "gguf", "m")
        assert name_anywhere(Served(name="m", source=source, offer=Offer(engine=EngineConfig(model=model)))) == name


def test_ray_that_is_missing_or_not_meant_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingError, match=r"--ray needs the package ray: pip install 'headrace\[scale\]'"):
        join("local")
    with pytest.raises(SettingError, match="--ray takes the address of a cluster"):
        Settings(ray="ray://head:10001").check()
    with pytest.raises(SettingError, match="--ray places engines on machines that --lease-socket is not for"):
        Settings(ray="auto", lease_socket="leases.sock").check()


def test_a_cluster_that_cannot_be_joined_is_an_error_of_the_option(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**options: Any) -> None:
        raise ConnectionError("nobody\nanswers at " + options["address"])

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    fake.init, fake.is_initialized = init, lambda: False  # type: ignore[attr-defined]
    with pytest.raises(SettingError, match=r"--ray 10\.0\.0\.9:1: nobody answers at 10\.0\.0\.9:1"):
        join("10.0.0.9:1")
