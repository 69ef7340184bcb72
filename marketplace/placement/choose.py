"""Where something is placed, pure: the node, and which of its GPUs, threads and pages.

Nodes are looked at from the one with the fewest free GPUs upwards, so that large free nodes stay large. Every node
that is passed over has a reason, and the steps are counted: "no capacity" always says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Literal

import msgspec

from marketplace.nodes.rules import loads
from marketplace.placement.capacity import GIB, Amount, CpuPolicy, pages, split_pages, unallocated
from marketplace.placement.view import ALL_SLICES, GpuView, NodeView

Step = Literal[
    "location", "type", "state", "listing", "mode", "service", "allocation", "driver", "gpu", "cpu", "memory", "disk"
]
STEPS: tuple[Step, ...] = (
    "location",
    "type",
    "state",
    "listing",
    "mode",
    "service",
    "allocation",
    "driver",
    "gpu",
    "cpu",
    "memory",
    "disk",
)
"""In this order nodes are passed over."""
FABRIC_SETS = (1, 2, 4, 8)
"""So many GPUs of a board with a switch can be handed on together."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be placed, and for whom."""

    kind: Literal["VirtualMachine", "Container"]
    gpus: int = 0
    """whole GPUs, or MIG instances of the profile"""
    mig_profile: str | None = None
    vcpu: int
    dram: int
    disk: int
    cpu_policy: CpuPolicy = "Dedicated"
    overcommit: bool = False
    node_id: str | None = None
    instance_type: str | None = None
    datacenters: frozenset[str] | None = None
    """ids; None is anywhere"""
    accounts: frozenset[str] = frozenset()
    """of whom it is for: quotas of these may cover it"""
    walled: bool = False
    """whether its account holds a quota somewhere: then it is placed under quotas only"""
    auto_assign_quota_nodes: bool = False
    require_coverage: bool = False
    operates: frozenset[str] | None = frozenset()
    """providers whose unlisted nodes it may use; None is all"""
    image_tags: frozenset[str] = frozenset()
    """driver tags of a catalog image; empty for what is exempt"""
    gpu_numbers: tuple[int, ...] | None = None
    """these GPUs and no others"""
    cpu_ids: tuple[int, ...] | None = None
    """these threads and no others"""


class Slices(msgspec.Struct, frozen=True):
    """Slices of a GPU. `start` is the first one of a MIG instance, None for the whole GPU."""

    gpu: GpuView
    slices: tuple[int, ...]
    start: int | None = None


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where it goes."""

    node: NodeView
    amount: Amount
    slices: tuple[Slices, ...]
    cpus: Mapping[int, tuple[int, ...]]
    """threads by NUMA node; empty where it floats"""
    hugepages: Mapping[int, int]
    quota_id: str | None


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """Why a node was passed over. `free` is what this caller could have had of it, where that was too little."""

    node_id: str
    step: Step
    reason: str
    code: Literal["capacity", "reserved", "uncovered", "walled", "mixed", "driver"] = "capacity"
    free: Amount | None = None
    asked: Amount | None = None


class NoPlace(msgspec.Struct, frozen=True):
    """No node fits: what every one of them lacks."""

    rejected: tuple[Rejected, ...]

    def steps(self) -> dict[str, int]:
        """How many nodes were left after each step."""
        left = len(self.rejected)
        found = {"nodes": left}
        for step in STEPS:
            gone = sum(one.step == step for one in self.rejected)
            if gone:
                left -= gone
                found[f"after_{step}"] = left
        return found


def choose(nodes: Iterable[NodeView], wanted: Wanted) -> Placement | NoPlace:
    """Place it on the node with the fewest free GPUs that fits."""
    return first(sorted(nodes, key=attrgetter("score")), wanted)


def first(nodes: Iterable[NodeView], wanted: Wanted) -> Placement | NoPlace:
    """Place it on the first of these nodes that fits."""
    rejected = []
    for node in nodes:
        found = fit(node, wanted)
        if isinstance(found, Placement):
            return found
        rejected.append(found)
    return NoPlace(tuple(rejected))


def fit(node: NodeView, wanted: Wanted) -> Placement | Rejected:
    """Place it on one node, or say why not."""
    asked = amount(node, wanted)
    found = _admissible(node, wanted)
    quota_id: str | None = None
    if found is None:
        admitted = admit(node, wanted, asked)
        if isinstance(admitted, Rejected):
            return admitted
        quota_id = admitted or None
        if not node_loads(node, wanted):
            found = _no(node, "driver", "its GPUs cannot load the drivers of the image", code="driver")
    if found is not None:
        return found
    slices = choose_gpus(node, wanted)
    if isinstance(slices, str):
        return _no(node, "gpu", slices, free=node.capacity.less(node.taken), asked=asked)
    cpus = choose_cpus(node, wanted, {part.gpu.numa for part in slices})
    if isinstance(cpus, str):
        return _no(node, "cpu", cpus, free=node.capacity.less(node.taken), asked=asked)
    hugepages = choose_pages(node, wanted, cpus)
    if isinstance(hugepages, str):
        return _no(node, "memory", hugepages, free=node.capacity.less(node.taken), asked=asked)
    return Placement(node=node, amount=asked, slices=slices, cpus=cpus, hugepages=hugepages, quota_id=quota_id)


def amount(node: NodeView, wanted: Wanted) -> Amount:
    """What it takes of a node. MIG instances are counted in slices, not in GPUs."""
    dram = wanted.dram
    if wanted.kind == "VirtualMachine" and node.hugepages:
        dram = pages(dram) * GIB
    threads = node.threads(wanted.vcpu, wanted.cpu_policy, overcommit=wanted.overcommit)
    return Amount(0 if wanted.mig_profile else wanted.gpus, threads, dram, wanted.disk)


def node_loads(node: NodeView, wanted: Wanted) -> bool:
    """Whether the GPUs that could be handed on load the image's drivers."""
    if not wanted.gpus:
        return True
    return any(loads(gpu.modules, wanted.image_tags) for gpu in node.gpus if gpu.usable)


