"""Replicas on a Ray cluster of two nodes: one on each, and both on one when the other is killed."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.config import EngineConfig
from engine.generation import EngineError, GenerateRequest, Generation
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from engine.weights.sources import ModelSource
from gateway.fleet.pool import Pool
from gateway.fleet.ray import ON_NODE, RayReplica, join
from gateway.fleet.remote import Order
from gateway.fleet.replicas import Replica, StartError, State
from tests.engine.byte_tokenizer import ByteTokenizer
from tests.engine.processes import everything, worker_command
from tests.gateway.test_serve import Process, free_port

pytest.importorskip("ray", reason="replicas across machines need the package ray: pip install 'headrace[scale]'")
pytestmark = [
    pytest.mark.slow,
    # Ray leaves sockets and files of its own open, and warns of its own future.
    pytest.mark.filterwarnings("ignore"),
]

SECRET = "a secret of the test"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head with two cores; this process is part of it."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 80_000_000})
    join(made.address)
    yield made
    sys.modules["ray"].shutdown()
    made.shutdown()


@pytest.fixture
def second(cluster: Any) -> Iterator[Callable[[], None]]:
    """Adds a node with two cores, and kills it."""
    node = cluster.add_node(num_cpus=2, object_store_memory=80_000_000)
    killed: list[bool] = []

    def kill() -> None:
        killed.append(True)
        cluster.remove_node(node, allow_graceful=False)

    cluster.wait_for_nodes()
    yield kill
    if not killed:
        kill()


def nodes_of(*logs: Path) -> list[list[str]]:
    """Where each engine was started, time after time."""
    return [
        [line.removeprefix(ON_NODE).split()[0] for line in log.read_text().splitlines() if line.startswith(ON_NODE)]
        for log in logs
    ]


def head_of(cluster: Any) -> str:
    head: str = cluster.head_node.node_id
    return head


def replica(folder: Path, name: str, engine: list[str], **config: Any) -> RayReplica:
    return RayReplica(
        EngineConfig(**config),
        resources={"num_cpus": 1, "num_gpus": 0},
        order=Order(engine, "{}", 5.0, SECRET),
        socket_path=folder / f"{name}.sock",
        log_path=folder / f"{name}.log",
        tokenizer=ByteTokenizer(),
        drain_s=5.0,
    )


async def until(replica: Replica, reached: Callable[[], bool]) -> None:
    changed = asyncio.Event()
    replica.on_state(lambda _: changed.set())
    while not reached():
        changed.clear()
        await changed.wait()


def test_a_killed_nodes_replica_comes_back_on_the_other(
    cluster: Any, second: Callable[[], None], tmp_path: Path
) -> None:
    async def scene() -> list[list[str]]:
        engine = worker_command(vocab_size=256, tokens=100_000, interval_ms=5, max_context=200_000)
        replicas = [replica(tmp_path, name, engine, served_name="shown") for name in "ab"]
        logs = [r.log_path for r in replicas]
        pool = Pool(replicas)
        pool.launch()
        try:
            await pool.ready()
            first = nodes_of(*logs)
            lost = next(i for i, (node,) in enumerate(first) if node != head_of(cluster))
            kept = 1 - lost

            def ask(index: int, request_id: str, tokens: int) -> Generation:
                asked = GenerateRequest(
                    request_id=request_id, prompt_ids=[1, 2, 3], params=SamplingParams(max_tokens=tokens)
                )
                return replicas[index].client.generate(asked)

            for index in (0, 1):
                assert (await everything(ask(index, f"r{index}", 5)))[-1].finish_reason == "length"
                welcome = replicas[index].client.welcome
                assert welcome is not None and welcome.model == "shown"
            hanging = ask(lost, "long", 100_000)
            await hanging.next()
            epoch = pool.epoch
            await asyncio.to_thread(second)
            with pytest.raises(EngineError) as caught:
                await everything(hanging)
            assert caught.value.code == "engine_down"
            assert (await everything(ask(kept, "meanwhile", 5)))[-1].finish_reason == "length"
            await until(replicas[lost], lambda: replicas[lost].restarts > 0 and pool.ready_replicas == 2)
            assert pool.epoch != epoch
            assert "lost" in (replicas[lost].last_error or "")
            assert (await everything(ask(lost, "again", 5)))[-1].finish_reason == "length"
            return nodes_of(logs[kept], logs[lost])
        finally:
            await pool.stop(0)
            assert pool.state is State.STOPPED

    async def main() -> list[list[str]]:
        async with asyncio.timeout(180):
            return await scene()

    (kept,), (before, *_, after) = asyncio.run(main())
    assert kept == after == head_of(cluster) != before


def test_a_node_that_cannot_find_the_model_says_so(cluster: Any, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.gguf")

    async def main() -> str:
        nowhere = replica(tmp_path, "a", [], model=missing, device="cpu")
        with pytest.raises(StartError) as caught:
            async with asyncio.timeout(120):
                await nowhere.start()
        await nowhere.stop(0)
        return str(caught.value)

    assert asyncio.run(main()) == f"{missing}: no such file or folder"


def test_an_engine_that_dies_is_started_again_and_a_drain_lets_requests_end(cluster: Any, tmp_path: Path) -> None:
    async def main() -> None:
        one = replica(tmp_path, "a", worker_command(vocab_size=256, tokens=200, interval_ms=2))
        async with asyncio.timeout(120):
            await one.start()
            assert one.pid is not None
            os.kill(one.pid, signal.SIGKILL)
            await until(one, lambda: one.restarts == 1 and one.state is State.READY)
            assert one.last_error == "killed by SIGKILL"
            asked = GenerateRequest(request_id="a", prompt_ids=[1], params=SamplingParams(max_tokens=200))
            generation = one.client.generate(asked)
            await generation.next()
            _, deltas = await asyncio.gather(one.stop(30), everything(generation))
            assert deltas[-1].finish_reason == "length"

    asyncio.run(main())
    assert "draining 1 requests" in (tmp_path / "a.log").read_text()


def test_served_through_ray_a_request_moves_away_from_a_killed_node(
    cluster: Any, second: Callable[[], None], tmp_path: Path, tiny_model: ModelSource
) -> None:
    """The whole service: each replica has a request that has said nothing yet; one's node is killed, both are
    answered."""
    reply = tuple(Tokenizer.load(tiny_model).encode("Paris. "))
    engine = worker_command(tokens=8, reply=reply, eos=257, vocab_size=258, first_token_ms=4000.0)
    data = tmp_path / "data"
    options = ("--ray", cluster.address, "--replicas", "2", "--routing", "round-robin")
    house = Process(data, str(tiny_model.path), free_port(), (*options, "--engine-command", shlex.join(engine)))
    try:
        house.wait_ready()
        nodes = [node for (node,) in nodes_of(data / "engine.log", data / "engine-1.log")]
        assert len(set(nodes)) == 2 and head_of(cluster) in nodes
        key = json.loads((data / "first-run.json").read_text())["api_key"]
        answers: list[str | None] = []

        def ask() -> None:
            with openai.OpenAI(base_url=f"http://127.0.0.1:{house.port}/v1", api_key=key, max_retries=0) as client:
                said = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
                answers.append(said.choices[0].message.content)

        asking = [threading.Thread(target=ask) for _ in range(2)]
        for thread in asking:
            thread.start()
        while 'headrace_engine_running{model="tiny"} 2.0' not in house.get("/metrics").decode():
            assert not answers, "both run at the same time"
        second()
        for thread in asking:
            thread.join(60)
        assert answers == ["Paris. "] * 2
        assert 'headrace_requests_moved_total{model="tiny"} 1.0' in house.get("/metrics").decode()
        assert house.stop() == 0
    finally:
        house.stop(signal.SIGKILL)
