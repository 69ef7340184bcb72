"""What a GPU's driver tells of its MIG profiles, and the names that parts of GPUs go by between server and node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from ctypes import byref, c_uint
from typing import Any, NamedTuple

import msgspec


class Part(NamedTuple):
    """A MIG instance as the server names it: by where it is, because its own name changes whenever it is made."""

    gpu: str
    """UUID, or PCI slot where that is not known"""
    start: int
    """first memory slice"""
    profile: str

    def __str__(self) -> str:
        """`GPU-…/4/3g.71gb`."""
        return f"{self.gpu}/{self.start}/{self.profile}"


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A profile as the driver knows it."""

    id: int
    name: str
    """as NVIDIA writes it: 1g.10gb, 1g.10gb+me"""
    slices: int
    """of computing"""
    most: int
    """instances of it that one GPU can have"""
    sizes: dict[int, int]
    """memory slices that it takes, by where it begins"""


def part(name: str) -> Part | None:
    """The part of a GPU that a name names; None for a whole GPU."""
    gpu, _, rest = name.partition("/")
    start, _, profile = rest.partition("/")
    return Part(gpu, int(start), profile) if start.isdigit() and profile else None


def parent(name: str) -> str:
    """The GPU that a name names, or names a part of."""
    return name.partition("/")[0]


def profiles(nvml: Any, handle: Any) -> list[Known]:
    """The profiles of a GPU, whether it is split now or not; none of one that cannot be, or whose driver tells of them
    only while it is."""
    return list(_profiles(nvml, handle))


def _profiles(nvml: Any, handle: Any) -> Iterator[Known]:
    for number in range(nvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        with contextlib.suppress(nvml.NVMLError):
            info = nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, number)
            sizes = _placements(nvml, handle, info.id)
            if sizes:
                yield Known(
                    id=int(info.id),
                    name=str(info.name).rpartition("MIG ")[2],
                    slices=int(info.sliceCount),
                    most=int(info.instanceCount),
                    sizes=sizes,
                )


def _placements(nvml: Any, handle: Any, profile_id: int) -> dict[int, int]:
    count = c_uint(0)
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, None, byref(count))
    places = (nvml.c_nvmlGpuInstancePlacement_t * count.value)()
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, places, byref(count))
    return {int(one.start): int(one.size) for one in places[: count.value]}
