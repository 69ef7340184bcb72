"""What kernels need to know about a GPU before they choose a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True, slots=True)
class Architecture:
    """A device, as far as launch choices depend on it."""

    capability: int
    """Compute capability × 10: 80 is A100, 90 is H100 and H200, 100 is B200"""
    sms: int
    """Streaming multiprocessors"""

    @property
    def shared_bytes(self) -> int:
        """Shared memory that one program may use."""
        return SHARED_BYTES.get(self.capability, 99 * 1024)

    @property
    def has_group_mma(self) -> bool:
        """Whether matrix instructions of 64 rows and more read their operands from shared memory: data-centre Hopper
        and Blackwell."""
        return self.capability in (90, 100, 103)


SHARED_BYTES = {80: 163 * 1024, 87: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 103: 227 * 1024}
"""Shared memory of one program by capability; every other one since 8.6 (8.6, 8.9, 12.0, 12.1) has 99 KiB."""

INTERPRETER = Architecture(capability=90, sms=4)
"""Stands for the CPU on which kernels are interpreted: the choices of Hopper, few programs."""


@lru_cache
def architecture(device: torch.device) -> Architecture:
    """The architecture of a CUDA device; for a CPU, where kernels run interpreted, INTERPRETER."""
    if device.type != "cuda":
        return INTERPRETER
    facts = torch.cuda.get_device_properties(device)
    return Architecture(capability=facts.major * 10 + facts.minor, sms=facts.multi_processor_count)
