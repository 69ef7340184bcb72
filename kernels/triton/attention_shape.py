"""The shapes that attention is launched with, and the tile chosen for each: pure functions of shape and architecture.

A program keeps BLOCK_M query rows and walks over tiles of BLOCK_N keys. A key's address comes out of the page table, so
Triton needs two stages of its pipeline for each tile in flight: 5 stages are two tiles. Nothing is tuned at run time:
the table is fixed, so that what a launch compiles to is known before. It rests on what compiles without spilling, on
shared memory and on rooflines; it has not been measured on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.triton.architecture import Architecture

HEAD_DIMS = (64, 80, 96, 128, 256)
"""Head sizes whose every configuration is compiled ahead of time; other multiples of 16 work."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One launch configuration of `attend`."""

    block_m: int
    """Query rows (tokens × heads of a key/value head) of a program, a power of two"""
    block_n: int
    """Keys of a step, a power of two"""
    num_warps: int
    num_stages: int

    @property
    def name(self) -> str:
        """Rows×keys, warps and stages, such as "16x64w4s5"."""
        return f"{self.block_m}x{self.block_n}w{self.num_warps}s{self.num_stages}"

    def heads(self, group: int) -> int:
        """Query heads of a program's rows."""
        return min(group, self.block_m)

    def block_q(self, group: int) -> int:
        """Tokens of a program's rows."""
        return self.block_m // self.heads(group)

    def constants(self, shape: AttentionShape) -> dict[str, Any]:
        """The kernel's constants that follow from tile and shape."""
        return {
            "GROUP": shape.group,
            "KV_HEADS": shape.kv_heads,
            "D": shape.head_dim,
            "BLOCK_D": shape.block_d,
            "PAGE": shape.page_size,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "HEADS": self.heads(shape.group),
            "PRECISION": shape.precision,
        }


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a model and its cache fix about attention."""

    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype

    @classmethod
    def of(cls, q: Tensor, key_cache: Tensor) -> AttentionShape:
        """Of q [T, Hq, D] and key_cache [pages, Hkv, page_size, D]. Raises ValueError where they do not fit."""
        if q.dim() != 3 or key_cache.dim() != 4 or q.shape[2] != key_cache.shape[3]:
            raise ValueError(f"q {list(q.shape)} and a cache of {list(key_cache.shape)} do not fit together")
        shape = cls(q.shape[1], key_cache.shape[1], q.shape[2], key_cache.shape[2], q.dtype, key_cache.dtype)
        if shape.q_heads % shape.kv_heads:
            raise ValueError(f"{shape.q_heads} heads are not a multiple of {shape.kv_heads} key/value heads")
        if shape.head_dim % 16 or shape.page_size % 16:
            raise ValueError(f"heads of {shape.head_dim} or pages of {shape.page_size} are not multiples of 16")
        return shape

    @property
    def name(self) -> str:
        """Types, head size, heads and page size, such as "bfloat16 d128 32/8 p16"."""
        kinds = {str(kind).removeprefix("torch.") for kind in (self.q_dtype, self.kv_dtype)}
        return f"{'+'.join(sorted(kinds))} d{self.head_dim} {self.q_heads}/{self.kv_heads} p{self.page_size}"

    @property
    def group(self) -> int:
        """Query heads of a key/value head."""
        return self.q_heads // self.kv_heads

    @property
    def block_d(self) -> int:
        """head_dim, padded to a power of two."""
        return power_of_two(self.head_dim)

    @property
    def precision(self) -> str:
        """How float32 tiles are multiplied: exactly, for float32 is asked for where results are compared."""
        return "ieee" if self.q_dtype == torch.float32 else "tf32"

    def head_tiles(self, tile: Tile) -> int:
        """Programs that share the query heads of a key/value head."""
        return -(-self.group // tile.heads(self.group))


def choose_tile(
    arch: Architecture, shape: AttentionShape, tokens: int, *, decode: bool = False, deterministic: bool = False
) -> Tile:
    """The tile for a step of `tokens` rows. decode: one row a sequence is expected. deterministic: the same tile
    whatever the other two are.

    Small tiles read keys as fast as memory gives them, large ones read them less often; rows that a block has no
    queries for cost little, because steps of few rows wait for memory.
    """
    wide = shape.block_d > 128
    is_fp8 = shape.kv_dtype == torch.float8_e4m3fn
    if shape.q_dtype == torch.float32:
        return _fit(Tile(16, 16, 8 if wide else 4, 1 if is_fp8 else 2), arch, shape)
    if shape.block_d > 256:
        # The results of few rows fill the registers
        return _fit(Tile(16, 16, 8, 2), arch, shape)
    grouped = min(64, power_of_two(shape.group))
    if deterministic:
        block_m = 32
    elif decode or tokens <= 64:
        block_m = max(16, grouped)
    elif tokens <= 512:
        block_m = max(32, grouped)
    elif tokens < 2048 or (wide and (is_fp8 or not arch.has_group_mma)):
        block_m = 64
    else:
        block_m = 128
    # What follows keeps registers from spilling: 8-bit keys are decoded in registers, and without Hopper's matrix
    # instructions operands lie there too
    narrow = wide or (is_fp8 and block_m == 32) or (block_m == 128 and not arch.has_group_mma)
    block_n = 32 if narrow else 64
    few = block_m < 64 or (block_m == 64 and arch.has_group_mma and not wide and not is_fp8)
    return _fit(Tile(block_m, block_n, 4 if few else 8, 5), arch, shape)


FLOATS = (torch.bfloat16, torch.float16, torch.float32)
TYPES = (*((kind, kind) for kind in FLOATS), *((kind, torch.float8_e4m3fn) for kind in FLOATS))
"""Types of queries and of the cache."""


def compiled_shapes() -> Iterator[AttentionShape]:
    """The shapes compiled ahead of time: every head size in every type, and in bfloat16 every page size and groups that
    are odd, large or single."""
    for q_dtype, kv_dtype in TYPES:
        for head_dim in HEAD_DIMS:
            yield AttentionShape(32, 8, head_dim, 16, q_dtype, kv_dtype)
    for q_heads, kv_heads, page_size in ((32, 8, 32), (32, 8, 64), (8, 8, 16), (9, 3, 16), (28, 4, 16), (71, 1, 16)):
        yield AttentionShape(q_heads, kv_heads, 128, page_size, torch.bfloat16, torch.bfloat16)


LATENT = AttentionShape(128, 1, 576, 16, torch.bfloat16, torch.bfloat16)
"""DeepSeek-V3's latent attention, compiled ahead of time, too: its one key head is its own values."""