def _admissible(node: NodeView, wanted: Wanted) -> Rejected | None:
    """Everything about a node that is not a number."""
    named = wanted.node_id is not None
    if (named and node.id != wanted.node_id) or (
        wanted.datacenters is not None and node.datacenter_id not in wanted.datacenters
    ):
        return _no(node, "location", "it is somewhere else")
    if wanted.instance_type is not None and node.instance_type != wanted.instance_type:
        return _no(node, "type", f"it is of type {node.instance_type}")
    if node.status != "Ready":
        return _no(node, "state", f"it is {node.status}")
    if node.drain_state != "None" or node.hibernated:
        return _no(node, "state", "it takes nothing new")
    mine = wanted.operates is None or node.provider_id in wanted.operates
    holds = any(standing.account_id in wanted.accounts for standing in node.standings)
    if not node.listed and not holds and not (named and mine):
        return _no(node, "listing", "it is not offered")
    if node.cpu_mode == "Mixed":
        return _no(node, "mode", "it changes how it allocates CPUs", code="mixed")
    if not (node.vm if wanted.kind == "VirtualMachine" else node.container):
        return _no(node, "service", f"it runs no {wanted.kind}")
    if wanted.mig_profile is not None and wanted.kind == "VirtualMachine" and not node.vm_mig:
        return _no(node, "service", "it has MIG instances for containers only")
    return None


def admit(node: NodeView, wanted: Wanted, asked: Amount) -> str | Rejected:
    """Say under which of the caller's quotas it may run, empty for none, or why it may not."""
    free = node.capacity.less(node.taken)
    mine = [standing for standing in node.standings if standing.account_id in wanted.accounts]
    for standing in mine:
        if asked.within(standing.headroom) and asked.within(free):
            return standing.id
    if mine:
        room = max((standing.headroom for standing in mine), key=lambda room: (room.gpu, room.threads))
        return _no(node, "allocation", "no allocation of yours covers it", "uncovered", free=room, asked=asked)
    if wanted.walled:
        return _no(node, "allocation", "you rent on your allocations only", "walled")
    if wanted.require_coverage:
        return _no(node, "allocation", "no allocation covers it", "uncovered", asked=asked)
    if node.standings and wanted.node_id is None and not wanted.auto_assign_quota_nodes:
        return _no(node, "allocation", "it is allocated to others", "reserved", free=Amount(), asked=asked)
    left = unallocated(node.capacity, node.taken, node.standings)
    if not asked.within(left):
        step = _short_of(asked, left if asked.within(free) else free)
        code: Literal["reserved", "capacity"] = "reserved" if asked.within(free) else "capacity"
        reason = "allocations hold it" if code == "reserved" else "not enough is free"
        return _no(node, "allocation" if code == "reserved" else step, reason, code, free=left, asked=asked)
    return ""


