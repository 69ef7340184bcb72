"""What to do next, pure: desired state × what the drivers see × the node's own records -> actions.

A machine is touched only where it carries the node's label. What nobody mentions is left alone, and what cannot be
seen is not taken for gone: a round whose listing failed decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

import msgspec

from marketplace.agent.drivers.base import Seen
from marketplace.agent.inventory_wire import RetainedDisk
from marketplace.agent.records import Record
from marketplace.agent.wire import (
    Desired,
    DesiredInstance,
    Observed,
    ObservedInstance,
    Phase,
    Port,
    Settings,
    VmSpec,
    Want,
)

SECOND = 1_000_000
STRAY_ROUNDS = 2

Verb = Literal["start", "stop", "pause", "resume"]

_OFF = frozenset({"Shutoff", "Crashed", "Created", "Exited", "Dead"})
_ON = frozenset({"Running", "Blocked", "Restarting"})
_PAUSED = frozenset({"Paused", "PMSuspended"})


class Create(msgspec.Struct, frozen=True):
    """Make it, or finish making it."""

    instance: DesiredInstance


class Power(msgspec.Struct, frozen=True):
    """Take one step towards the wish of a generation."""

    id: str
    verb: Verb


class Applied(msgspec.Struct, frozen=True):
    """The wish of this generation holds: from now on power is the guest's own affair."""

    id: str
    gen: int
    want: Want


class Reset(msgspec.Struct, frozen=True):
    """Reset it once for this number."""

    id: str
    seq: int


class Destroy(msgspec.Struct, frozen=True):
    """End it and keep its disk for `grace_s`."""

    id: str
    grace_s: int
    gen: int = 0
    """generation that this carries out; 0 for a stray"""


class CleanUp(msgspec.Struct, frozen=True):
    """Remove what a failed creation left, then call it Failed."""

    id: str


class Adopt(msgspec.Struct, frozen=True):
    """Begin a record of a labelled machine that has none."""

    seen: Seen
    reset_seq: int = 0
    """resets asked for so far: none of them is repeated"""


class Count(msgspec.Struct, frozen=True):
    """Remember for how many rounds it has been a stray."""

    id: str
    rounds: int


class End(msgspec.Struct, frozen=True):
    """It never came to be, and is not to be any more: say that it is absent."""

    id: str
    gen: int


class Forget(msgspec.Struct, frozen=True):
    """Nothing is left of it and nobody asks for it: drop the record."""

    id: str


class Inquire(msgspec.Struct, frozen=True):
    """It is off, and nobody asked for that: find out how it ended."""

    id: str


class Publish(msgspec.Struct, frozen=True):
    """Publish ports that are missing."""

    id: str
    ports: list[Port]


Action = Create | Power | Applied | Reset | Destroy | CleanUp | Adopt | Count | End | Forget | Inquire | Publish


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a decision is made from."""

    desired: Desired | None
    """None before the first answer of the current session"""
    seen: list[Seen] | None
    """None where a listing failed"""
    records: Mapping[str, Record]
    unknown: Collection[str] = frozenset()
    """ids that the server disowned in the current epoch"""
    busy: Collection[str] = frozenset()
    """ids with an action under way"""
    leased: Collection[str] = frozenset()
    """PCI slots of GPUs that an engine holds"""
    slots: Mapping[str, str] = {}
    """PCI slot of each GPU's UUID"""
    connected: bool = True
    settings: Settings = Settings()
    now: int


def decide(view: View) -> list[Action]:
    """The next actions, at most one for each machine. Nothing where the world is not known."""
    if view.seen is None or view.desired is None:
        return []
    wanted = {instance.id: instance for instance in view.desired.instances}
    seen = {one.id: one for one in view.seen}
    actions: list[Action] = []
    taken = _holders(view, seen)
    for id in sorted({*wanted, *seen, *view.records}):
        if id in view.busy:
            continue
        instance, record = wanted.get(id), view.records.get(id)
        if instance is None:
            action = _unwanted(view, id, seen.get(id), record)
        elif instance.want == "Absent":
            action = _absent(view, instance, seen.get(id), record)
        else:
            action = _present(view, instance, seen.get(id), record, taken)
        if isinstance(action, Create):
            taken |= {_place(view, gpu): id for gpu in action.instance.spec.gpus}
        if action is not None:
            actions.append(action)
    return actions


def _holders(view: View, seen: Mapping[str, Seen]) -> dict[str, str]:
    """Which machine or lease has each GPU now, on this node's own evidence."""
    named = dict.fromkeys(view.leased, "a lease")
    named |= {gpu: id for id, one in seen.items() for gpu in one.gpus}
    for id, record in view.records.items():
        if record.spec is not None and record.stage not in ("Failed", "Ended"):
            named |= dict.fromkeys(record.spec.gpus, id)
    return {_place(view, gpu): holder for gpu, holder in named.items()}


def _place(view: View, gpu: str) -> str:
    """The slot of a GPU, or of that which it is a part of and where in it: the same, whoever names it."""
    whole, part, where = gpu.partition("/")
    return f"{view.slots.get(whole, whole)}{part}{where.partition('/')[0]}"


def _free(view: View, gpu: str, id: str, taken: Mapping[str, str]) -> bool:
    """Whether nobody else has it, all of what it is a part of, or a part of it."""
    place = _place(view, gpu)
    beside = [place, place.partition("/")[0]]
    if "/" not in place:
        beside += [other for other in taken if other.startswith(f"{place}/")]
    return all(taken.get(other, id) == id for other in beside)


