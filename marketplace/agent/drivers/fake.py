"""A driver without machines: a hypervisor in memory that outlives agents, and whose faults are scripted."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from marketplace.agent.drivers.base import STOP_TIMEOUT_S, DriverError, Kind, ListingFailedError, Progress, Seen
from marketplace.agent.wire import Capabilities, Cause, Ending, Port, Power, Sample, Spec, Via

Fault = Literal["error", "killed-before", "killed-after"]


class KilledError(BaseException):
    """The agent's process ends here, as by kill -9: nothing after this line runs."""


class Machine(msgspec.Struct, kw_only=True):
    """A machine in the fake hypervisor."""

    id: str
    label: str | None
    power: Power
    gpus: list[str]
    ports: list[Port]
    ready: bool = False
    gpu_problem: str | None = None
    disk_use: int | None = None
    resets: int = 0
    starts: int = 0
    status: int = 0
    """with which a container's command ended"""


class Hypervisor:
    """What the fake driver drives. `done` counts every effect, so that a test sees what was done twice."""

    def __init__(self) -> None:
        """Empty, and nothing goes wrong."""
        self.machines: dict[str, Machine] = {}
        self.listing_fails = False
        self.faults: collections.deque[tuple[str, Fault]] = collections.deque()
        self.done: list[tuple[str, str]] = []

    def script(self, faults: Iterable[tuple[str, Fault]]) -> None:
        """Let the next calls of these methods go wrong, each once, in this order."""
        self.faults.extend(faults)

    def fault(self, method: str) -> Fault | None:
        """Take the fault that is due for a call of that method."""
        if self.faults and self.faults[0][0] == method:
            return self.faults.popleft()[1]
        return None


class FakeDriver:
    """Drives the fake hypervisor as an agent with one label."""

    def __init__(self, hypervisor: Hypervisor, *, kind: Kind = "VirtualMachine", label: str = "node") -> None:
        """`label` is the agent's own: machines with another one, or none, are invisible."""
        self.kind: Kind = kind
        self.label = label
        self._hypervisor = hypervisor
        self._off: Power = "Shutoff" if kind == "VirtualMachine" else "Exited"

    async def probe(self) -> Capabilities:
        """Everything works."""
        return Capabilities(vm=self.kind == "VirtualMachine", container=self.kind == "Container", accelerator="tcg")

    async def listing(self) -> list[Seen]:
        """Machines with the label."""
        if self._hypervisor.listing_fails:
            raise ListingFailedError("the hypervisor does not answer")
        return [
            Seen(id=one.id, kind=self.kind, power=one.power, ports=list(one.ports), gpus=list(one.gpus))
            for one in self._hypervisor.machines.values()
            if one.label == self.label
        ]

    async def create(self, id: str, spec: Spec, folder: Path, progress: Progress) -> None:
        """Make a machine that runs."""
        progress("Pulling")
        progress("Creating")

        def work() -> None:
            if id in self._hypervisor.machines:
                return
            self._hypervisor.machines[id] = Machine(
                id=id, label=self.label, power="Running", gpus=list(spec.gpus), ports=list(spec.ports), starts=1
            )

        self._do("create", id, work)

    async def start(self, id: str) -> None:
        """Shut off -> running."""
        self._do("start", id, lambda: self._set(id, "Running", self._off))

    async def stop(self, id: str, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Running -> shut off."""
        self._do("stop", id, lambda: self._set(id, self._off, "Running"))

    async def pause(self, id: str) -> None:
        """Running -> paused."""
        self._do("pause", id, lambda: self._set(id, "Paused", "Running"))

    async def resume(self, id: str) -> None:
        """Paused -> running."""
        self._do("resume", id, lambda: self._set(id, "Running", "Paused"))

    async def reset(self, id: str) -> None:
        """Count a reset."""

        def work() -> None:
            machine = self._hypervisor.machines.get(id)
            if machine is not None and machine.power != self._off:
                machine.resets += 1
                machine.power = "Running"

        self._do("reset", id, work)

    async def destroy(self, id: str) -> None:
        """Remove it."""
        self._do("destroy", id, lambda: self._hypervisor.machines.pop(id, None))

    async def publish(self, id: str, ports: list[Port]) -> None:
        """Add ports."""
        self._do("publish", id, lambda: self._hypervisor.machines[id].ports.extend(ports))

    async def readiness(self, id: str, spec: Spec) -> Via | None:
        """As the test says."""
        machine = self._hypervisor.machines.get(id)
        return "ssh" if machine is not None and machine.ready else None

    async def metrics(self, id: str) -> Sample | None:
        """One second of CPU."""
        return (
            Sample(at=0, instance_id=id, cpu_seconds=1.0, memory_bytes=1) if id in self._hypervisor.machines else None
        )

    async def disk_use(self, id: str) -> int | None:
        """As the test says."""
        machine = self._hypervisor.machines.get(id)
        return None if machine is None or machine.power != "Running" else machine.disk_use

    async def gpu_problem(self, id: str) -> str | None:
        """As the test says."""
        machine = self._hypervisor.machines.get(id)
        return None if machine is None else machine.gpu_problem

    async def tail_log(self, id: str, lines: int) -> str:
        """What was done to it."""
        return "\n".join(method for method, one in self._hypervisor.done if one == id)

    async def ending(self, id: str, now: int) -> Ending | None:
        """As the status says."""
        if self._hypervisor.fault("ending") is not None:
            raise DriverError("PlatformError", "ending went wrong as scripted")
        machine = self._hypervisor.machines.get(id)
        if self.kind == "VirtualMachine" or machine is None or machine.power != self._off:
            return None
        cause: Cause | None = "BadCommand" if machine.status else None
        return Ending(at=now, cause=cause, message=f"It ended with status {machine.status}.")

    def _set(self, id: str, power: Power, before: Power) -> None:
        machine = self._hypervisor.machines.get(id)
        if machine is None:
            raise DriverError("PlatformError", "The machine is not there.")
        if machine.power == before:
            machine.power = power
            machine.starts += power == "Running" and before == self._off

    def _do(self, method: str, id: str, work: object) -> None:
        """Have the effect, and go wrong where it is scripted."""
        assert callable(work)
        fault = self._hypervisor.fault(method)
        if fault == "killed-before":
            raise KilledError(method)
        if fault == "error":
            raise DriverError("PlatformError", f"{method} went wrong as scripted")
        work()
        self._hypervisor.done.append((method, id))
        if fault == "killed-after":
            raise KilledError(method)
