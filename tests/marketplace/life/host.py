"""Machines of a provider with the real agent on each, hypervisors in memory, and a line to the server that may lose,
repeat and delay what it carries."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from marketplace.agent import readiness
from marketplace.agent.client import RefusedError, ServerError, StaleSessionError, UnreachableError
from marketplace.agent.disks import DISK, RetainedDisks
from marketplace.agent.drivers.base import Kind, Progress
from marketplace.agent.drivers.fake import FakeDriver, Hypervisor, KilledError, Machine
from marketplace.agent.inventory_wire import Inventory
from marketplace.agent.keeper import Keeper
from marketplace.agent.leases import LeaseBook
from marketplace.agent.node import Agent, Surroundings
from marketplace.agent.reconcile import SECOND
from marketplace.agent.records import Records
from marketplace.agent.wire import Accepted, Capabilities, Poll, Polled, Ready, Register, Registered, Spec
from tests.marketplace.life.invariants import Thing

T = TypeVar("T")
Fault = Literal["lost", "unanswered", "twice", "late"]
FAULTS: tuple[Fault, ...] = ("lost", "unanswered", "twice", "late")
FOREIGN = Machine(id="foreign", label=None, power="Running", gpus=[], ports=[])
ABLE = Capabilities(vm=True, container=True)


class Server(Protocol):
    """Who answers nodes."""

    now: int

    def serve(self, name: str, body: bytes) -> bytes:
        """Take one message. StaleSessionError, RefusedError, UnreachableError when it dies of it."""

    def repeat(self, name: str, body: bytes) -> None:
        """Take a message that was taken a moment ago."""


class Line:
    """What an agent takes for its server. `faults` befall its next messages, in order."""

    def __init__(self, server: Server) -> None:
        self.faults: collections.deque[Fault] = collections.deque()
        self.late: list[tuple[str, bytes]] = []
        """messages that are under way, and that their sender has given up"""
        self.cut = False
        self._server = server

    async def register(self, message: Register) -> Registered:
        """Begin a session."""
        return self._carry("register", message, Registered)

    async def poll(self, message: Poll, *, wait_s: float) -> Polled:
        """Report, without waiting for news."""
        return self._carry("poll", msgspec.structs.replace(message, wait_s=0), Polled)

    async def ready(self, message: Ready) -> None:
        """Say that an instance is ready."""
        self._carry("ready", message, Accepted)

    def deliver(self, which: int) -> None:
        """Let a delayed message arrive; nobody hears the answer."""
        name, body = self.late.pop(which % len(self.late))
        with contextlib.suppress(ServerError):
            self._server.serve(name, body)

    def _carry(self, name: str, message: msgspec.Struct, kind: type[T]) -> T:
        body = msgspec.json.encode(message)
        fault = self.faults.popleft() if self.faults else None
        if self.cut or fault == "lost":
            raise UnreachableError("lost")
        if fault == "late":
            self.late.append((name, body))
            raise UnreachableError("late")
        answer = self._server.serve(name, body)
        if fault == "twice":
            self._server.repeat(name, body)
        if fault == "unanswered":
            raise UnreachableError("the answer was lost")
        return msgspec.json.decode(answer, type=kind)


class DiskDriver(FakeDriver):
    """Machines that have a disk."""

    async def create(self, id: str, spec: Spec, folder: Path, progress: Progress) -> None:
        """As the fake, with a file for its disk."""
        if self.kind == "VirtualMachine":
            (folder / DISK).touch()
        await super().create(id, spec, folder, progress)


class Engines:
    """Processes of inference engines: numbers, and whether they live."""

    def __init__(self) -> None:
        self.living: set[int] = set()
        self._last = 1 << 22

    def start(self) -> int:
        """A new one."""
        self._last += 1
        self.living.add(self._last)
        return self._last

    def started(self, pid: int) -> int | None:
        """When it began, if it lives."""
        return pid if pid in self.living else None

    def descendants(self, pid: int) -> list[int]:
        """Itself."""
        return [pid]


class Host:
    """One machine: its hypervisors outlive its agents, and its folder both."""

    def __init__(
        self, server: Server, folder: Path, inventory: Inventory, engines: Engines, clock: Callable[[], int]
    ) -> None:
        self.server = server
        self.folder = folder
        self.inventory = inventory
        self.name = inventory.hostname
        self.engines = engines
        self.clock = clock
        self.line = Line(server)
        self.boots = 1
        self.node_id = ""
        self.hypervisors: dict[Kind, Hypervisor] = {"VirtualMachine": Hypervisor(), "Container": Hypervisor()}
        self.hypervisors["VirtualMachine"].machines["foreign"] = msgspec.structs.replace(FOREIGN)
        self.slots = {gpu.uuid: gpu.pci_slot for gpu in inventory.gpus if gpu.uuid}
        self.begin()

    @property
    def machines(self) -> dict[str, Machine]:
        """What really runs here, of ours."""
        return {id: one for kind in self.hypervisors.values() for id, one in kind.machines.items() if one.label}

    def begin(self) -> None:
        """The agent's process starts, on what the folder keeps."""
        drivers = {kind: DiskDriver(hypervisor, kind=kind) for kind, hypervisor in self.hypervisors.items()}
        self.keeper = Keeper(
            records=Records(self.folder / "instances", durable=False),
            disks=RetainedDisks(self.folder / "retained"),
            drivers=drivers,
            now=self.clock,
        )
        self.keeper.slots = dict(self.slots)
        self.leases = LeaseBook(self.folder / "leases.json", kill=self.engines.living.discard)
        around = Surroundings(
            machine_id=f"machine-{self.name}",
            boot_id=f"boot-{self.boots}",
            inventory=lambda: self.inventory,
            drivers=drivers,
            now=self.clock,
        )
        self.agent: Any = Agent(self.line, self.keeper, self.leases, around)  # type: ignore[arg-type]
        self.registered = False

    def reboot(self) -> None:
        """The machine goes down and comes up: nothing of what ran runs, domains stay defined and containers do not."""
        self.boots += 1
        for one in self.hypervisors["VirtualMachine"].machines.values():
            one.power, one.ports = ("Shutoff", []) if one.label else (one.power, one.ports)
        self.hypervisors["Container"].machines.clear()
        self.engines.living -= {entry.wanted.pid for entry in self.leases._entries.values()}
        self.begin()

    async def turn(self) -> None:
        """What the agent does in a few seconds; it may die of it, and begin again."""
        try:
            await self._turn()
        except KilledError:
            await self.keeper.close()
            self.begin()

    async def _turn(self) -> None:
        try:
            if not self.registered:
                await self.agent._register(ABLE)
                self.registered = True
                self.node_id = self.agent._session.node_id
            if self.clock() - self.agent._heard_at > self.agent._session.lease_s * SECOND:
                self.keeper.connected = False
            await self._look()
            await self._tell_ready()
            self.leases.enforce(self.clock())
            await self.agent._poll()
        except StaleSessionError:
            self.registered = False
        except UnreachableError:
            return

    async def _look(self) -> None:
        await self.agent._round()
        await self.keeper.settle()
        await readiness.look(self.keeper)
        await self.agent._round()
        await self.keeper.settle()

    async def _tell_ready(self) -> None:
        for record in readiness.untold(self.keeper):
            told = Ready(instance_id=record.id, token=record.spec.readiness_token, via=record.ready_via)  # type: ignore[union-attr,arg-type]
            with contextlib.suppress(RefusedError):
                await self.line.ready(told)
            self.keeper.mark_told(record.id)

    def things(self) -> list[Thing]:
        """What really runs here, with the devices it has."""
        return [
            Thing(self.node_id, id, tuple(self._slot(name) for name in one.gpus)) for id, one in self.machines.items()
        ]

    def _slot(self, name: str) -> str:
        uuid, part, start = name.partition("/")
        return f"{self.slots.get(uuid, uuid)}{part}{start.partition('/')[0]}"

    def wrong(self) -> list[str]:
        """What the node's own records, engines and neighbours show to be wrong."""
        found = []
        if self.hypervisors["VirtualMachine"].machines.get("foreign") != FOREIGN:
            found.append(f"I12: {self.name} touched a machine of somebody else")
        known = set(Records(self.folder / "instances", durable=False).all())
        found += [f"I12: {self.name} has {id} without a record" for id in self.machines.keys() - known]
        held = {
            slot
            for entry in self.leases._entries.values()
            if entry.wanted.pid in self.engines.living
            for slot in entry.lease.gpus
        }
        for thing in self.things():
            both = held & {name.partition("/")[0] for name in thing.gpus}
            found += [f"I1: {slot} of {self.name} has an engine and {thing.id}" for slot in both]
        return found

    def heal(self) -> None:
        """Every fault is over."""
        self.line.faults.clear()
        self.line.cut = False
        for hypervisor in self.hypervisors.values():
            hypervisor.faults.clear()
            hypervisor.listing_fails = False


def run(loop: asyncio.AbstractEventLoop, host: Host, times: int = 1) -> None:
    """Let an agent have so many turns."""
    for _ in range(times):
        loop.run_until_complete(host.turn())
