"""MIG instances: made when somebody begins who rented one, and taken away when nobody has it any more.

What was made here is written down before it is made, and only that is ever taken away: instances that the operator made
are used and stay. A GPU that is not split is split for its first part, where nothing computes on it, and is whole again
after its last. Blocking: it belongs in a thread.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable, Collection, Iterator
from ctypes import byref, c_uint
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from marketplace.agent.mig_facts import Known, Part, parent, part, profiles
from marketplace.agent.nvml import slot_of
from marketplace.agent.records import write_whole
from marketplace.agent.vfio import VfioError

_log = logging.getLogger(__name__)
_SHARED = 0
"""Compute instances that share the engines of their GPU instance."""


class MigError(Exception):
    """A part of a GPU cannot be made. The message says which and why."""


class _Own(msgspec.Struct, frozen=True):
    """What was made here."""

    parts: list[str] = []
    split: list[str] = []
    """GPUs that were whole before"""


class Mig:
    """The parts of this node's GPUs. Safe to share between threads."""

    def __init__(
        self,
        file: Path,
        *,
        reset: Callable[[str], None],
        listed: Callable[[], None] = lambda: None,
        module: ModuleType | None = None,
    ) -> None:
        """`file` remembers what was made here. `reset` resets a GPU by its slot, which older ones need to be split, and
        raises VfioError; `listed` has the node's container engines know of new devices. `module` stands in for pynvml.
        """
        self._file, self._reset, self._listed, self._module = file, reset, listed, module
        self._one = threading.Lock()

    def make(self, names: list[str]) -> list[str]:
        """The devices that these names stand for; parts that are not there are made. Safe to repeat. MigError."""
        found = [part(name) for name in names]
        if not any(found):
            return names
        with self._one, self._told():
            for one in found:
                if one is not None:
                    self._split(one)
            uuids = [name if one is None else self._make(one) for name, one in zip(names, found, strict=True)]
            self._listed()  # they may be there since an agent was killed that had not listed them yet
            return uuids

    def release(self, names: Collection[str]) -> None:
        """Take parts away that were made here, where nothing computes on them. What cannot be taken away stays written
        down, for the next time. MigError: what is written down cannot be read."""
        with self._one:
            for name in sorted(set(self._own().parts).intersection(names)):
                if self._tried(name, self._unmake):
                    own = self._own()
                    self._keep(msgspec.structs.replace(own, parts=[known for known in own.parts if known != name]))
            for gpu in self._own().split:
                own = self._own()
                if not any(parent(name) == gpu for name in own.parts) and self._tried(gpu, self._join):
                    self._keep(msgspec.structs.replace(own, split=[known for known in own.split if known != gpu]))

    def made(self) -> frozenset[str]:
        """Parts, and GPUs that were split, which are to be given back some time. MigError: what is written down cannot
        be read."""
        with self._one:
            own = self._own()
            return frozenset((*own.parts, *own.split))

    def _tried(self, name: str, work: Callable[[str], bool]) -> bool:
        try:
            with self._told():
                return work(name)
        except MigError as error:
            _log.warning("%s stays as it is: %s", name, error)
            return False

    def _split(self, one: Part) -> None:
        """Have a GPU in parts. Older ones have to be reset for that."""
        with self._gpu(one.gpu) as (nvml, handle, slot):
            mode, pending = nvml.nvmlDeviceGetMigMode(handle)
            if mode:
                return
            if nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                raise MigError(f"{one.gpu} cannot be split: somebody computes on it")
            own = self._own()
            if one.gpu not in own.split:
                self._keep(msgspec.structs.replace(own, split=[*own.split, one.gpu]))
            if not pending:
                nvml.nvmlDeviceSetMigMode(handle, nvml.NVML_DEVICE_MIG_ENABLE)
        self._await_mode(one.gpu, slot, split=True)

    def _join(self, gpu: str) -> bool:
        """Have a GPU whole again; False where somebody still has a part of it."""
        with self._gpu(gpu) as (nvml, handle, slot):
            if nvml.nvmlDeviceGetMigMode(handle)[0]:
                if any(self._instances(nvml, handle, known) for known in profiles(nvml, handle)):
                    return False
                nvml.nvmlDeviceSetMigMode(handle, nvml.NVML_DEVICE_MIG_DISABLE)
        self._await_mode(gpu, slot, split=False)
        return True

    def _await_mode(self, gpu: str, slot: str, *, split: bool) -> None:
        """The driver is not used meanwhile: a GPU that somebody has open is not reset."""
        if self._mode(gpu) != split:
            self._reset(slot)
        if self._mode(gpu) != split:
            raise MigError(f"{gpu} cannot be {'split' if split else 'joined'} without starting the machine anew")

    def _mode(self, gpu: str) -> bool:
        with self._gpu(gpu) as (nvml, handle, _):
            return bool(nvml.nvmlDeviceGetMigMode(handle)[0])

    def _make(self, one: Part) -> str:
        with self._gpu(one.gpu) as (nvml, handle, _):
            known = next((known for known in profiles(nvml, handle) if known.name == one.profile), None)
            if known is None or one.start not in known.sizes:
                raise MigError(f"{one.gpu} has no {one.profile} at slice {one.start}")
            instance = self._at(nvml, handle, known, one.start)
            if instance is None:
                own = self._own()
                if str(one) not in own.parts:
                    self._keep(msgspec.structs.replace(own, parts=[*own.parts, str(one)]))
                place = nvml.c_nvmlGpuInstancePlacement_t(one.start, known.sizes[one.start])
                instance = nvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, known.id, byref(place))
            self._compute(nvml, instance, known.slices)
            return self._uuid(nvml, handle, nvml.nvmlGpuInstanceGetInfo(instance).id, one)

    def _compute(self, nvml: Any, instance: Any, slices: int) -> None:
        """Give an instance one that computes with all of it, unless it has any."""
        whole = None
        for info, there in self._computes(nvml, instance):
            if there:
                return
            if info.sliceCount == slices:
                whole = info
        if whole is None:
            raise MigError(f"no instance computes with {slices} slices")
        nvml.nvmlGpuInstanceCreateComputeInstance(instance, whole.id)

    def _unmake(self, name: str) -> bool:
        """Take a part away; False where somebody computes on it."""
        one = part(name)
        assert one is not None, "only parts are written down"
        with self._gpu(one.gpu) as (nvml, handle, _):
            if not nvml.nvmlDeviceGetMigMode(handle)[0]:
                return True  # the machine began anew, or somebody else took it away
            known = next((known for known in profiles(nvml, handle) if known.name == one.profile), None)
            instance = None if known is None else self._at(nvml, handle, known, one.start)
            if instance is None:
                return True
            number = nvml.nvmlGpuInstanceGetInfo(instance).id
            for device in self._devices(nvml, handle):
                used = nvml.nvmlDeviceGetGpuInstanceId(device) == number
                if used and nvml.nvmlDeviceGetComputeRunningProcesses(device):
                    _log.warning("%s stays: somebody computes on it", one)
                    return False
            for _, there in self._computes(nvml, instance):
                for compute in there:
                    nvml.nvmlComputeInstanceDestroy(compute)
            nvml.nvmlGpuInstanceDestroy(instance)
            return True

    def _at(self, nvml: Any, handle: Any, known: Known, start: int) -> Any:
        """The instance of a profile that begins there, or None."""
        found = self._instances(nvml, handle, known)
        return next((one for one in found if nvml.nvmlGpuInstanceGetInfo(one).placement.start == start), None)

    def _instances(self, nvml: Any, handle: Any, known: Known) -> list[Any]:
        count, found = c_uint(0), (nvml.c_nvmlGpuInstance_t * known.most)()
        nvml.nvmlDeviceGetGpuInstances(handle, known.id, found, byref(count))
        return list(found[: count.value])

    def _computes(self, nvml: Any, instance: Any) -> Iterator[tuple[Any, list[Any]]]:
        """Kinds of compute instances, and those that there are."""
        for number in range(nvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
            try:
                info = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, number, _SHARED)
            except nvml.NVMLError:
                continue  # not a kind that fits into this one
            count, found = c_uint(0), (nvml.c_nvmlComputeInstance_t * info.instanceCount)()
            nvml.nvmlGpuInstanceGetComputeInstances(instance, info.id, found, byref(count))
            yield info, list(found[: count.value])

    def _devices(self, nvml: Any, handle: Any) -> Iterator[Any]:
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with contextlib.suppress(nvml.NVMLError):
                yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)

    def _uuid(self, nvml: Any, handle: Any, number: int, one: Part) -> str:
        for device in self._devices(nvml, handle):
            if nvml.nvmlDeviceGetGpuInstanceId(device) == number:
                return str(nvml.nvmlDeviceGetUUID(device))
        raise MigError(f"{one} was made, and its driver does not show it")

    @contextlib.contextmanager
    def _gpu(self, name: str) -> Iterator[tuple[Any, Any, str]]:
        """The library, a GPU of it, and the GPU's slot."""
        with self._session() as nvml:
            find = nvml.nvmlDeviceGetHandleByUUID if name.startswith("GPU-") else nvml.nvmlDeviceGetHandleByPciBusId
            handle = find(name)
            yield nvml, handle, slot_of(nvml.nvmlDeviceGetPciInfo(handle).busId)

    @contextlib.contextmanager
    def _session(self) -> Iterator[Any]:
        try:
            nvml: Any = self._module or importlib.import_module("pynvml")
        except ImportError as error:
            raise MigError("parts of GPUs need the package nvidia-ml-py") from error
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise MigError(f"the GPUs' driver does not answer: {error}") from error
        try:
            yield nvml
        except nvml.NVMLError as error:
            raise MigError(f"the GPUs' driver refuses: {error}") from error
        finally:
            nvml.nvmlShutdown()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (VfioError, OSError) as error:
            raise MigError(str(error)) from error

    def _own(self) -> _Own:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=_Own)
        except FileNotFoundError:
            return _Own()
        except msgspec.MsgspecError as error:
            raise MigError(f"{self._file}: {error}") from error

    def _keep(self, own: _Own) -> None:
        write_whole(self._file, msgspec.json.encode(own), durable=True)