def _short_of(asked: Amount, free: Amount) -> Step:
    if asked.gpu > free.gpu:
        return "gpu"
    if asked.threads > free.threads:
        return "cpu"
    return "memory" if asked.dram > free.dram else "disk"


def choose_gpus(node: NodeView, wanted: Wanted) -> tuple[Slices, ...] | str:
    """Return the GPUs, or MIG instances, or why there are none."""
    if not wanted.gpus:
        return ()
    if wanted.mig_profile is not None:
        return _mig(node, wanted.mig_profile, wanted.gpus, wanted.gpu_numbers)
    fitting = [gpu for gpu in node.gpus if gpu.free and not gpu.mig_enabled and loads(gpu.modules, wanted.image_tags)]
    if wanted.gpu_numbers is not None:
        fitting = [gpu for gpu in fitting if gpu.number in wanted.gpu_numbers]
        picked = fitting if len(fitting) == len(wanted.gpu_numbers) == wanted.gpus else None
    else:
        picked = gpu_set(node, fitting, wanted.gpus)
    if picked is None:
        return "no set of free GPUs fits"
    rentable = sum(gpu.usable and not gpu.rented for gpu in node.gpus)
    if rentable - len(picked) < node.inference_floor:
        return "the rest of its GPUs stay with inference"
    return tuple(Slices(gpu, tuple(sorted(ALL_SLICES))) for gpu in picked)


def gpu_set(node: NodeView, free: Sequence[GpuView], count: int) -> list[GpuView] | None:
    """A set of so many of these GPUs of a node that belong together."""
    return _fabric_set(node, free, count) if node.nvswitch else _near_set(free, count)


def _near_set(free: Sequence[GpuView], count: int) -> list[GpuView] | None:
    """GPUs of one NUMA node where one has enough, of the fullest such; idle ones before those that inference must
    leave."""
    if len(free) < count:
        return None

    def order(gpu: GpuView) -> tuple[bool, str]:
        return bool(gpu.leased), gpu.pci_slot

    by_numa: dict[int, list[GpuView]] = {}
    for gpu in free:
        by_numa.setdefault(gpu.numa, []).append(gpu)
    enough = [group for group in by_numa.values() if len(group) >= count]
    idle = [group for group in enough if sum(not gpu.leased for gpu in group) >= count]
    if enough:
        group = min(idle or enough, key=lambda group: (len(group), group[0].numa))
        return sorted(group, key=order)[:count]
    ordered = sorted(by_numa.values(), key=lambda group: (-len(group), group[0].numa))
    return [gpu for group in ordered for gpu in sorted(group, key=order)][:count]


def _fabric_set(node: NodeView, free: Sequence[GpuView], count: int) -> list[GpuView] | None:
    """An aligned block of GPUs that the board's switch can separate, out of the smallest free block there is."""
    if count not in FABRIC_SETS:
        return None
    numbers = {gpu.number: gpu for gpu in free}
    blocks = []
    for start in range(0, max((gpu.number for gpu in node.gpus), default=0) + 1, count):
        block = range(start, start + count)
        if all(number in numbers for number in block):
            leased = sum(bool(numbers[number].leased) for number in block)
            blocks.append((leased, _around(numbers, start, count), start))
    if not blocks:
        return None
    start = min(blocks)[2]
    return [numbers[number] for number in range(start, start + count)]


def _around(free: Mapping[int, GpuView], start: int, count: int) -> int:
    """Size of the largest aligned free block that holds this one."""
    size = count
    while size * 2 <= FABRIC_SETS[-1]:
        base = start // (size * 2) * (size * 2)
        if not all(number in free for number in range(base, base + size * 2)):
            break
        size *= 2
    return size


