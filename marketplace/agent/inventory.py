"""What this machine is, read from the kernel: PCI devices first, because only they are always seen."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from marketplace.agent.gpu_names import by_device_id, kernel_modules
from marketplace.agent.inventory_wire import Cpu, Disk, Gpu, Inventory, NumaNode, Thread
from marketplace.agent.nvml import Nvml

_NVIDIA = 0x10DE
_DISPLAY = ("0x0300", "0x0302")
_BRIDGE = "0x0680"
_GIB_PAGES = "hugepages-1048576kB"


class Machine:
    """The facts of one machine, below roots that tests replace."""

    def __init__(
        self, data: Path, *, sys: Path = Path("/sys"), proc: Path = Path("/proc"), nvml: Nvml | None = None
    ) -> None:
        """`data` is the folder on the file system that instances are given."""
        self._data = data
        self._sys = sys
        self._proc = proc
        self._nvml = nvml or Nvml()

    def inventory(self, *, ip: str = "", problems: Mapping[str, str] | None = None) -> Inventory:
        """Everything. `problems` are GPUs that are known not to work, and why."""
        gpus, version = self._nvml.decorate(self._gpus(problems or {}))
        usage = shutil.disk_usage(self._data)
        return Inventory(
            hostname=socket.gethostname(),
            ip=ip or own_address(),
            kernel=platform.release(),
            cpu=Cpu(brand=self._brand(), architecture=platform.machine(), threads=self._threads()),
            memory_bytes=self._memory(),
            numa=self._numa(),
            gpus=gpus,
            nvswitch=any(self._read(path / "class").startswith(_BRIDGE) for path in self._pci(_NVIDIA)),
            disk=Disk(path=str(self._data), total_bytes=usage.total, free_bytes=usage.free),
            driver_version=version,
        )

    def boot_id(self) -> str:
        """Changes with every start of the machine."""
        return self._read(self._proc / "sys/kernel/random/boot_id")

    def slots(self, inventory: Inventory) -> dict[str, str]:
        """The PCI slot of each GPU's UUID."""
        return {gpu.uuid: gpu.pci_slot for gpu in inventory.gpus if gpu.uuid}

    def _pci(self, vendor: int) -> list[Path]:
        folder = self._sys / "bus/pci/devices"
        devices = sorted(folder.iterdir()) if folder.is_dir() else []
        return [path for path in devices if _number(self._read(path / "vendor")) in (vendor, 0xFFFF)]

    def _gpus(self, problems: Mapping[str, str]) -> list[Gpu]:
        shown = [path for path in self._pci(_NVIDIA) if self._read(path / "class").startswith(_DISPLAY)]
        return [self._gpu(path, problems.get(path.name)) for path in shown]

    def _gpu(self, path: Path, problem: str | None) -> Gpu:
        config = (path / "config").read_bytes()[:2] if (path / "config").exists() else b""
        valid = config not in (b"", b"\xff\xff")
        device = _number(self._read(path / "device"))
        architecture = by_device_id(device)
        driver, group = path / "driver", path / "iommu_group"
        return Gpu(
            pci_slot=path.name,
            vendor_id=_NVIDIA,
            device_id=device,
            functions=self._functions(path),
            iommu_group=int(group.resolve().name) if group.exists() else None,
            numa=max(0, int(self._read(path / "numa_node") or 0)),
            driver=driver.resolve().name if driver.exists() else None,
            pci_valid=valid,
            healthy=problem is None and valid,
            problem=problem or (None if valid else "its configuration space cannot be read"),
            architecture=architecture,
            kernel_modules=kernel_modules(architecture),
            vram_bytes=self._bar(path),
        )

    def _functions(self, path: Path) -> list[str]:
        beside = sorted(one.name for one in path.parent.glob(path.name.rpartition(".")[0] + ".*"))
        return [path.name, *(name for name in beside if name != path.name)]

    def _bar(self, path: Path) -> int:
        """The largest window of memory, which on data-centre GPUs covers all of it; the driver knows better."""
        sizes = [0]
        for line in self._read(path / "resource").splitlines():
            first, last, *_ = (int(word, 16) for word in line.split())
            if last:
                sizes.append(last - first + 1)
        return max(sizes)

    def _threads(self) -> list[Thread]:
        numa_of = {cpu: node for node, cpus in self._cpus_of_nodes().items() for cpu in cpus}
        found = []
        for path in (self._sys / "devices/system/cpu").glob("cpu[0-9]*"):
            topology = path / "topology"
            if topology.is_dir():
                cpu = int(path.name.removeprefix("cpu"))
                core = int(self._read(topology / "core_id") or 0)
                package = int(self._read(topology / "physical_package_id") or 0)
                found.append(Thread(cpu, core, max(0, package), numa_of.get(cpu, 0)))
        return sorted(found, key=lambda one: one.cpu) or [Thread(n, n, 0, 0) for n in range(os.cpu_count() or 1)]

    def _cpus_of_nodes(self) -> dict[int, list[int]]:
        nodes = (self._sys / "devices/system/node").glob("node[0-9]*")
        return {int(path.name.removeprefix("node")): _ranges(self._read(path / "cpulist")) for path in nodes}

    def _numa(self) -> list[NumaNode]:
        found = []
        for path in (self._sys / "devices/system/node").glob("node[0-9]*"):
            pages = path / "hugepages" / _GIB_PAGES
            line = next((one for one in self._read(path / "meminfo").splitlines() if "MemTotal" in one), "")
            found.append(
                NumaNode(
                    node=int(path.name.removeprefix("node")),
                    memory_bytes=int(line.split()[-2]) * 1024 if line else 0,
                    hugepages_1g=int(self._read(pages / "nr_hugepages") or 0),
                    hugepages_1g_free=int(self._read(pages / "free_hugepages") or 0),
                )
            )
        return sorted(found, key=lambda one: one.node) or [NumaNode(node=0, memory_bytes=self._memory())]

    def _memory(self) -> int:
        line = next((one for one in self._read(self._proc / "meminfo").splitlines() if one.startswith("MemTotal")), "")
        return int(line.split()[1]) * 1024 if line else 0

    def _brand(self) -> str:
        lines = self._read(self._proc / "cpuinfo").splitlines()
        line = next((one for one in lines if one.startswith("model name")), "")
        return " ".join(line.partition(":")[2].split()) or platform.machine()

    def _read(self, path: Path) -> str:
        try:
            return path.read_text("utf-8", "replace").strip()
        except OSError:
            return ""


def own_address() -> str:
    """The address that this machine has towards the rest of the world; loopback where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent: the kernel only chooses the way
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _number(text: str) -> int:
    return int(text, 16) if text else 0


def _ranges(text: str) -> list[int]:
    """`0-2,8` as [0, 1, 2, 8]."""
    found: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found
