"""What a node tells of its hardware: threads, memory, GPUs by PCI slot, the disk of its data folder, retained disks."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

Architecture = Literal[
    "Kepler",
    "Maxwell",
    "Pascal",
    "Volta",
    "Turing",
    "Ampere",
    "Ada",
    "Hopper",
    "GraceHopper",
    "Blackwell",
    "Rubin",
    "Unknown",
]
KernelModules = Literal["ProprietaryOnly", "OpenOrProprietary", "OpenOnly", "Unknown"]


class Thread(msgspec.Struct, frozen=True):
    """One hardware thread. Threads of one core in one package are siblings."""

    cpu: int
    core: int
    package: int
    numa: int


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """The processors."""

    brand: str
    architecture: str
    """as the kernel names it: x86_64, aarch64"""
    threads: list[Thread]


class NumaNode(msgspec.Struct, frozen=True, kw_only=True):
    """One memory node and its pool of 1 GiB pages."""

    node: int
    memory_bytes: int
    hugepages_1g: int = 0
    hugepages_1g_free: int = 0


class MigInstance(msgspec.Struct, frozen=True, kw_only=True):
    """A MIG instance that exists on a GPU."""

    uuid: str
    profile: str
    """as NVIDIA writes it: 1g.10gb"""
    start: int
    """first memory slice, 0 to 7"""
    size: int
    """memory slices"""
    vram_bytes: int


class MigProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A MIG profile that a GPU offers, and where it may begin."""

    profile: str
    size: int
    placements: list[int]


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU. The PCI slot is its identity: indices shift and NVML cannot see a device that is bound to vfio-pci."""

    pci_slot: str
    """`0000:65:00.0`"""
    vendor_id: int
    device_id: int
    functions: list[str] = []
    """all functions of the slot, its own first; they move together"""
    iommu_group: int | None = None
    numa: int = 0
    driver: str | None = None
    """kernel driver that it is bound to"""
    pci_valid: bool = True
    """configuration space is readable, and the link is up"""
    problem: str | None = None
    """why it is not valid or not healthy"""
    uuid: str | None = None
    brand: str = ""
    architecture: Architecture = "Unknown"
    kernel_modules: KernelModules = "Unknown"
    vram_bytes: int = 0
    index: int | None = None
    """NVML's number of it, now"""
    mig_enabled: bool = False
    mig_instances: list[MigInstance] = []
    mig_profiles: list[MigProfile] = []
    fabric_partition: int | None = None
    """NVSwitch partition of it; None where there is no such board"""
    healthy: bool = True


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """The file system of the node's data folder: the only one that instances are given."""

    path: str
    total_bytes: int
    free_bytes: int
    """free now, of which the node keeps nothing back"""


class RetainedDisk(msgspec.Struct, frozen=True, kw_only=True):
    """The disk of an ended virtual machine within its grace: a saved environment."""

    instance_id: str
    disk_bytes: int
    expires_at: int
    os_label: str = ""


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a node that does not change from minute to minute."""

    hostname: str
    ip: str = ""
    """address that its published ports are reached at"""
    kernel: str = ""
    cpu: Cpu
    memory_bytes: int
    numa: list[NumaNode]
    gpus: list[Gpu] = []
    nvswitch: bool = False
    """GPUs are joined by a switch: only certain sets of them may be passed on together"""
    disk: Disk
    driver_version: str | None = None
    """of the GPUs' vendor, where it is loaded"""

    def digest(self) -> str:
        """A name for these facts; free space and pages are not among them, because they move all the time."""
        steady = msgspec.structs.replace(
            self,
            disk=msgspec.structs.replace(self.disk, free_bytes=0),
            numa=[msgspec.structs.replace(node, hugepages_1g_free=0) for node in self.numa],
        )
        return hashlib.sha256(msgspec.json.encode(steady, order="sorted")).hexdigest()[:32]
