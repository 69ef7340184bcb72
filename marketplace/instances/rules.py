"""What an instance may become, pure: its status, and what may be asked of a virtual machine."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

from marketplace.agent.wire import Cause, Power, Want
from marketplace.events.transitions import Machine, Moves
from marketplace.instances.tables import instance

Status = Literal["Initializing", "Active", "Deactivating", "Inactive", "Failed"]
LIVE: frozenset[Status] = frozenset({"Initializing", "Active", "Deactivating"})
OVER: frozenset[Status] = frozenset({"Inactive", "Failed"})

MOVES: Moves = MappingProxyType(
    {
        # Its node says that it failed, and that nothing of it is left.
        ("Initializing", "fail"): "Failed",
        # It took too long, or cannot be: it is taken down first, and has failed once it is gone.
        ("Initializing", "give_up"): "Deactivating",
        ("Deactivating", "fail"): "Failed",
        ("Initializing", "ready"): "Active",
        ("Initializing", "terminate"): "Deactivating",
        ("Initializing", "force_drain"): "Deactivating",
        ("Initializing", "node_lost"): "Failed",
        ("Active", "terminate"): "Deactivating",
        ("Active", "force_drain"): "Deactivating",
        ("Active", "out_of_funds"): "Deactivating",
        # Its machine vanished from a node that is heard.
        ("Active", "missing"): "Deactivating",
        # Its command came to its end: a container is there for as long as that runs.
        ("Active", "ended"): "Deactivating",
        ("Deactivating", "gone"): "Inactive",
        ("Deactivating", "node_lost"): "Inactive",
        # The same for one that was failing.
        ("Deactivating", "node_lost_failing"): "Failed",
        ("Failed", "terminate"): "Inactive",
    }
)
MACHINE = Machine("instances", instance, "status", MOVES)

Action = Literal["start", "stop", "pause", "resume", "reset"]
ASKED: frozenset[Action] = frozenset({"start", "stop", "pause", "resume", "reset"})
_WANTS: MappingProxyType[tuple[str, Action], Want] = MappingProxyType(
    {
        ("Shutoff", "start"): "Running",
        ("Crashed", "start"): "Running",
        ("Running", "stop"): "Stopped",
        ("Blocked", "stop"): "Stopped",
        ("Paused", "stop"): "Stopped",
        ("Crashed", "stop"): "Stopped",
        ("Running", "pause"): "Paused",
        ("Blocked", "pause"): "Paused",
        ("Paused", "resume"): "Running",
        ("Running", "reset"): "Running",
        ("Blocked", "reset"): "Running",
        ("Paused", "reset"): "Running",
        ("Crashed", "reset"): "Running",
    }
)
_AFTER: MappingProxyType[Want, Power] = MappingProxyType(
    {"Running": "Running", "Stopped": "Shutoff", "Paused": "Paused"}
)

_STOPPED: frozenset[Power] = frozenset({"Created", "Exited", "Dead"})

_FAILURES: MappingProxyType[Cause, str] = MappingProxyType(
    {
        "BadImage": "DockerImagePullFailed",
        "BadCommand": "DockerCommandFailed",
        "VmBootFailed": "VmBootFailed",
        "PlatformError": "PlatformError",
    }
)


def failure(kind: str, cause: Cause) -> str:
    """What the renter of such a machine reads where its node names this cause: a virtual machine without its image
    cannot be booted."""
    return "VmBootFailed" if kind == "VirtualMachine" and cause == "BadImage" else _FAILURES[cause]


def state_of(power: str, want: Want, *, settled: bool) -> str:
    """The state that a virtual machine is in, or is on its way to while its node has not carried out what is wanted."""
    return power if settled and power else _AFTER.get(want, "NoState")


def asked(state: str, action: Action) -> Want | None:
    """What its node should make of a virtual machine in that state; None for what cannot be asked of it."""
    return _WANTS.get((state, action))


def has_stopped(kind: str, power: Power | None) -> bool:
    """Whether a machine that was started is over: a container whose command has ended. What is off of a virtual machine
    may be started again."""
    return kind == "Container" and power in _STOPPED


def starts_at_once(kind: str, *, exempt: bool) -> bool:
    """Whether it is active as soon as it runs: containers signal nothing, and what costs nothing need not wait."""
    return kind == "Container" or exempt
