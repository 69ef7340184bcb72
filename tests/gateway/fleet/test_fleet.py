"""Models that take turns in one memory: whoever waits for one gets it, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.generation import EngineError
from gateway.fleet.budget import Rest
from gateway.fleet.deployment import Deployment, Needs, NotNowError
from gateway.fleet.fleet import Fleet
from gateway.fleet.pool import Pool
from gateway.fleet.replicas import Replica, State


class Engines:
    """A pool whose engines start in an instant, or never; they rest when `free` is set."""

    def __init__(self) -> None:
        client = SimpleNamespace(connected=True, rest=self._rest)
        self.replicas = [SimpleNamespace(client=client, state=State.READY) for _ in range(2)]
        self.last_error = None
        self.starts = self.stops = 0
        self.rests: list[bool] = []
        self.fault: EngineError | None = None
        self.free = asyncio.Event()
        self.free.set()

    def on_state(self, callback: Callable[[Any], None]) -> None:
        self._callback = callback

    def lose(self) -> None:
        """The process of one of them has gone."""
        self.replicas[1].state = State.DOWN
        self.replicas[1].client = SimpleNamespace(connected=False)
        self._callback(self)

    async def _rest(self, *, asleep: bool) -> None:
        await self.free.wait()
        self.rests.append(asleep)
        if self.fault is not None and not asleep:
            raise self.fault

    def launch(self) -> None:
        self.starts += 1

    async def ready(self, *, once: bool = False) -> None:
        await asyncio.sleep(0)

    async def stop(self, drain_s: float | None = None) -> None:
        self.stops += 1
        await asyncio.sleep(0)


def run(scene: Callable[[], Awaitable[None]]) -> bool:
    async def main() -> None:
        async with asyncio.timeout(20):
            await scene()

    asyncio.run(main())
    return True


def house(*names: str, room: int = 1, **settings: float) -> tuple[Fleet, list[Deployment], list[Any]]:
    """A fleet with room for one model, or more, its models, and their engines."""
    pools: list[Any] = [Engines() for _ in names]
    clock = asyncio.get_running_loop().time
    made = [Deployment(name, pool, Needs(weights=5), clock=clock, on_device=True) for name, pool in zip(names, pools)]
    return Fleet(made, budget=10 * room, **settings), made, pools


async def turns(reached: Callable[[], bool]) -> None:
    """Let others go on until it has come to be."""
    for _ in range(10_000):
        if reached():
            return
        await asyncio.sleep(0)
    raise AssertionError("it does not come to be")


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


@pytest.mark.parametrize("act", ["sleep", "unload"])
def test_nobody_else_waits_for_the_requests_of_a_model_that_an_admin_sends_away(act: str) -> None:
    async def scene() -> None:
        fleet, (busy, other, third), pools = house("busy", "other", "third", room=2, drain_s=3600, wake_s=3600)
        visit = await busy.arrive()
        going = asyncio.create_task(getattr(fleet, act)(busy))
        await turns(lambda: busy.moving == "leaving")
        await fleet.load(other)
        await fleet.sleep(other)
        await fleet.load(third)
        assert (other.rest, third.awake, busy.rest, busy.moving) == (Rest.ASLEEP, True, Rest.AWAKE, "leaving")
        asked = asyncio.create_task(busy.arrive())
        await turns(lambda: busy.expected == 1)
        assert not going.done() and not asked.done()
        visit.leave()
        await going
        (await asked).leave()
        assert busy.awake and pools[0].starts == (1 if act == "sleep" else 2), "it came back for who asked meanwhile"

    assert run(scene)


def test_who_needs_the_memory_of_a_model_that_leaves_waits_for_it() -> None:
    async def scene() -> None:
        fleet, (busy, other), _ = house("busy", "other", drain_s=3600, wake_s=3600)
        visit = await busy.arrive()
        going = asyncio.create_task(fleet.unload(busy))
        coming = asyncio.create_task(fleet.load(other))
        await turns(lambda: "other" in fleet._cramped)
        assert not coming.done() and other.rest is Rest.AWAY
        visit.leave()
        await asyncio.gather(going, coming)
        assert (busy.rest, other.rest) == (Rest.AWAY, Rest.AWAKE)

    assert run(scene)


def test_what_was_decided_is_decided_anew_where_a_model_has_begun_to_leave_since() -> None:
    """Two have to make room; while the first does, an admin sends the second away, which takes its time."""

    async def scene() -> None:
        fleet, (first, second, large), pools = house("first", "second", "large", room=2, drain_s=3600, wake_s=3600)
        large._needs = Needs(weights=10)
        await fleet.load(first)
        await fleet.load(second)
        pools[0].free.clear()
        pools[1].free.clear()
        coming = asyncio.create_task(fleet.load(large))
        await turns(lambda: first.moving == "leaving")
        going = asyncio.create_task(fleet.sleep(second))
        await turns(lambda: second.moving == "leaving")
        pools[0].free.set()
        await turns(lambda: "large" in fleet._cramped)
        assert not going.done() and not coming.done()
        pools[1].free.set()
        await asyncio.gather(going, coming)
        assert [one.rest for one in (first, second, large)] == [Rest.ASLEEP, Rest.ASLEEP, Rest.AWAKE]
        assert pools[1].rests == [True, True], "each of its engines once"

    assert run(scene)


def test_an_engine_that_dies_while_its_model_sleeps_does_not_come_back_in_memory_that_nobody_counts() -> None:
    async def scene() -> None:
        fleet, (model, other), pools = house("model", "other")
        await fleet.load(model)
        await fleet.sleep(model)
        pools[0].lose()
        assert model.moving == "leaving", "before anything else can move it"
        coming = asyncio.create_task(fleet.load(model))
        await coming
        assert (pools[0].stops, pools[0].starts, model.rest) == (1, 2, Rest.AWAKE), (
            "ended, and loaded as it is asked for"
        )
        await fleet.load(other)
        assert (model.rest, pools[0].stops) == (Rest.AWAY, 2), "who has lost an engine does not sleep but goes"
        assert sum(one.holding.bytes(one.rest) for one in (model, other)) <= fleet.budget
        await fleet.stop()

    assert run(scene)


def test_a_process_that_is_killed_in_its_sleep_is_not_started_again_until_it_is_asked_for(tmp_path: Path) -> None:
    async def scene() -> None:
        replica = Replica(
            EngineConfig(),
            socket_path=tmp_path / "engine.sock",
            log_path=tmp_path / "engine.log",
            command=[sys.executable, "-m", "engine.scripted"],
        )
        gone = asyncio.Event()
        replica.on_state(lambda changed: gone.set() if changed.state is State.STOPPED else None)
        model = Deployment("a", Pool([replica]), clock=asyncio.get_running_loop().time)
        fleet = Fleet([model])
        await fleet.load(model)
        await fleet.sleep(model)
        assert replica.pid is not None and model.rest is Rest.ASLEEP
        os.kill(replica.pid, signal.SIGKILL)
        await gone.wait()
        await model.settled()
        assert (model.rest, replica.pid, replica.restarts) == (Rest.AWAY, None, 0)
        await fleet.load(model)
        assert model.awake and replica.client.connected
        await fleet.stop(0)

    assert run(scene)


@pytest.mark.parametrize("lost", [False, True], ids=["all answer", "one has gone"])
def test_a_model_that_cannot_wake_is_asleep_again_or_away(lost: bool) -> None:
    """One of its engines had woken."""

    async def scene() -> None:
        fleet, (model,), pools = house("model")
        await fleet.load(model)
        await fleet.sleep(model)
        pools[0].fault = EngineError("engine_error", "no room on the device")
        pools[0].free.clear()
        coming = asyncio.create_task(fleet.load(model))
        await turns(lambda: model.moving == "waking")
        if lost:
            pools[0].lose()
        pools[0].free.set()
        with pytest.raises(NotNowError, match="cannot be loaded"):
            await coming
        assert (model.rest, model.moving) == (Rest.AWAY if lost else Rest.ASLEEP, "")
        assert pools[0].rests[4:] == ([] if lost else [True, True]) and pools[0].stops == int(lost)
        pools[0].fault = None
        await fleet.load(model)
        assert model.awake

    assert run(scene)
