"""A node as placement sees it: plain data of one moment, made from rows by marketplace.placement.load."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from marketplace.placement.capacity import GIB, Amount, CpuPolicy, Standing, threads_for

ALL_SLICES = frozenset(range(8))


class Profile(msgspec.Struct, frozen=True):
    """A MIG profile that a GPU offers: how many memory slices it takes, and where it may begin."""

    size: int
    placements: tuple[int, ...]


class Made(msgspec.Struct, frozen=True):
    """A MIG instance that a node tells of."""

    profile: str
    start: int
    size: int

    def hinders(self, profile: str, start: int, block: Collection[int]) -> bool:
        """Whether it is in the way of one of a profile that begins there; the same one is not."""
        mine = range(self.start, self.start + self.size)
        return (self.profile, self.start) != (profile, start) and any(number in mine for number in block)


class GpuView(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU. `rented` and `leased` are its slices that rentals and inference leases have; `reclaimable` says that its
    lease may be ended for a rental."""

    id: str
    number: int
    pci_slot: str
    numa: int = 0
    vram: int = 0
    brand: str = ""
    modules: str = "Unknown"
    usable: bool = True
    """there, valid, healthy, and not switched off by people"""
    mig_enabled: bool = False
    profiles: Mapping[str, Profile] = {}
    made: tuple[Made, ...] = ()
    """MIG instances that are on it, whoever made them"""
    rented: frozenset[int] = frozenset()
    leased: frozenset[int] = frozenset()
    reclaimable: bool = False

    @property
    def taken(self) -> frozenset[int]:
        """Slices that a rental cannot have."""
        return self.rented if self.reclaimable else self.rented | self.leased

    @property
    def split(self) -> bool:
        """Whether it is in parts, or is going to be: a part of it is rented, and its node has not told yet."""
        return self.mig_enabled or 0 < len(self.rented) < len(ALL_SLICES)

    @property
    def free(self) -> bool:
        """Whether a rental could have all of it."""
        return self.usable and not self.taken


class Core(msgspec.Struct, frozen=True):
    """A core: its hardware threads, and the NUMA node that it is on."""

    numa: int
    threads: tuple[int, ...]


class NodeView(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A node. What is worked out of it is worked out once: `dict` keeps it."""

    id: str
    hostname: str = ""
    ip_address: str = ""
    provider_id: str = ""
    datacenter_id: str = ""
    instance_type: str | None = None
    generation: int = 0
    status: Literal["Ready", "NotResponding", "Offline"] = "Ready"
    drain_state: str = "None"
    hibernated: bool = False
    listed: bool = True
    cpu_mode: Literal["Legacy", "Pinned", "Mixed"] = "Pinned"
    overcommit_percent: int = 100
    vm: bool = True
    container: bool = True
    vm_mig: bool = False
    nvswitch: bool = False
    inference_floor: int = 0
    cores: tuple[Core, ...] = ()
    memory: int = 0
    """bytes that instances may have where there are no pages"""
    hugepages: Mapping[int, int] = {}
    """1 GiB pages by NUMA node; empty where the node reports none"""
    disk: int = 0
    gpus: tuple[GpuView, ...] = ()
    used: Amount = Amount()
    pages_used: Mapping[int, int] = {}
    threads_claimed: frozenset[int] = frozenset()
    standings: tuple[Standing, ...] = ()
    until: int = 1 << 62
    """from when on other quotas are in force, µs since 1970"""

    @cached_property
    def per_core(self) -> int:
        """Hardware threads of a core."""
        return max((len(core.threads) for core in self.cores), default=1)

    @cached_property
    def capacity(self) -> Amount:
        """All that instances may have of it. What counts as used by inference that must stay is not free."""
        pool = sum(self.hugepages.values()) * GIB
        return Amount(
            sum(gpu.usable for gpu in self.gpus),
            sum(len(core.threads) for core in self.cores),
            pool or self.memory,
            self.disk,
        )

    @cached_property
    def score(self) -> tuple[int, int, str]:
        """Nodes with a lower one are filled up first."""
        return self.free_gpus, self.capacity.threads - self.taken.threads, self.id

    @cached_property
    def free_gpus(self) -> int:
        """How many GPUs a rental could have."""
        return sum(gpu.free for gpu in self.gpus)

    @cached_property
    def taken(self) -> Amount:
        """What rentals use of it, and GPUs of leases that must stay."""
        kept = sum(bool(gpu.leased) and not gpu.reclaimable and gpu.usable for gpu in self.gpus)
        return Amount(self.used.gpu + kept, self.used.threads, self.used.dram, self.used.disk)

    def claimed(self, **values: Any) -> NodeView:
        """The node one generation later, with other claims. What it has stays, and is not worked out again."""
        made = replace(self, generation=self.generation + 1, **values)
        vars(made).update((name, vars(self)[name]) for name in ("per_core", "capacity") if name in vars(self))
        return made

    def threads(self, vcpu: int, policy: CpuPolicy, *, overcommit: bool) -> int:
        """Hardware threads that so many vCPUs take here. Sharing beyond their number only where both allow it."""
        percent = self.overcommit_percent if overcommit else 100
        per_core = 1 if self.cpu_mode == "Legacy" else self.per_core
        return threads_for(vcpu, policy, per_core=per_core, overcommit_percent=percent)
