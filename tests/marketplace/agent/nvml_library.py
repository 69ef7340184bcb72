"""A library of NVIDIA's driver in memory, as pynvml calls it: GPUs that can be split, by the rules of the real one."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pynvml

_WORDS = re.compile("(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_GPU, _DEVICE, _INSTANCE, _COMPUTE = 1000, 2000, 3000, 4000


class Shape(NamedTuple):
    """A profile: its number and id, and what it takes of a GPU with 141 GB."""

    id: int
    name: str
    slices: int
    size: int
    starts: tuple[int, ...]


SHAPES = {
    0: Shape(19, "1g.18gb", 1, 1, (0, 1, 2, 3, 4, 5, 6)),
    1: Shape(14, "2g.35gb", 2, 2, (0, 2, 4)),
    2: Shape(9, "3g.71gb", 3, 4, (0, 4)),
    4: Shape(0, "7g.141gb", 7, 8, (0,)),
}
_COMPUTES = {0: 1, 1: 2, 2: 3, 4: 7}
"""Compute slices by the number of the kind of compute instance; its id is its number."""


class Gpu:
    """A GPU: whether it is split, into what, and who computes on it (0 is all of it)."""

    def __init__(self, number: int) -> None:
        self.uuid, self.slot = f"GPU-{number}", f"0000:{0x65 + number:02x}:00.0"
        self.split = self.pending = False
        self.older = False
        """whether it has to be reset to be split or joined"""
        self.parts: dict[int, tuple[Shape, int]] = {}
        self.computes: dict[int, list[int]] = {}
        self.processes: dict[int, list[int]] = {}

    def reset(self) -> None:
        """As by its bus."""
        self.split = self.pending
        self.parts.clear()
        self.computes.clear()

    def make(self, name: str, start: int) -> int:
        """Have an instance, as an operator makes it; returns its number."""
        number = next(n for n in range(1, 99) if n not in self.parts)
        self.parts[number] = next(shape for shape in SHAPES.values() if shape.name == name), start
        self.computes[number] = [0]
        return number

    @property
    def shown(self) -> list[tuple[str, int]]:
        """What instances there are."""
        return sorted((shape.name, start) for shape, start in self.parts.values())


class _Call:
    """A function of a library: pynvml sets attributes of some."""

    def __init__(self, work: Callable[..., int]) -> None:
        self.work = work
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> Any:
        return self.work(*arguments)


class Library:
    """What pynvml loads. Functions that are not here are those that an older driver lacks."""

    def __init__(self, gpus: int = 1) -> None:
        self.gpus = [Gpu(number) for number in range(gpus)]
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> _Call:
        words = _WORDS.sub("_", name.removeprefix("nvml").removesuffix("_v2").removesuffix("_v3"))
        work = type(self).__dict__.get(f"do_{words.lower()}")
        if work is None:
            raise AttributeError(name)

        def called(*arguments: Any) -> Any:
            self.calls.append(name)
            return work(self, *arguments)

        return _Call(called)

    def do_init_with_flags(self, flags: int) -> int:
        return 0

    def do_shutdown(self) -> int:
        return 0

    def do_error_string(self, code: int) -> bytes:
        return f"error {code}".encode()

    def do_system_get_driver_version(self, text: Any, size: Any) -> int:
        text.value = b"570.1"
        return 0

    def do_device_get_count(self, count: Any) -> int:
        count._obj.value = len(self.gpus)
        return 0

    def do_device_get_handle_by_index(self, index: Any, device: Any) -> int:
        return _point(device, _GPU + index.value)

    def do_device_get_handle_by_uuid(self, uuid: Any, device: Any) -> int:
        for number, gpu in enumerate(self.gpus):
            if gpu.uuid.encode() == uuid.value:
                return _point(device, _GPU + number)
        return int(pynvml.NVML_ERROR_NOT_FOUND)

    def do_device_get_pci_info(self, device: Any, info: Any) -> int:
        info._obj.busId = f"0000{self._gpu(device).slot}".upper().encode()
        return 0

    def do_device_get_uuid(self, device: Any, text: Any, size: Any) -> int:
        number, gpu = _read(device), self._gpu(device)
        text.value = (gpu.uuid if number < _DEVICE else f"MIG-{gpu.uuid}-{number % 100}").encode()
        return 0

    def do_device_get_name(self, device: Any, text: Any, size: Any) -> int:
        number, gpu = _read(device), self._gpu(device)
        part = "" if number < _DEVICE else f" MIG {gpu.parts[number % 100][0].name}"
        text.value = f"NVIDIA H200{part}".encode()
        return 0

    def do_device_get_architecture(self, device: Any, found: Any) -> int:
        found._obj.value = 9
        return 0

    def do_device_get_memory_info(self, device: Any, info: Any) -> int:
        info._obj.total, info._obj.used = 141 << 30, 0
        return 0

    def do_device_get_compute_running_processes(self, device: Any, count: Any, found: Any) -> int:
        number = _read(device)
        pids = self._gpu(device).processes.get(0 if number < _DEVICE else number % 100, [])
        known = count._obj.value
        count._obj.value = len(pids)
        if found is None or known < len(pids):
            return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE) if pids else 0
        for place, pid in enumerate(pids):
            found[place].pid = pid
        return 0

    def do_device_get_mig_mode(self, device: Any, mode: Any, pending: Any) -> int:
        gpu = self._gpu(device)
        mode._obj.value, pending._obj.value = gpu.split, gpu.pending
        return 0

    def do_device_set_mig_mode(self, device: Any, mode: int, status: Any) -> int:
        gpu = self._gpu(device)
        if gpu.parts or gpu.processes.get(0):
            return int(pynvml.NVML_ERROR_IN_USE)
        gpu.pending = bool(mode)
        if not gpu.older:
            gpu.split = gpu.pending
        return 0

    def do_device_get_gpu_instance_profile_info_v(self, device: Any, number: int, info: Any) -> int:
        shape = SHAPES.get(number)
        if shape is None:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        info._obj.id, info._obj.sliceCount, info._obj.instanceCount = shape.id, shape.slices, len(shape.starts)
        info._obj.name = f"MIG {shape.name}".encode()
        return 0

    def do_device_get_gpu_instance_possible_placements(self, device: Any, id: int, places: Any, count: Any) -> int:
        shape = _shape(id)
        count._obj.value = len(shape.starts)
        for place, start in zip(places or (), shape.starts, strict=False):
            place.start, place.size = start, shape.size
        return 0

    def do_device_get_gpu_instances(self, device: Any, id: int, found: Any, count: Any) -> int:
        gpu = self._gpu(device)
        if not gpu.split:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        numbers = [number for number, (shape, _) in gpu.parts.items() if shape.id == id]
        return _fill(found, count, [self._number(device, _INSTANCE) + number for number in numbers])

    def do_device_create_gpu_instance_with_placement(self, device: Any, id: int, place: Any, made: Any) -> int:
        gpu, shape, start = self._gpu(device), _shape(id), place._obj.start
        if not gpu.split or start not in shape.starts or place._obj.size != shape.size:
            return int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        taken = {one for known, first in gpu.parts.values() for one in range(first, first + known.size)}
        if taken.intersection(range(start, start + shape.size)):
            return int(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
        number = gpu.make(shape.name, start)
        gpu.computes[number] = []
        return _point(made, self._number(device, _INSTANCE) + number)

    def do_gpu_instance_get_info(self, instance: Any, info: Any) -> int:
        gpu, number = self._gpu(instance), _read(instance) % 100
        shape, start = gpu.parts[number]
        info._obj.id, info._obj.profileId = number, shape.id
        info._obj.placement.start, info._obj.placement.size = start, shape.size
        return 0

    def do_gpu_instance_destroy(self, instance: Any) -> int:
        gpu, number = self._gpu(instance), _read(instance) % 100
        if gpu.computes[number]:
            return int(pynvml.NVML_ERROR_IN_USE)
        del gpu.parts[number], gpu.computes[number]
        return 0

    def do_gpu_instance_get_compute_instance_profile_info_v(
        self, instance: Any, kind: int, engine: int, info: Any
    ) -> int:
        shape, _ = self._gpu(instance).parts[_read(instance) % 100]
        slices = _COMPUTES.get(kind)
        if slices is None or slices > shape.slices:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        info._obj.id, info._obj.sliceCount, info._obj.instanceCount = kind, slices, shape.slices // slices
        return 0

    def do_gpu_instance_get_compute_instances(self, instance: Any, id: int, found: Any, count: Any) -> int:
        gpu, number = self._gpu(instance), _read(instance) % 100
        there = [one for one in gpu.computes[number] if one == id]
        return _fill(found, count, [self._number(instance, _COMPUTE) + number for _ in there])

    def do_gpu_instance_create_compute_instance(self, instance: Any, id: int, made: Any) -> int:
        number = _read(instance) % 100
        self._gpu(instance).computes[number].append(id)
        return _point(made, self._number(instance, _COMPUTE) + number)

    def do_compute_instance_destroy(self, compute: Any) -> int:
        gpu, number = self._gpu(compute), _read(compute) % 100
        if gpu.processes.get(number):
            return int(pynvml.NVML_ERROR_IN_USE)
        gpu.computes[number].pop()
        return 0

    def do_device_get_max_mig_device_count(self, device: Any, count: Any) -> int:
        count._obj.value = 7 if self._gpu(device).split else 0
        return 0

    def do_device_get_mig_device_handle_by_index(self, device: Any, index: Any, found: Any) -> int:
        there = [number for number, computes in self._gpu(device).computes.items() if computes]
        if index.value >= len(there):
            return int(pynvml.NVML_ERROR_NOT_FOUND)
        return _point(found, self._number(device, _DEVICE) + there[index.value])

    def do_device_get_gpu_instance_id(self, device: Any, number: Any) -> int:
        number._obj.value = _read(device) % 100
        return 0

    def do_device_get_gpu_instance_by_id(self, device: Any, number: int, found: Any) -> int:
        return _point(found, self._number(device, _INSTANCE) + number)

    def _gpu(self, handle: Any) -> Gpu:
        number = _read(handle)
        return self.gpus[number - _GPU if number < _DEVICE else number % 1000 // 100]

    def _number(self, handle: Any, kind: int) -> int:
        """Number of the first handle of a kind on a GPU."""
        return kind + 100 * self.gpus.index(self._gpu(handle))


def _shape(id: int) -> Shape:
    return next(shape for shape in SHAPES.values() if shape.id == id)


def _read(handle: Any) -> int:
    return int(ctypes.cast(handle, ctypes.c_void_p).value or 0)


def _point(reference: Any, number: int) -> int:
    ctypes.c_void_p.from_buffer(reference._obj).value = number
    return 0


def _fill(found: Any, count: Any, numbers: list[int]) -> int:
    assert len(numbers) <= len(found), "the buffer is large enough for all that a GPU can have"
    places = ctypes.cast(found, ctypes.POINTER(ctypes.c_void_p))
    for place, number in enumerate(numbers):
        places[place] = number
    count._obj.value = len(numbers)
    return 0
