"""What a machine tells of itself, from a tree like the kernel's and a driver with scripted GPUs."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from marketplace.agent.inventory import Machine
from marketplace.agent.nvml import Nvml

GPU = "0000:65:00.0"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two NUMA nodes of two cores with two threads each, a GPU with its sound card, and a network card."""
    for cpu in range(8):
        topology = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        write(topology / "core_id", str(cpu % 4))
        write(topology / "physical_package_id", "0")
    for node, cpus in ((0, "0-1,4-5"), (1, "2-3,6-7")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        write(folder / "cpulist", cpus)
        write(folder / "meminfo", f"Node {node} MemTotal:       1048576 kB\nNode {node} MemFree: 5 kB\n")
        write(folder / "hugepages/hugepages-1048576kB/nr_hugepages", "3")
        write(folder / "hugepages/hugepages-1048576kB/free_hugepages", str(1 + node))
    write(tmp_path / "proc/meminfo", "MemTotal:        2097152 kB\n")
    write(tmp_path / "proc/cpuinfo", "processor : 0\nmodel name\t: AMD  EPYC 9654\n")
    write(tmp_path / "proc/sys/kernel/random/boot_id", "boot-1\n")
    pci(tmp_path, GPU, "0x10de", "0x2335", "0x030200")
    pci(tmp_path, "0000:65:00.1", "0x10de", "0x22a3", "0x040300")
    pci(tmp_path, "0000:01:00.0", "0x8086", "0x1533", "0x020000")
    return tmp_path


def pci(root: Path, slot: str, vendor: str, device: str, kind: str, config: bytes = b"\xde\x10") -> Path:
    folder = root / "sys/bus/pci/devices" / slot
    write(folder / "vendor", vendor)
    write(folder / "device", device)
    write(folder / "class", kind)
    write(folder / "numa_node", "1")
    write(folder / "resource", "0x0 0xffffff 0x0\n0x10000000000 0x11fffffffff 0x0\n")
    (folder / "config").write_bytes(config)
    return folder


class NVMLError(Exception):
    """As the library's."""


def fake_pynvml(**facts: Any) -> ModuleType:
    module: Any = ModuleType("pynvml")
    module.NVMLError = NVMLError
    module.nvmlInit = module.nvmlShutdown = lambda: None
    module.nvmlSystemGetDriverVersion = lambda: "570.1"
    module.nvmlDeviceGetCount = lambda: 1
    module.nvmlDeviceGetHandleByIndex = lambda index: "handle"
    module.nvmlDeviceGetPciInfo = lambda handle: SimpleNamespace(busId=b"00000000:65:00.0")
    module.nvmlDeviceGetUUID = lambda handle: "GPU-1"
    module.nvmlDeviceGetName = lambda handle: "NVIDIA H200"
    module.nvmlDeviceGetArchitecture = lambda handle: 9
    module.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(total=141 << 30, used=5 << 30)
    module.nvmlDeviceGetPowerUsage = lambda handle: 123_456
    module.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=42)
    module.nvmlDeviceGetTemperature = lambda handle, kind: 55
    module.nvmlDeviceGetComputeRunningProcesses = lambda handle: []
    for name, value in facts.items():
        setattr(module, name, value)
    return module  # type: ignore[no-any-return]


def no_driver() -> None:
    raise NVMLError("Driver Not Loaded")


def machine(root: Path, **facts: Any) -> Machine:
    return Machine(root, sys=root / "sys", proc=root / "proc", nvml=Nvml(fake_pynvml(**facts)))


def test_threads_know_their_core_and_memory(root: Path) -> None:
    found = machine(root, nvmlInit=no_driver).inventory(ip="203.0.113.7")
    assert [(one.cpu, one.core, one.numa) for one in found.cpu.threads][:5] == [
        (0, 0, 0),
        (1, 1, 0),
        (2, 2, 1),
        (3, 3, 1),
        (4, 0, 0),
    ]
    assert (found.cpu.brand, found.memory_bytes, found.ip) == ("AMD EPYC 9654", 2 << 30, "203.0.113.7")
    assert [(one.memory_bytes, one.hugepages_1g, one.hugepages_1g_free) for one in found.numa] == [
        (1 << 30, 3, 1),
        (1 << 30, 3, 2),
    ]
    assert found.disk.total_bytes > 0