def compiled_tiles(shape: AttentionShape) -> Iterator[tuple[Tile, int]]:
    """Every tile that `choose_tile` takes for the shape, with the lowest capability that it is taken on."""
    found: dict[Tile, int] = {}
    for capability in (80, 90, 100):
        for tokens in (1, 512, 1024, 2048):
            for deterministic in (False, True):
                tile = choose_tile(Architecture(capability, 132), shape, tokens, deterministic=deterministic)
                found.setdefault(tile, capability)
    yield from found.items()


def _fit(tile: Tile, arch: Architecture, shape: AttentionShape) -> Tile:
    """The tile with as many stages as the architecture's shared memory has room for."""
    while tile.num_stages > 1 and shared_estimate(tile, shape, arch) > arch.shared_bytes:
        tile = replace(tile, num_stages=tile.num_stages - 1)
    return tile


def shared_estimate(tile: Tile, shape: AttentionShape, arch: Architecture) -> int:
    """Upper estimate of a program's shared memory in bytes: keys and values in flight, queries, weights; and where
    matrix instructions read their operands from shared memory, the tile they still read and the results on their way
    out."""
    copies = 2 if arch.has_group_mma else 1
    in_flight = 2 * max(1, tile.num_stages // 2) + (copies - 1)
    keys = in_flight * tile.block_n * shape.block_d * shape.kv_dtype.itemsize
    rows = tile.block_m * (copies * shape.block_d + tile.block_n) * shape.q_dtype.itemsize
    return keys + rows + 4096


def power_of_two(n: int) -> int:
    """The least power of two ≥ n, n ≥ 1."""
    return 1 << (n - 1).bit_length()
