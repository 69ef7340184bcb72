"""Several replicas answer as one: their gauges added up, what they know of a request put together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.generation import EngineError, GenerateRequest
from engine.sampling_params import SamplingParams
from engine.script import Script
from engine.scripted import ScriptedEngine
from gateway.fleet.pool import Pool
from gateway.fleet.replicas import Replica, State
from tests.engine.byte_tokenizer import ByteTokenizer


class StandIn(Replica):
    """A replica whose engine runs in the test."""

    def become(self, state: State) -> None:
        self._become(state)


def run(folder: Path, scene: Callable[[Pool, list[ScriptedEngine], list[StandIn]], Awaitable[None]]) -> bool:
    async def main() -> None:
        paths = [folder / f"{index}.sock" for index in range(2)]
        engines = [ScriptedEngine(path, Script(vocab_size=256, tokens=3, max_context=100 + i)) for i, path in
                   enumerate(paths)]  # fmt: skip
        replicas = [
            StandIn(EngineConfig(), socket_path=path, log_path=folder / "log", tokenizer=ByteTokenizer())
            for path in paths
        ]
        pool = Pool(replicas, places=4)
        for engine, replica in zip(engines, replicas):
            await engine.start()
            await replica.client.connect()
            replica.become(State.READY)
        try:
            async with asyncio.timeout(30):
                await scene(pool, engines, replicas)
        finally:
            for engine, replica in zip(engines, replicas):
                await replica.client.close()
                await engine.stop()

    asyncio.run(main())
    return True


def ask(request_id: str) -> GenerateRequest:
    return GenerateRequest(request_id=request_id, prompt_ids=[1, 2, 3], params=SamplingParams(max_tokens=9))


def test_two_replicas_answer_as_one(tmp_path: Path) -> None:
    async def scene(pool: Pool, engines: list[ScriptedEngine], replicas: list[StandIn]) -> None:
        assert (pool.state, pool.connected, pool.ready_replicas, pool.max_context) == (State.READY, True, 2, 100)
        seats = [pool.place(ask(name)) for name in "ab"]
        assert {seat.replica for seat in seats} == {0, 1}
        for seat, name in zip(seats, "ab"):
            assert (await seat.client.generate(ask(name)).final()).completion == 3
            seat.leave()
            seat.leave()
        gauges = await pool.snapshot()
        assert gauges is not None and gauges.prompt_tokens == 6 and gauges.completion_tokens == 6
        reply = await pool.usage(["a", "b", "c"])
        assert reply is not None and sorted(reply.known) == ["a", "b"] and reply.epoch == pool.epoch
        assert pool.epoch == "+".join(engine.core.epoch for engine in engines)
        await pool.abort("a")

    assert run(tmp_path, scene)


def test_a_request_that_both_know_is_the_one_that_went_further(tmp_path: Path) -> None:
    async def scene(pool: Pool, engines: list[ScriptedEngine], replicas: list[StandIn]) -> None:
        engines[0].core.script = Script(vocab_size=256, tokens=3, fail_token=1)
        with pytest.raises(EngineError, match="the script says so"):
            await replicas[0].client.generate(ask("x")).final()
        await replicas[1].client.generate(ask("x")).final()
        reply = await pool.usage(["x"])
        assert reply is not None and reply.known["x"].counters.completion == 3

    assert run(tmp_path, scene)


def test_one_that_leaves_or_is_away_gets_nothing(tmp_path: Path) -> None:
    async def scene(pool: Pool, engines: list[ScriptedEngine], replicas: list[StandIn]) -> None:
        told: list[State] = []
        pool.on_state(lambda changed: told.append(changed.state))
        replicas[0].become(State.LEAVING)
        assert {pool.place(ask(str(n))).replica for n in range(4)} == {1}
        with pytest.raises(EngineError, match="not running"):
            pool.place(ask("y"), avoid=[1])
        replicas[1].become(State.DOWN)
        await replicas[1].client.close()
        assert told == [State.READY, State.LEAVING]
        assert pool.router.loads[1].work() == 0, "what it did is forgotten with it"
        assert await pool.usage(["x"]) is None, "nobody knows what the other one knew"
        engines[0].stall()
        replicas[0].become(State.DOWN)
        await replicas[0].client.close()
        assert not pool.connected and await pool.snapshot() is None
        assert pool.client is replicas[0].client

    assert run(tmp_path, scene)
