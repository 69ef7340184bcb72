"""What the GPUs' own driver tells, where it is loaded: names, memory, MIG instances and their use now.

The driver cannot see a GPU that is bound to vfio-pci, and its numbers shift when one goes: everything is by PCI slot.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import msgspec

from marketplace.agent import mig_facts
from marketplace.agent.gpu_names import by_nvml, kernel_modules
from marketplace.agent.inventory_wire import Gpu, MigInstance, MigProfile
from marketplace.agent.wire import GpuSample


class Nvml:
    """NVIDIA's management library. Without it, or without its driver, everything is as sysfs says."""

    def __init__(self, module: ModuleType | None = None) -> None:
        """`module` stands in for pynvml."""
        self._module: Any = module
        if module is None:
            with contextlib.suppress(ImportError):
                self._module = importlib.import_module("pynvml")

    def decorate(self, gpus: list[Gpu]) -> tuple[list[Gpu], str | None]:
        """The GPUs with what the driver adds, and the driver's version."""
        with self._session() as nvml:
            if nvml is None:
                return gpus, None
            version = nvml.nvmlSystemGetDriverVersion()
            known = {slot: (index, handle) for index, slot, handle in self._handles(nvml)}
            told = [self._told(nvml, gpu, *known[gpu.pci_slot]) if gpu.pci_slot in known else gpu for gpu in gpus]
            return told, version if isinstance(version, str) else version.decode()

    def samples(self) -> list[GpuSample]:
        """Use of each GPU now."""
        with self._session() as nvml:
            return [] if nvml is None else [self._sample(nvml, slot, handle) for _, slot, handle in self._handles(nvml)]

    def slots(self) -> dict[str, str]:
        """PCI slot of each whole GPU that the driver has, by UUID. Empty where there is no driver."""
        with self._session() as nvml:
            if nvml is None:
                return {}
            return {_text(nvml.nvmlDeviceGetUUID(handle)): slot for _, slot, handle in self._handles(nvml)}

    def healthy(self, slot: str) -> bool:
        """Whether nothing is wrong with a GPU that nobody uses."""
        return self.problem(slot) is None

    def problem(self, slot: str) -> str | None:
        """What is wrong with a GPU that nobody uses: the driver does not have it, its memory cannot be read or needs a
        reset, the driver asks for one, or something computes on it. Without a driver nobody can tell, and it is taken
        for healthy.
        """
        with self._session() as nvml:
            if nvml is None:
                return None
            for _, found, handle in self._handles(nvml):
                if found == slot:
                    try:
                        return self._wrong(nvml, handle)
                    except nvml.NVMLError as error:
                        return f"its driver cannot read it: {error}"
            return "its driver does not see it"

    def _wrong(self, nvml: Any, handle: Any) -> str | None:
        nvml.nvmlDeviceGetMemoryInfo(handle)
        processes = [] if self._parted(nvml, handle) else nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        if processes:
            numbers = ", ".join(str(getattr(one, "pid", one)) for one in processes)
            return f"the processes {numbers} compute on it, and nobody gave it to them"
        with contextlib.suppress(nvml.NVMLError, AttributeError):  # older drivers, and GPUs without such memory
            _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
            if failed or pending:
                return "rows of its memory cannot be replaced" if failed else "rows of its memory wait to be replaced"
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            (asked,) = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
            if asked.nvmlReturn == 0 and asked.value.uiVal != nvml.NVML_GPU_RECOVERY_ACTION_NONE:
                return f"its driver asks for its recovery ({asked.value.uiVal})"
        return None

    def _parted(self, nvml: Any, handle: Any) -> bool:
        try:
            return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
        except (nvml.NVMLError, AttributeError):
            return False

    @contextlib.contextmanager
    def _session(self) -> Iterator[Any]:
        if self._module is None:
            yield None
            return
        try:
            self._module.nvmlInit()
        except self._module.NVMLError:
            yield None  # no driver, which says nothing about GPUs
            return
        try:
            yield self._module
        finally:
            self._module.nvmlShutdown()

    def _handles(self, nvml: Any) -> Iterator[tuple[int, str, Any]]:
        for index in range(nvml.nvmlDeviceGetCount()):
            with contextlib.suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                yield index, slot_of(nvml.nvmlDeviceGetPciInfo(handle).busId), handle

    def _told(self, nvml: Any, gpu: Gpu, index: int, handle: Any) -> Gpu:
        def ask(name: str, *arguments: Any) -> Any:
            """One fact; None where this driver or device does not tell."""
            try:
                return getattr(nvml, name)(handle, *arguments)
            except (nvml.NVMLError, AttributeError):
                return None

        memory, mode = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetMigMode")
        architecture = by_nvml(ask("nvmlDeviceGetArchitecture") or 0)
        if architecture == "Unknown" or gpu.architecture == "GraceHopper":
            architecture = gpu.architecture
        mig = bool(mode and mode[0])
        return msgspec.structs.replace(
            gpu,
            index=index,
            uuid=_text(ask("nvmlDeviceGetUUID")) or gpu.uuid,
            brand=_text(ask("nvmlDeviceGetName")) or gpu.brand,
            architecture=architecture,
            kernel_modules=kernel_modules(architecture),
            vram_bytes=gpu.vram_bytes if memory is None else int(memory.total),
            mig_enabled=mig,
            mig_instances=list(self._instances(nvml, handle)) if mig else [],
            mig_profiles=[] if mode is None else self._profiles(nvml, handle),
        )

    def _instances(self, nvml: Any, handle: Any) -> Iterator[MigInstance]:
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with contextlib.suppress(nvml.NVMLError):
                device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
                instance = nvml.nvmlDeviceGetGpuInstanceById(handle, nvml.nvmlDeviceGetGpuInstanceId(device))
                placement = nvml.nvmlGpuInstanceGetInfo(instance).placement
                memory = int(nvml.nvmlDeviceGetMemoryInfo(device).total)
                yield MigInstance(
                    uuid=_text(nvml.nvmlDeviceGetUUID(device)),
                    profile=_text(nvml.nvmlDeviceGetName(device)).rpartition("MIG ")[2],
                    start=int(placement.start),
                    size=int(placement.size),
                    vram_bytes=memory,
                )

    def _profiles(self, nvml: Any, handle: Any) -> list[MigProfile]:
        return [
            MigProfile(profile=one.name, size=max(one.sizes.values()), placements=sorted(one.sizes))
            for one in mig_facts.profiles(nvml, handle)
        ]

    def _sample(self, nvml: Any, slot: str, handle: Any) -> GpuSample:
        def ask(name: str, *arguments: Any) -> Any:
            try:
                return getattr(nvml, name)(handle, *arguments)
            except (nvml.NVMLError, AttributeError):
                return None

        use, memory, power = (
            ask("nvmlDeviceGetUtilizationRates"),
            ask("nvmlDeviceGetMemoryInfo"),
            ask("nvmlDeviceGetPowerUsage"),
        )
        return GpuSample(
            pci_slot=slot,
            uuid=_text(ask("nvmlDeviceGetUUID")) or None,
            utilization=None if use is None else int(use.gpu),
            temperature=ask("nvmlDeviceGetTemperature", 0),
            vram_used_bytes=None if memory is None else int(memory.used),
            vram_total_bytes=None if memory is None else int(memory.total),
            power_watts=None if power is None else round(power / 1000),
        )


def slot_of(bus_id: str | bytes) -> str:
    """`00000000:65:00.0` as the kernel writes it: `0000:65:00.0`."""
    domain, _, rest = _text(bus_id).lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode()
    return str(value) if value is not None else ""
