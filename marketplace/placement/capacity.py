"""The arithmetic of capacity, pure: what a node has, what of it is used, what quotas hold, and what is left.

Amounts are in GPUs, hardware threads, and bytes of memory and of disk. A vCPU is a whole core where it is Dedicated,
one thread where it is Packed, and a part of a thread where it is Shared on an overcommitted node: what is subtracted
from threads is always threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

CpuPolicy = Literal["Dedicated", "Packed", "Shared"]
GIB = 1 << 30


class Amount(msgspec.Struct, frozen=True):
    """So much of each thing that a node has."""

    gpu: int = 0
    threads: int = 0
    dram: int = 0
    disk: int = 0

    def __add__(self, other: Amount) -> Amount:
        """Both together."""
        return Amount(
            self.gpu + other.gpu, self.threads + other.threads, self.dram + other.dram, self.disk + other.disk
        )

    def less(self, other: Amount) -> Amount:
        """What remains, nothing below zero."""
        return Amount(
            max(0, self.gpu - other.gpu),
            max(0, self.threads - other.threads),
            max(0, self.dram - other.dram),
            max(0, self.disk - other.disk),
        )

    def within(self, other: Amount) -> bool:
        """Whether the other has at least as much of everything."""
        return (
            self.gpu <= other.gpu
            and self.threads <= other.threads
            and self.dram <= other.dram
            and self.disk <= other.disk
        )

    def most(self, other: Amount) -> Amount:
        """The larger of each."""
        return Amount(
            max(self.gpu, other.gpu),
            max(self.threads, other.threads),
            max(self.dram, other.dram),
            max(self.disk, other.disk),
        )


NOTHING = Amount()


class Standing(msgspec.Struct, frozen=True):
    """A quota as it stands: what it grants, and what of that is used by claims that it covers."""

    id: str
    account_id: str
    budget: Amount
    consumed: Amount
    exclusive: bool = False

    @property
    def headroom(self) -> Amount:
        """What its holder can still take under it."""
        return self.budget.less(self.consumed)


def total(capacity: Iterable[Amount]) -> Amount:
    """The sum."""
    found = NOTHING
    for amount in capacity:
        found = found + amount
    return found


def unallocated(capacity: Amount, used: Amount, standings: Iterable[Standing]) -> Amount:
    """What is free and no quota holds: what others may rent, and a new quota may be given."""
    standings = tuple(standings)
    if any(standing.exclusive for standing in standings):
        return NOTHING
    return capacity.less(used).less(total(standing.headroom for standing in standings))


def largest_quota(capacity: Amount, used_beside: Amount, others: Iterable[Standing]) -> Amount:
    """The largest budget that a quota may have: what the node has, less what the other quotas grant or already use,
    less what is used beside all quotas."""
    reserved = total(other.budget.most(other.consumed) for other in others)
    return capacity.less(reserved).less(used_beside)


def threads_for(vcpu: int, policy: CpuPolicy, *, per_core: int, overcommit_percent: int = 100) -> int:
    """How many hardware threads so many vCPUs take, on cores with so many threads each."""
    if policy == "Dedicated":
        return vcpu * per_core
    if policy == "Packed":
        return -(-vcpu // per_core) * per_core
    return -(-vcpu * 100 // overcommit_percent)


def vcpus_in(threads: int, policy: CpuPolicy, *, per_core: int, overcommit_percent: int = 100) -> int:
    """How many vCPUs fit into so many free threads."""
    if policy == "Dedicated":
        return threads // per_core
    if policy == "Packed":
        return threads // per_core * per_core
    return threads * overcommit_percent // 100


def pages(dram: int) -> int:
    """How many 1 GiB pages hold so many bytes."""
    return -(-dram // GIB)


def split_pages(count: int, weights: dict[int, int]) -> dict[int, int]:
    """Spread pages over NUMA nodes in proportion to the threads that are on each; all of them, none negative."""
    whole = sum(weights.values())
    given = {numa: count * weight // whole for numa, weight in sorted(weights.items())}
    rest = count - sum(given.values())
    for numa in sorted(weights, key=lambda numa: (-(count * weights[numa] % whole), numa))[:rest]:
        given[numa] += 1
    return {numa: number for numa, number in given.items() if number}