def test_a_gpu_is_seen_without_its_driver(root: Path) -> None:
    found = machine(root, nvmlInit=no_driver).inventory()
    (gpu,) = found.gpus
    assert (gpu.pci_slot, gpu.functions, gpu.numa) == (GPU, [GPU, "0000:65:00.1"], 1)
    assert (gpu.architecture, gpu.kernel_modules) == ("Hopper", "OpenOrProprietary")
    assert (gpu.vram_bytes, gpu.uuid, gpu.pci_valid) == (128 << 30, None, True)
    assert found.driver_version is None


def test_the_driver_adds_what_only_it_knows(root: Path) -> None:
    (gpu,) = machine(root).inventory().gpus
    assert (gpu.uuid, gpu.brand, gpu.vram_bytes, gpu.index) == ("GPU-1", "NVIDIA H200", 141 << 30, 0)
    assert not gpu.mig_enabled
    (sample,) = Nvml(fake_pynvml()).samples()
    assert (sample.utilization, sample.temperature, sample.power_watts) == (42, 55, 123)


def test_without_the_library_everything_is_as_the_kernel_says(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    bare = Machine(root, sys=root / "sys", proc=root / "proc", nvml=Nvml())
    assert [gpu.pci_slot for gpu in bare.inventory().gpus] == [GPU]
    assert Nvml().samples() == []


def test_a_gpu_that_fell_off_the_bus_is_not_valid(root: Path) -> None:
    pci(root, "0000:66:00.0", "0x10de", "0x2335", "0x030200", b"\xff\xff")
    found = {gpu.pci_slot: gpu for gpu in machine(root).inventory(problems={GPU: "did not come back"}).gpus}
    assert (found["0000:66:00.0"].pci_valid, found["0000:66:00.0"].healthy) == (False, False)
    assert (found[GPU].pci_valid, found[GPU].healthy, found[GPU].problem) == (True, False, "did not come back")


@pytest.mark.parametrize(
    ("device", "architecture", "modules"),
    [
        ("0x1db6", "Volta", "ProprietaryOnly"),
        ("0x1eb8", "Turing", "OpenOrProprietary"),
        ("0x20b2", "Ampere", "OpenOrProprietary"),
        ("0x26b9", "Ada", "OpenOrProprietary"),
        ("0x2342", "GraceHopper", "OpenOnly"),
        ("0x2901", "Blackwell", "OpenOnly"),
        ("0x0001", "Unknown", "Unknown"),
    ],
)
def test_the_architecture_says_which_kernel_modules_drive_it(
    root: Path, device: str, architecture: str, modules: str
) -> None:
    pci(root, GPU, "0x10de", device, "0x030200")
    (gpu,) = machine(root, nvmlInit=no_driver).inventory().gpus
    assert (gpu.architecture, gpu.kernel_modules) == (architecture, modules)


def test_free_space_and_pages_do_not_make_it_another_machine(root: Path) -> None:
    before = machine(root).inventory()
    write(root / "sys/devices/system/node/node0/hugepages/hugepages-1048576kB/free_hugepages", "0")
    after = machine(root).inventory()
    assert before.digest() == after.digest()
    assert before.digest() != msgspec.structs.replace(before, memory_bytes=1).digest()
    assert machine(root).boot_id() == "boot-1"


def test_a_gpu_is_healthy_when_its_driver_has_it_idle_and_readable() -> None:
    def unreadable(handle: Any) -> Any:
        raise NVMLError("GPU is lost")

    assert Nvml(fake_pynvml()).healthy(GPU)
    assert not Nvml(fake_pynvml()).healthy("0000:01:00.0"), "the driver does not see it"
    assert not Nvml(fake_pynvml(nvmlDeviceGetMemoryInfo=unreadable)).healthy(GPU)
    assert not Nvml(fake_pynvml(nvmlDeviceGetComputeRunningProcesses=lambda handle: [1])).healthy(GPU)
    assert Nvml(fake_pynvml(nvmlInit=no_driver)).healthy(GPU), "nobody can tell"