def _mig(node: NodeView, profile: str, count: int, numbers: tuple[int, ...] | None) -> tuple[Slices, ...] | str:
    """MIG instances: on GPUs that are split already, the fullest first; then one that is wholly free is split. Only on
    GPUs of these numbers, if any are named."""
    found: list[Slices] = []
    busy: dict[str, set[int]] = {gpu.id: set(gpu.rented | gpu.leased) for gpu in node.gpus}
    asked = [gpu for gpu in node.gpus if numbers is None or gpu.number in numbers]
    offering = [gpu for gpu in asked if gpu.usable and profile in gpu.profiles]
    split = sorted((gpu for gpu in offering if gpu.split), key=lambda gpu: (-len(busy[gpu.id]), gpu.pci_slot))
    whole = [gpu for gpu in offering if not gpu.split and not busy[gpu.id]]
    offers = [(gpu, gpu.profiles[profile]) for gpu in (*split, *sorted(whole, key=lambda gpu: gpu.pci_slot))]
    places = [(gpu, start, range(start, start + kind.size)) for gpu, kind in offers for start in kind.placements]
    # What somebody else made on a node is in the way: such a place is tried where there is no other.
    places.sort(key=lambda place: any(made.hinders(profile, place[1], place[2]) for made in place[0].made))
    for gpu, start, block in places:
        if len(found) < count and not busy[gpu.id].intersection(block):
            busy[gpu.id].update(block)
            found.append(Slices(gpu, tuple(block), start))
    return tuple(found) if len(found) == count else f"no GPU has room for {profile}"


def choose_cpus(node: NodeView, wanted: Wanted, near: set[int]) -> dict[int, tuple[int, ...]] | str:
    """Return threads by NUMA node for nobody else's use, near the GPUs; none where vCPUs float."""
    if wanted.cpu_policy == "Shared" or node.cpu_mode == "Legacy":
        return {}
    free = [core for core in node.cores if node.threads_claimed.isdisjoint(core.threads)]
    if wanted.cpu_ids is not None:
        asked = set(wanted.cpu_ids)
        free = [core for core in free if asked.issuperset(core.threads)]
    needed = wanted.vcpu if wanted.cpu_policy == "Dedicated" else -(-wanted.vcpu // node.per_core)
    if len(free) < needed:
        return "not enough free cores"
    room: dict[int, int] = {}
    for core in free:
        room[core.numa] = room.get(core.numa, 0) + 1
    whole = [numa for numa, count in room.items() if count >= needed]
    # One NUMA node if any has enough, by preference the GPUs' own, by preference a full one.
    home = min(whole, key=lambda numa: (numa not in near, room[numa], numa), default=None)
    if home is not None:
        picked = [core for core in free if core.numa == home][:needed]
    else:
        picked = sorted(free, key=lambda core: (core.numa not in near, -room[core.numa], core.numa))[:needed]
    cpus: dict[int, list[int]] = {}
    for core in picked:
        cpus.setdefault(core.numa, []).extend(core.threads)
    return {numa: tuple(sorted(threads)) for numa, threads in sorted(cpus.items())}


def choose_pages(node: NodeView, wanted: Wanted, cpus: Mapping[int, tuple[int, ...]]) -> dict[int, int] | str:
    """Return 1 GiB pages by NUMA node for a virtual machine: where its threads are, in proportion. One that floats may
    run anywhere, so every NUMA node must have all of its pages."""
    if wanted.kind != "VirtualMachine" or not node.hugepages:
        return {}
    count = pages(wanted.dram)
    if cpus:
        split = split_pages(count, {numa: len(threads) for numa, threads in cpus.items()})
    else:
        split = dict.fromkeys(node.hugepages, count)
    for numa, needed in split.items():
        if node.hugepages.get(numa, 0) - node.pages_used.get(numa, 0) < needed:
            return f"NUMA node {numa} has too few free 1 GiB pages"
    return split


def _no(
    node: NodeView,
    step: Step,
    reason: str,
    code: Literal["capacity", "reserved", "uncovered", "walled", "mixed", "driver"] = "capacity",
    *,
    free: Amount | None = None,
    asked: Amount | None = None,
) -> Rejected:
    return Rejected(node_id=node.id, step=step, reason=reason, code=code, free=free, asked=asked)