def _present(
    view: View, instance: DesiredInstance, seen: Seen | None, record: Record | None, taken: Mapping[str, str]
) -> Action | None:
    if record is None:
        if seen is not None:
            return Adopt(seen, instance.reset_seq)
        free = all(_free(view, gpu, instance.id, taken) for gpu in instance.spec.gpus)
        return Create(instance) if free and view.connected else None
    if record.stage == "Creating":
        return Create(instance)
    if record.stage == "Failing" or (record.stage == "Failed" and seen is not None):
        return CleanUp(record.id)
    if record.stage != "Created" or seen is None:
        return None  # Failed and Missing are said, and not mended: a new disk would hide the loss of the old one
    if record.stray_rounds:
        return Count(record.id, 0)
    if instance.gen > record.gen_applied:
        return _converge(instance, seen)
    if instance.reset_seq > record.reset_applied:
        return Reset(record.id, instance.reset_seq)
    if seen.kind == "Container" and seen.power in _OFF and record.want == "Running" and record.ended is None:
        return Inquire(record.id)
    return _publications(instance, seen)


def _converge(instance: DesiredInstance, seen: Seen) -> Action | None:
    """One step of power towards a wish that has not held yet; None while its power is not known, or on its way."""
    done = Applied(instance.id, instance.gen, instance.want)
    power = seen.power
    if power not in _OFF | _ON | _PAUSED:
        return None
    if instance.want == "Running":
        if power in _OFF:
            return Power(instance.id, "start")
        return Power(instance.id, "resume") if power in _PAUSED else done
    if instance.want == "Stopped":
        if power in _PAUSED:
            return Power(instance.id, "resume")
        return done if power in _OFF else Power(instance.id, "stop")
    return Power(instance.id, "pause") if power in _ON else done


def _publications(instance: DesiredInstance, seen: Seen) -> Action | None:
    missing = [port for port in instance.spec.ports if port not in seen.ports]
    running = seen.power in _ON
    return Publish(instance.id, missing) if missing and running and isinstance(instance.spec, VmSpec) else None


def _absent(view: View, instance: DesiredInstance, seen: Seen | None, record: Record | None) -> Action | None:
    gone = record is None or record.stage in ("Failed", "Ended")
    if gone and seen is None:
        return End(instance.id, instance.gen) if record is not None and record.stage == "Failed" else None
    grace = view.settings.erase_grace_s if instance.erase_after_s is None else instance.erase_after_s
    return Destroy(instance.id, grace, instance.gen)


def _unwanted(view: View, id: str, seen: Seen | None, record: Record | None) -> Action | None:
    """A stray is removed when it is old, seen twice, and the server has said that it knows nothing of it."""
    if record is None:
        assert seen is not None
        return Adopt(seen)
    if record.stage in ("Failed", "Ended") and seen is None:
        return Forget(id)
    old = view.now - record.created_at > view.settings.readiness_timeout_s * SECOND
    if id not in view.unknown or not old:
        return Count(id, 0) if record.stray_rounds else None
    if record.stray_rounds + 1 < STRAY_ROUNDS:
        return Count(id, record.stray_rounds + 1)
    return Destroy(id, view.settings.erase_stray_grace_s)


def observe(
    view: View, phases: Mapping[str, Literal["Pulling", "Creating"]], environments: list[RetainedDisk]
) -> Observed | None:
    """What the server is told. None where a listing failed: then nothing is known."""
    if view.seen is None:
        return None
    seen = {one.id: one for one in view.seen}
    known = sorted({*seen, *view.records})
    instances = [_told(view, id, seen.get(id), phases.get(id)) for id in known]
    if view.desired is not None:
        instances += [
            ObservedInstance(id=one.id, gen_applied=one.gen if one.want == "Absent" else 0, phase=_unmade(one))
            for one in view.desired.instances
            if one.id not in seen and one.id not in view.records
        ]
    return Observed(instances=sorted(instances, key=lambda one: one.id), environments=environments)


def _unmade(instance: DesiredInstance) -> Phase:
    return "Absent" if instance.want == "Absent" else "Pending"


def _told(view: View, id: str, seen: Seen | None, phase: Literal["Pulling", "Creating"] | None) -> ObservedInstance:
    record = view.records.get(id)
    power, ips, ports = (None, [], []) if seen is None else (seen.power, seen.ips, seen.ports)
    if record is None:
        return ObservedInstance(id=id, phase="Running", power=power, ips=ips, ports=ports)
    return ObservedInstance(
        id=id,
        gen_applied=record.gen_applied,
        reset_applied=record.reset_applied,
        phase=_phase(record, seen, phase, id in view.busy),
        power=power if record.stage == "Created" else None,
        error=record.error if record.stage in ("Failed", "Ended") else None,
        ips=ips,
        ports=ports,
        ready_via=record.ready_via,
        started_at=record.started_at,
        ended=record.ended if record.stage == "Created" and power in _OFF else None,
    )


def _phase(record: Record, seen: Seen | None, phase: Literal["Pulling", "Creating"] | None, busy: bool) -> Phase:
    if record.stage in ("Failed", "Ended"):
        if seen is not None:
            return "Running"  # its remains are not gone yet
        return "Failed" if record.stage == "Failed" else "Absent"
    if record.stage == "Created":
        return "Missing" if seen is None and not busy else "Running"
    return phase or "Creating"
