"""One model as it is deployed: its replicas, what it takes of the memory, and who is using it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection

import msgspec

from engine.client import EngineClient
from engine.generation import EngineError, GenerateRequest
from gateway.fleet.budget import Holding, Rest
from gateway.fleet.pool import Pool, Seat
from gateway.fleet.replicas import StartError, State

log = logging.getLogger(__name__)


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one replica, in bytes."""

    weights: int = 0
    cache: int = 0
    """The KV cache."""
    process: int = 0
    """What a process takes beside them."""


class Manners(msgspec.Struct, frozen=True, kw_only=True):
    """What a model does when nobody uses it."""

    sleep_s: float = 0.0
    """Seconds after which it sleeps; 0: never."""
    unload_s: float = 0.0
    """Seconds after which it is unloaded; 0: never."""
    pinned: bool = False
    """It stays awake, whoever needs the memory."""


NOTHING = Needs()
ALWAYS_AWAKE = Manners()


class NotNowError(Exception):
    """A model cannot be awake now; the message says why."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class Visit:
    """One request's use of a model: while it lasts the model stays awake."""

    __slots__ = ("_deployment", "_over")

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._over = False

    def leave(self) -> None:
        """The request is over; a second call changes nothing."""
        if not self._over:
            self._over = True
            self._deployment.left()


