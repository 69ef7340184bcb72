"""What a kernel can be launched with: the rows of the table that is compiled ahead of time.

Every file of kernels here has `configurations()`, which yields one `Configuration` for each combination of types,
constants and launch options that its launcher can choose for the supported models; it takes the options from the same
functions as the launcher does. Nothing else about a launch makes Triton compile: counts that change from step to step
are `do_not_specialize`, sizes that a model fixes are constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}
"""Triton's name of a pointer to a torch type."""

ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)
"""Types that activations have on a GPU."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One way to launch one kernel."""

    kernel: Any
    """The function under triton.jit"""
    name: str
    """Short, unique among the kernel's configurations, such as "bf16 h4096" """
    signature: Mapping[str, str]
    """Argument → Triton type ("*bf16", "i32", "fp32") of every argument that is not a constant"""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """constexpr arguments, and pointer arguments that are None"""
    unaligned: tuple[str, ...] = ()
    """Pointers that need not be multiples of 16 bytes"""
    divisible: tuple[str, ...] = ()
    """Integer arguments that are multiples of 16"""
    num_warps: int = 4
    num_stages: int = 3
    fp_fusion: bool = True
    """False keeps products and sums apart, so that they round as on a CPU"""
    min_arch: int = 80
    """Lowest compute capability it is launched on, as 80 for 8.0: 8-bit floats need 89"""
    hot: bool = False
    """Compiled by the tests that run every time: the step of an 8B bf16 model"""
    spills: int = 0
    """Bytes of registers spilled to memory, per thread, that are accepted"""
