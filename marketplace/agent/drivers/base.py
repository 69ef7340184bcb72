"""The protocol of drivers, and what they may say of the machines that carry this node's label."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from marketplace.agent.wire import Capabilities, Cause, Ending, Port, Power, Sample, Spec, Via

Kind = Literal["VirtualMachine", "Container"]
Progress = Callable[[Literal["Pulling", "Creating"]], None]

STOP_TIMEOUT_S = 60.0


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that a driver found, running or not."""

    id: str
    kind: Kind
    power: Power
    ips: list[str] = []
    ports: list[Port] = []
    """those that are published now"""
    gpus: list[str] = []
    """PCI slots or UUIDs that it holds"""


class ListingFailedError(Exception):
    """The machines cannot be listed now, or not all of them: nothing may be concluded from it."""


class DriverError(Exception):
    """A driver could not do what it was asked. The message is for the renter; the tail for the operator."""

    def __init__(self, cause: Cause, message: str, tail: str = "") -> None:
        """`cause` is one of the causes of failure that renters are shown."""
        super().__init__(message)
        self.cause = cause
        self.message = message
        self.tail = tail


class Driver(Protocol):
    """Makes, changes and ends machines of one kind. Every method may be repeated: what is done already stays done."""

    kind: Kind

    async def probe(self) -> Capabilities:
        """Find out by trying what is possible here."""

    async def listing(self) -> list[Seen]:
        """Every machine with this node's label. Raises ListingFailedError; never returns a part."""

    async def create(self, id: str, spec: Spec, folder: Path, progress: Progress) -> None:
        """Define and start; a half-made one is finished. Raises DriverError, and may then leave remains."""

    async def start(self, id: str) -> None:
        """Start what is shut off. Raises DriverError."""

    async def stop(self, id: str, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ask it to shut down; after `timeout_s` end it. It stays defined."""

    async def pause(self, id: str) -> None:
        """Freeze it."""

    async def resume(self, id: str) -> None:
        """Go on."""

    async def reset(self, id: str) -> None:
        """Press the button: what runs begins anew, without a shutdown."""

    async def destroy(self, id: str) -> None:
        """End and undefine it; a disk stays in its folder. No error where there is nothing."""

    async def publish(self, id: str, ports: list[Port]) -> None:
        """Publish ports of a running machine that are not published."""

    async def readiness(self, id: str, spec: Spec) -> Via | None:
        """Whether it shows from outside that it is ready."""

    async def metrics(self, id: str) -> Sample | None:
        """Its use of the node now; None where it does not run."""

    async def disk_use(self, id: str) -> int | None:
        """Bytes that it has written beyond its image; None where it does not run, or something else holds it to its
        disk.
        """

    async def gpu_problem(self, id: str) -> str | None:
        """Why a running machine no longer sees its GPUs; None where it does, or nobody can tell."""

    async def tail_log(self, id: str, lines: int) -> str:
        """The last lines of its console or log."""

    async def ending(self, id: str, now: int) -> Ending | None:
        """How what is off now came to its end; None where it runs, is gone, or may be started again by its renter."""
