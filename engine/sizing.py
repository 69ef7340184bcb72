"""How large the KV cache is, in which type, and how long a sequence may get with it. Arithmetic; no tensor is
touched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.config import EngineConfig

MIB = 1 << 20
AUTO_SHARE = 4
"""An automatic KV cache takes a quarter of the free memory of a CPU machine …"""
AUTO_MOST = 2048 * MIB
"""… and at most this."""
GPU_SHARE = 0.9
"""On a GPU: this part of what is free after the weights."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


class Shape(Protocol):
    """Dimensions of a model that decide how much a token costs. (engine.models.config.ModelConfig has them.)"""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers, each with keys and values."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads."""
        ...

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        ...

    @property
    def shared_kv(self) -> bool:
        """Keys are the values, too."""
        ...

    @property
    def max_position(self) -> int:
        """Most tokens of a sequence."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends an answer."""
        ...

    @property
    def torch_dtype(self) -> str:
        """Type of the checkpoint."""
        ...


@dataclass(frozen=True, slots=True)
class KVPlan:
    """A sized KV cache."""

    dtype: str
    num_pages: int
    token_bytes: int
    """keys and values of one token in all layers"""
    max_context: int
    """most tokens of prompt and answer together"""
    page_size: int
    beside: int = 0
    """bytes that the pages of a draft model take for one token"""

    @property
    def tokens(self) -> int:
        """Capacity in tokens."""
        return self.num_pages * self.page_size

    @property
    def bytes(self) -> int:
        """Memory of all pages."""
        return self.tokens * (self.token_bytes + self.beside)


def cache_dtype(config: EngineConfig, shape: Shape, *, packed: bool, device: str) -> str:
    """Torch's name of the type of a model's keys and values."""
    if config.kv_dtype != "auto":
        return "float8_e4m3fn" if config.kv_dtype == "fp8" else config.kv_dtype
    if device == "cpu":
        return "float16" if packed else "float32"
    return config.dtype if config.dtype != "auto" else _known_dtype(shape.torch_dtype)


def token_bytes(shape: Shape, dtype: str) -> int:
    """Keys and values of one token in all layers."""
    tensors = shape.num_layers * (1 if shape.shared_kv else 2)
    return tensors * shape.num_kv_heads * shape.head_dim * ITEM_BYTES[dtype]


def plan_kv(
    config: EngineConfig, shape: Shape, *, packed: bool, device: str, free_bytes: int, beside: int = 0
) -> KVPlan:
    """Size the KV cache within `free_bytes`; beside: bytes that a draft model keeps for each of its tokens. Raises
    ValueError, with the numbers, for a setting that cannot be met."""
    if config.page_size not in (16, 32, 64):
        raise ValueError(f"page_size must be 16, 32 or 64, not {config.page_size}")
    if config.max_running < 1 or config.step_tokens < 1 or config.max_queued < 0:
        raise ValueError("max_running and step_tokens must be at least 1, max_queued at least 0")
    dtype = cache_dtype(config, shape, packed=packed, device=device)
    own = token_bytes(shape, dtype)
    page_bytes = (own + beside) * config.page_size
    if config.kv_memory_mib > 0:
        budget = config.kv_memory_mib * MIB
        if device != "cpu" and budget > free_bytes:  # a CPU takes memory page by page, as it is written
            raise ValueError(
                f"a KV cache of {config.kv_memory_mib} MiB (kv_memory_mib) is more than the {free_bytes // MIB} MiB"
                f" that the device has left beside weights and workspace"
            )
    elif device == "cpu":
        budget = min(free_bytes // AUTO_SHARE, AUTO_MOST)
    else:
        budget = int(free_bytes * GPU_SHARE)
    num_pages = budget // page_bytes
    if num_pages < 1:
        raise ValueError(
            f"a KV cache of {budget / MIB:.1f} MiB holds no page: one page of {config.page_size} tokens"
            f" takes {page_bytes / MIB:.2f} MiB (kv_memory_mib)"
        )
    capacity = num_pages * config.page_size
    if config.max_context > shape.max_position:
        raise ValueError(f"max_context {config.max_context} is over the model's own {shape.max_position} tokens")
    if config.max_context > capacity:
        needed = -(-(-(-config.max_context // config.page_size) * page_bytes) // MIB)
        raise ValueError(
            f"max_context {config.max_context} is over the {capacity} tokens that the KV cache of"
            f" {budget / MIB:.0f} MiB holds; it needs kv_memory_mib {needed}"
        )
    max_context = config.max_context or min(shape.max_position, capacity)
    return KVPlan(dtype, num_pages, own, max_context, config.page_size, beside)


def _known_dtype(name: str) -> str:
    return name if name in ("float32", "float16") else "bfloat16"


def free_host_bytes() -> int:
    """Memory that this process may still take: what the kernel says is available, within its control group's limit."""
    free = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - used))
