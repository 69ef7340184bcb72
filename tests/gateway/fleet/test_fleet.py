"""Models that take turns in one memory: whoever waits for one gets it, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config import EngineConfig
from gateway.fleet.budget import Rest
from gateway.fleet.deployment import Deployment, Needs, NotNowError
from gateway.fleet.fleet import Fleet
from gateway.fleet.pool import Pool
from gateway.fleet.replicas import Replica


class Engines:
    """A pool whose engines start in an instant, or never."""

    def __init__(self) -> None:
        self.replicas = [SimpleNamespace(client=SimpleNamespace(connected=True, rest=self._rest))]
        self.state, self.last_error = "ready", None
        self.starts = 0

    async def _rest(self, *, asleep: bool) -> None:
        await asyncio.sleep(0)

    def launch(self) -> None:
        self.starts += 1

    async def ready(self, *, once: bool = False) -> None:
        await asyncio.sleep(0)

    async def stop(self, drain_s: float | None = None) -> None:
        await asyncio.sleep(0)


def run(scene: Callable[[], Awaitable[None]]) -> bool:
    async def main() -> None:
        async with asyncio.timeout(20):
            await scene()

    asyncio.run(main())
    return True


def house(*names: str) -> tuple[Fleet, list[Deployment], list[Any]]:
    """A fleet with room for one, its models, and their engines."""
    pools: list[Any] = [Engines() for _ in names]
    clock = asyncio.get_running_loop().time
    made = [Deployment(name, pool, Needs(weights=10), clock=clock, on_device=True) for name, pool in zip(names, pools)]
    return Fleet(made, budget=10), made, pools


def test_models_that_are_wanted_at_once_take_turns() -> None:
    async def scene() -> None:
        _, made, pools = house("a", "b", "c")
        served: list[str] = []

        async def ask(deployment: Deployment) -> None:
            visit = await deployment.arrive()
            served.append(deployment.name)
            await asyncio.sleep(0)
            visit.leave()

        await asyncio.gather(*(ask(deployment) for deployment in made for _ in range(3)))
        assert sorted(served) == sorted("abc" * 3)
        assert [pool.starts for pool in pools] == [1, 1, 1], "each stays for those who waited for it"

    assert run(scene)


def test_admins_who_load_models_at_once_all_have_an_answer() -> None:
    async def scene() -> None:
        fleet, made, pools = house("a", "b")
        await asyncio.gather(*(fleet.load(deployment) for deployment in made))
        assert [pool.starts for pool in pools] == [1, 1]
        assert [deployment.awake for deployment in made] == [False, True]

    assert run(scene)


def test_an_engine_that_dies_at_its_start_is_tried_again_by_the_next_who_asks(tmp_path: Path) -> None:
    async def scene() -> None:
        replica = Replica(
            EngineConfig(),
            socket_path=tmp_path / "engine.sock",
            log_path=tmp_path / "engine.log",
            command=["/bin/sh", "-c", "echo error: out of memory; exit 137", "engine"],
        )
        clock = asyncio.get_running_loop().time
        broken, other = Deployment("a", Pool([replica]), clock=clock), Deployment("b", Pool([replica]), clock=clock)
        fleet = Fleet([broken, other])
        for _ in range(2):
            with pytest.raises(NotNowError, match="cannot be loaded"):
                await fleet.load(broken)
            assert (broken.rest, broken.last_error, replica.pid) == (Rest.AWAY, "out of memory", None)
        await fleet.unload(other)  # nobody stands in the way of other moves

    assert run(scene)
