"""The command line of a virtual machine, pure: what is not said here, QEMU does not get."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from marketplace.agent.disks import DISK
from marketplace.agent.seed import mac
from marketplace.agent.wire import NumaSlice, Port, VmSpec

MIB = 1 << 20
GIB = 1 << 30

SEED = "seed.iso"
SERIAL = "serial.log"
CONTROL = "qmp.sock"
PIDFILE = "qemu.pid"
ERRORS = "qemu.err"

Accelerator = Literal["kvm", "tcg"]


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """What a command line needs to know of the node."""

    accelerator: Accelerator = "tcg"
    binary: str = "qemu-system-x86_64"
    run_as: str | None = None
    """user that QEMU becomes once it has opened its files"""
    hugepages: str = "/dev/hugepages1G"
    """mount of the hugetlbfs with pages of 1 GiB"""


def mark(label: str, id: str) -> str:
    """The word of the command line that names the machine and whose it is."""
    return f"guest=headrace-{label}-{id}"


def command(
    host: Host, label: str, id: str, spec: VmSpec, *, volumes: Sequence[Path], functions: Mapping[str, Sequence[str]]
) -> list[str]:
    """All words. Paths are relative to the machine's folder, where it is started; `volumes` are in the spec's order.

    `functions` are all PCI functions of each GPU's slot, which go to the machine together.
    """
    words = [host.binary, "-nodefaults", "-no-user-config", "-display", "none", "-pidfile", PIDFILE]
    words += ["-name", mark(label, id), "-uuid", str(_uuid(id))]
    words += ["-sandbox", _sandbox(host, spec)]
    if host.run_as is not None:
        words += ["-runas", host.run_as]
    words += _processor(host, spec) + _memory(host, spec)
    words += ["-chardev", f"file,id=console,path={SERIAL},append=on", "-serial", "chardev:console"]
    words += ["-qmp", f"unix:{CONTROL},server=on,wait=off", "-device", "virtio-rng-pci"]
    words += _drive("disk", DISK, "qcow2", ",bootindex=0") + _drive("seed", SEED, "raw", "", ",readonly=on")
    for number, (volume, path) in enumerate(zip(spec.volumes, volumes, strict=True)):
        readonly = ",readonly=on" if volume.read_only else ""
        words += _drive(f"volume{number}", str(path), "qcow2", f",serial={volume.id[:20]}", readonly)
    words += _network(id, spec)
    for number, slot in enumerate(spec.gpus):
        words += _gpu(number, functions[slot])
    return words


def forward(port: Port) -> str:
    """A published port as QEMU writes it."""
    return f"{port.proto}:{port.host_ip}:{port.host}-:{port.guest}"


def _sandbox(host: Host, spec: VmSpec) -> str:
    """What the process may not do. A card in a bridge is made by a program that it starts, and who becomes somebody
    else has to be able to; no_new_privs is set all the same.
    """
    bridged = spec.network is not None and spec.network.interface is not None
    spawn = "" if bridged else ",spawn=deny"
    elevate = "" if bridged or host.run_as is not None else ",elevateprivileges=deny"
    return f"on,obsolete=deny,resourcecontrol=deny{elevate}{spawn}"


def _uuid(id: str) -> uuid.UUID:
    try:
        return uuid.UUID(id)
    except ValueError:
        return uuid.uuid5(uuid.NAMESPACE_URL, f"headrace:{id}")


def _processor(host: Host, spec: VmSpec) -> list[str]:
    accel = "kvm" if host.accelerator == "kvm" else "tcg,thread=multi,tb-size=256"
    model = "host" if host.accelerator == "kvm" else "max"
    return [
        "-machine",
        "q35,smbus=off,vmport=off",
        "-accel",
        accel,
        "-cpu",
        model,
        "-smp",
        f"{spec.vcpu},sockets=1,cores={spec.vcpu},threads=1",
    ]


def _memory(host: Host, spec: VmSpec) -> list[str]:
    """Memory in 1 GiB pages of the NUMA nodes that it was given, or wherever the kernel likes."""
    slices = [one for one in spec.numa or () if one.hugepages_1g]
    if not slices:
        return ["-m", f"{spec.dram_bytes // MIB}M"]
    words = ["-m", f"{sum(one.hugepages_1g for one in slices)}G"]
    for number, (one, cpus) in enumerate(zip(slices, _guest_cpus(spec.vcpu, slices), strict=True)):
        words += ["-object", _pages(host, number, one), "-numa", f"node,nodeid={number},memdev=ram{number}{cpus}"]
    return words


def _pages(host: Host, number: int, one: NumaSlice) -> str:
    return (
        f"memory-backend-file,id=ram{number},size={one.hugepages_1g}G,mem-path={host.hugepages},"
        f"host-nodes={one.node},policy=bind,prealloc=on,share=off"
    )


def _guest_cpus(vcpu: int, slices: Sequence[NumaSlice]) -> list[str]:
    """Guest CPUs of each guest NUMA node, in proportion to the threads that the host gave."""
    threads = sum(len(one.cpus) for one in slices) or len(slices)
    bounds, so_far = [0], 0
    for one in slices:
        so_far += len(one.cpus) or 1
        bounds.append(round(vcpu * so_far / threads))
    return [f",cpus={first}-{last - 1}" if last > first else "" for first, last in itertools.pairwise(bounds)]


def _drive(name: str, path: str, kind: str, device: str, drive: str = "") -> list[str]:
    escaped = path.replace(",", ",,")
    cache = ",discard=unmap" if kind == "qcow2" else ""
    return [
        "-drive",
        f"if=none,id={name},file={escaped},format={kind}{cache}{drive}",
        "-device",
        f"virtio-blk-pci,drive={name}{device}",
    ]


def _network(id: str, spec: VmSpec) -> list[str]:
    """The way out, with the published ports; and a card in the provider's network where there is one."""
    forwards = "".join(f",hostfwd={forward(port)}" for port in spec.ports)
    words = ["-netdev", f"user,id=n0{forwards}", "-device", f"virtio-net-pci,netdev=n0,mac={mac(id, 0)},romfile="]
    if spec.network is not None and spec.network.interface is not None:
        words += ["-netdev", f"bridge,id=n1,br={spec.network.interface}"]
        words += ["-device", f"virtio-net-pci,netdev=n1,mac={mac(id, 1)},romfile="]
    return words


def _gpu(number: int, functions: Sequence[str]) -> list[str]:
    """A GPU behind a root port of its own, its other functions beside it."""
    port = f"gpu{number}"
    words = ["-device", f"pcie-root-port,id={port},chassis={number + 1},slot={number + 1}"]
    for index, function in enumerate(functions):
        several = ",multifunction=on" if index == 0 and len(functions) > 1 else ""
        words += ["-device", f"vfio-pci,host={function},bus={port},addr=0.{index}{several}"]
    return words
