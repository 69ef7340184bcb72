"""Implementations under test and random weights in every format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from kernels.cpu import CpuOps
from kernels.interface import BlockQuantized, WeightPart
from kernels.native_library import default_cache_dir
from kernels.reference import ReferenceOps

VARIANTS = {
    "native": ("-march=native",),
    "portable": ("-DHR_PORTABLE",),
    # Sixteen lanes where the machine has eight: quick to compile rather than quick
    "portable16": ("-march=native", "-DHR_PORTABLE", "-DHR_LANES=16", "-O1"),
}
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(scope="session")
def kernel_cache() -> Path:
    """The user's cache of native builds: a build's name hashes everything that went into it, so none is stale."""
    return default_cache_dir()


@pytest.fixture(scope="session")
def build_variant(kernel_cache: Path) -> Callable[..., CpuOps]:
    built: dict[tuple[str, int], CpuOps] = {}

    def build(name: str, activation_bits: int = 16) -> CpuOps:
        if (name, activation_bits) not in built:
            built[name, activation_bits] = CpuOps(2, kernel_cache, VARIANTS[name], activation_bits)
        return built[name, activation_bits]

    return build


@pytest.fixture(scope="session")
def cpu(build_variant: Callable[[str], CpuOps]) -> CpuOps:
    """The native implementation as this machine builds it, with two threads."""
    return build_variant("native")


@pytest.fixture(scope="session")
def reference() -> ReferenceOps:
    return ReferenceOps()


@pytest.fixture
def random_weight() -> Callable[..., WeightPart]:
    """(rows, inputs, format, seed) → a weight part of that format."""

    def make(rows: int, inputs: int, kind: str, seed: int = 0) -> WeightPart:
        values = torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, inputs), dtype=np.float32))
        if kind in FLOATS:
            return values.to(FLOATS[kind])
        data = quantize(values.numpy(), GGMLQuantizationType[kind.upper()])
        return BlockQuantized(torch.from_numpy(data), kind, inputs)  # type: ignore[arg-type]

    return make