class Deployment:
    """The engines of one model. Belongs to one event loop.

    Its moves (load, sleep, wake, unload) are made by the fleet, one at a time; requests only ask whether it is awake.
    One it makes by itself: an engine that goes while it sleeps would come back awake, in memory that nobody counts; so
    the model is unloaded, and loaded when somebody asks for it.
    """

    def __init__(
        self,
        name: str,
        pool: Pool,
        needs: Needs = NOTHING,
        manners: Manners = ALWAYS_AWAKE,
        *,
        clock: Callable[[], float],
        on_device: bool = False,
    ) -> None:
        """`clock` gives seconds; `on_device` says that the memory is a GPU's, of which a sleeping model has nothing."""
        self.name = name
        self.pool = pool
        self.manners = manners
        self.rest = Rest.AWAY
        self.moving = ""
        """What it does now: "loading", "waking", "leaving"; empty while it is settled. No request begins meanwhile."""
        self.visits = 0
        """Requests that use it."""
        self.expected = 0
        """Requests that wait for it to be awake: they use it from the moment it is, before they have seen it."""
        self.last_error: str | None = None
        """Why it could not be loaded, last time."""
        self.woke_in_s: float | None = None
        """How long it took to wake or load, last time."""
        self.wake: Callable[[Deployment], Awaitable[None]] = _nobody
        """Who wakes it for a request; set by the fleet."""
        self._needs = needs
        self._clock = clock
        self._on_device = on_device
        self._used_at = clock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._changed: list[Callable[[], None]] = []
        self._settled = asyncio.Event()
        self._settled.set()
        self._falling: asyncio.Task[None] | None = None
        pool.on_state(self._look_after)

    # -- what requests ask ------------------------------------------------------------------------------

    @property
    def awake(self) -> bool:
        """True while a request may begin."""
        return self.rest is Rest.AWAKE and not self.moving

    @property
    def connected(self) -> bool:
        """True while an engine answers."""
        return self.pool.connected

    @property
    def client(self) -> EngineClient:
        """The connection to one of the engines."""
        return self.pool.client

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer together; 0 before it was loaded first."""
        return self.pool.max_context

    def place(self, request: GenerateRequest, avoid: Collection[int] = ()) -> Seat:
        """Choose who computes a request. EngineError where there is none to choose from."""
        return self.pool.place(request, avoid)

    async def arrive(self) -> Visit:
        """Begin to use it, and wake it where it is not awake. Raises NotNowError."""
        if not self.awake:
            await self._awaken()
        self.visits += 1
        self._idle.clear()
        return Visit(self)

    async def _awaken(self) -> None:
        self.expected += 1
        try:
            while not self.awake:
                await self.wake(self)
        finally:
            self.expected -= 1
            self._tell()  # where it was in vain, others may have the room

    def left(self) -> None:
        """A request is over."""
        self.visits -= 1
        self._used_at = self._clock()
        if not self.visits:
            self._idle.set()
        self._tell()

    # -- what the fleet asks ----------------------------------------------------------------------------

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call back when a request left or a move is over."""
        self._changed.append(callback)

    @property
    def now(self) -> float:
        """The time that `used_at` is told in."""
        return self._clock()

    @property
    def holding(self) -> Holding:
        """Its memory, for the decision who makes room."""
        replicas, needs = len(self.pool.replicas), self._needs
        asleep = 0 if self._on_device else needs.weights + needs.process
        used = self.visits or self.moving or (self.expected and self.rest is Rest.AWAKE)
        return Holding(
            self.name,
            self.rest,
            replicas * (needs.weights + needs.cache + needs.process),
            replicas * asleep,
            not used and not self.manners.pinned,
            self._used_at,
        )

    async def settled(self) -> None:
        """Wait until it is not on the move; another move may begin in the next moment."""
        while self.moving:
            await self._settled.wait()

    def launch(self) -> None:
        """Start its engines, and count as awake: `ready` says when they answer."""
        self.rest = Rest.AWAKE
        self.pool.launch()

    async def load(self) -> None:
        """Start its engines, until they answer. Raises StartError."""
        try:
            async with _Move(self, "loading"):
                self.pool.launch()
                await self.pool.ready(once=True)  # others wait for this move to be over
                self.rest, self.last_error = Rest.AWAKE, None
        except BaseException as error:  # a cancelled one, too, leaves no engine half started
            if isinstance(error, StartError):
                self.last_error = str(error)
            await self.pool.stop(0)
            raise

    async def sleep(self, drain_s: float) -> bool:
        """Let requests end and have the engines give back what they can; False where they do not end within drain_s.
        One that does not answer is ended, and the others with it. Raises EngineError when an engine does not sleep."""
        if self.rest is not Rest.AWAKE:
            return True
        async with _Move(self, "leaving"):
            if not await self._quiet(drain_s):
                return False
            await self._lie_down()
            return True

    async def rise(self) -> None:
        """Have sleeping engines take their memory again. Raises EngineError; then none has it."""
        async with _Move(self, "waking"):
            try:
                await self._each(asleep=False)
            except EngineError:
                try:
                    await self._lie_down()
                except EngineError:
                    await self._end()
                raise
            self.rest = Rest.AWAKE

    async def unload(self, drain_s: float) -> bool:
        """Let requests end, and end the engines; False where they do not end within drain_s."""
        if self.rest is Rest.AWAY:
            return True
        async with _Move(self, "leaving"):
            if not await self._quiet(drain_s):
                return False
            await self._end()
            return True

    async def stop(self, drain_s: float | None = None) -> None:
        """End everything, for good."""
        if self._falling is not None:
            await asyncio.wait({self._falling})
        await self.pool.stop(drain_s)

    async def _quiet(self, limit_s: float) -> bool:
        """Wait until nobody uses it."""
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def _each(self, *, asleep: bool) -> None:
        """Have every engine that answers sleep or wake. Raises EngineError where none answers or one does not."""
        clients = [replica.client for replica in self.pool.replicas if replica.client.connected]
        if not clients:
            raise EngineError("engine_down", self.pool.last_error or "the engine is not running")
        await asyncio.gather(*(client.rest(asleep=asleep) for client in clients))

    async def _lie_down(self) -> None:
        """Have every engine sleep; where one does not answer, end them all. Raises EngineError."""
        if self._complete:
            await self._each(asleep=True)
        if self._complete:
            self.rest = Rest.ASLEEP
        else:
            await self._end()

    async def _end(self) -> None:
        await self.pool.stop(0)
        self.rest = Rest.AWAY

    @property
    def _complete(self) -> bool:
        """Every engine answers."""
        return all(replica.client.connected for replica in self.pool.replicas)

    def _look_after(self, pool: Pool) -> None:
        """An engine has changed its state. While the model moves, the move sees to it."""
        if self.rest is Rest.ASLEEP and not self.moving and any(one.state is State.DOWN for one in pool.replicas):
            log.warning("%s: an engine has gone while it slept; it is unloaded", self.name)
            self._falling = asyncio.create_task(self._fall(_Move(self, "leaving")), name=f"unload {self.name}")

    async def _fall(self, move: _Move) -> None:
        async with move:
            await self._end()

    def _tell(self) -> None:
        for callback in self._changed:
            callback()


class _Move:
    """A deployment on the move, from now on: no request begins, and whoever waits for its end is told."""

    def __init__(self, deployment: Deployment, moving: str) -> None:
        assert not deployment.moving, f"{deployment.name} is {deployment.moving}"
        self._deployment = deployment
        self._moving = moving
        deployment.moving = moving
        deployment._settled.clear()
        self._began = deployment._clock()

    async def __aenter__(self) -> None:
        """It has begun."""

    async def __aexit__(self, *_: object) -> None:
        deployment = self._deployment
        deployment.moving = ""
        deployment._settled.set()
        deployment._used_at = deployment._clock()
        if self._moving != "leaving":
            deployment.woke_in_s = deployment._used_at - self._began
        deployment._tell()


async def _nobody(deployment: Deployment) -> None:
    raise NotNowError(f"The model '{deployment.name}' is not loaded.", 5.0)
