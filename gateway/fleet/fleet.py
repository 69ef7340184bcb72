"""All models of one service under one budget of memory: who is loaded, who sleeps, who makes room for whom.

A request for a model that is not awake wakes it and waits, for a bounded time. Memory is taken by one model at a time,
and made room for only by models that nobody uses: a model finishes its requests before it sleeps or goes, and requests
that come meanwhile wait for it to come back. So no request is dropped by a move.

Who only gives memory back, on an admin's word, needs no turn: what was decided meanwhile counts it as taken. So others
move while it finishes its requests, and who needs its memory is told when it is free.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator

from engine.generation import EngineError
from gateway.fleet.budget import NeverFitsError, Rest, Step, first_ones, idle_act, room_for
from gateway.fleet.deployment import Deployment, NotNowError
from gateway.fleet.replicas import StartError

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks for models that nobody uses."""
RETRY_S = 5.0
"""When a request may come again for which there was no room."""


class BusyError(Exception):
    """A model has requests that do not end in time: it stays as it is."""


class Fleet:
    """The models of one service. Belongs to one event loop."""

    def __init__(
        self, deployments: Iterable[Deployment], *, budget: int = 0, wake_s: float = 30.0, drain_s: float = 30.0
    ) -> None:
        """`budget` is in bytes, 0 without a limit; a request waits `wake_s` for a model; a move that was asked for
        waits `drain_s` for requests to end."""
        self.budget = budget
        self._deployments = {deployment.name: deployment for deployment in deployments}
        self._wake_s = wake_s
        self._drain_s = drain_s
        self._moves = asyncio.Lock()
        """Held by who takes memory, or decides who makes room; never while waiting for a model that is on the move."""
        self._waking: dict[str, asyncio.Task[None]] = {}
        self._cramped: set[str] = set()
        """Models that wait for others not to be in use any more."""
        self._news = asyncio.Event()
        for deployment in self:
            deployment.wake = self._wake
            deployment.on_change(self._tell)

    def __iter__(self) -> Iterator[Deployment]:
        """Deployments in the order of their names' being given."""
        return iter(self._deployments.values())

    def find(self, name: str) -> Deployment | None:
        """The deployment of a model."""
        return self._deployments.get(name)

    def launch(self) -> None:
        """Start those that are loaded from the start: as many as there is room for, in their order. NeverFitsError."""
        for name in first_ones((deployment.holding for deployment in self), self.budget):
            self._deployments[name].launch()

    async def ready(self) -> None:
        """Wait until all that were started answer. StartError."""
        await asyncio.gather(*(d.pool.ready() for d in self if d.rest is Rest.AWAKE))

    async def stop(self, drain_s: float | None = None) -> None:
        """End everything."""
        for task in self._waking.values():
            task.cancel()
        await asyncio.gather(*self._waking.values(), return_exceptions=True)
        await asyncio.gather(*(deployment.stop(drain_s) for deployment in self))

    # -- moves that are asked for -----------------------------------------------------------------------

    async def load(self, deployment: Deployment) -> None:
        """Have a model awake, as a request does that uses it for a moment. Raises NotNowError."""
        visit = await deployment.arrive()
        visit.leave()

    async def sleep(self, deployment: Deployment) -> None:
        """Put a model to sleep once its requests have ended. Raises BusyError, EngineError."""
        await deployment.settled()
        if not await deployment.sleep(self._drain_s):
            raise BusyError(f"{deployment.name} still answers {deployment.visits} requests")

    async def unload(self, deployment: Deployment) -> None:
        """End a model's engines once its requests have ended. Raises BusyError."""
        await deployment.settled()
        if not await deployment.unload(self._drain_s):
            raise BusyError(f"{deployment.name} still answers {deployment.visits} requests")

    # -- waking -----------------------------------------------------------------------------------------

    async def _wake(self, deployment: Deployment) -> None:
        """Have a model awake for a request, within the time that requests wait. All that wait share one attempt."""
        task = self._waking.get(deployment.name)
        if task is None:
            task = asyncio.create_task(self._rouse(deployment), name=f"wake {deployment.name}")
            self._waking[deployment.name] = task
            task.add_done_callback(lambda _: self._waking.pop(deployment.name, None))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # who waits may have left
        try:
            async with asyncio.timeout(self._wake_s):
                await asyncio.shield(task)
        except TimeoutError as error:
            raise self._not_yet(deployment) from error
        except (StartError, EngineError, NeverFitsError) as error:
            log.error("%s cannot be woken: %s", deployment.name, error)
            raise NotNowError(f"The model '{deployment.name}' cannot be loaded at the moment.", RETRY_S) from error

    async def _rouse(self, deployment: Deployment) -> None:
        """Make room, and load or wake. Raises NotNowError where others are in use for too long."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._wake_s
        while True:
            self._news.clear()
            async with self._moves:
                self._cramped.discard(deployment.name)
                if deployment.awake:
                    return
                if not deployment.moving:
                    steps = room_for(deployment.name, [d.holding for d in self], self.budget)
                    if steps is None:
                        self._cramped.add(deployment.name)
                    elif await self._make_room(steps) and not deployment.moving:
                        if deployment.rest is Rest.ASLEEP:
                            await deployment.rise()
                        else:
                            await deployment.load()
                        return
            try:
                async with asyncio.timeout_at(until):
                    await self._news.wait()
            except TimeoutError as error:
                raise self._not_yet(deployment) from error

    def _not_yet(self, deployment: Deployment) -> NotNowError:
        if deployment.name in self._cramped:
            message = f"There is no room for the model '{deployment.name}': others are in use. Please retry later."
        else:
            message = f"The model '{deployment.name}' is not awake yet. Please retry shortly."
        return NotNowError(message, RETRY_S)

    async def _make_room(self, steps: Iterable[Step]) -> bool:
        """False where one of them has begun to move since that was decided: it says when that is over."""
        for name, act in steps:
            other = self._deployments[name]
            if other.moving:
                return False
            log.warning("%s: %s, another model needs the memory", name, act)
            # Nobody uses it, and between the decision and here nothing was awaited but moves like this one: a request
            # that came meanwhile is waited for.
            moved = await (other.sleep(self._drain_s) if act == "sleep" else other.unload(self._drain_s))
            if not moved:
                raise NotNowError(f"The memory is in use by '{name}'. Please retry later.", RETRY_S)
        return True

    # -- idle models ------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Look for ever for models that nobody uses, and let them sleep or go."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Let models sleep or go that have been idle for as long as they say."""
        for deployment in self:
            manners = deployment.manners
            async with self._moves:
                act = idle_act(deployment.holding, deployment.now, manners.sleep_s, manners.unload_s)
                try:
                    if act == "sleep":
                        await deployment.sleep(self._drain_s)
                    elif act == "unload":
                        await deployment.unload(self._drain_s)
                except EngineError as error:  # its supervisor has it back, awake; it is tried again
                    log.warning("%s does not sleep: %s", deployment.name, error.message)

    def _tell(self) -> None:
        self._news.set()
