"""Keys and values in 8-bit floats: the native operations against the definition, bit for bit where they are written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.cpu import CpuOps
from kernels.reference import ReferenceOps

FP8 = torch.float8_e4m3fn


def empty(pages: int, heads: int, page: int, head_dim: int) -> torch.Tensor:
    return torch.zeros(pages, heads, page, head_dim, dtype=torch.uint8).view(FP8)


@pytest.mark.parametrize("variant", ["native", pytest.param("portable", marks=pytest.mark.slow)])
@pytest.mark.parametrize("head_dim", [64, 36])
def test_what_is_written_is_the_definition_s_and_what_is_read_close(
    variant: str, head_dim: int, build_variant: Callable[[str], CpuOps], reference: ReferenceOps
) -> None:
    ops, g = build_variant(variant), torch.Generator().manual_seed(head_dim)
    tokens, heads = 21, (4, 2)
    qkv = torch.randn(tokens, 8 * head_dim, generator=g) * 10.0 ** torch.randint(-4, 4, (tokens, 1), generator=g)
    qkv[3, 4 * head_dim :] = torch.linspace(-460.0, 460.0, 4 * head_dim)
    qkv[4, 4 * head_dim :] = torch.linspace(-0.02, 0.02, 4 * head_dim)
    positions = torch.arange(tokens, dtype=torch.int32)
    slots = torch.randperm(32, generator=g)[:tokens].sort().values.int()
    angles = torch.arange(32)[:, None] * 0.7 ** torch.arange(head_dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    caches = []
    for mine in (ops, reference):
        keys, values = empty(2, heads[1], 16, head_dim), empty(2, heads[1], 16, head_dim)
        q = mine.rope_and_cache(qkv, *heads, positions, slots, cos_sin, keys, values)
        caches.append((q, keys, values))
    for part in (1, 2):
        assert torch.equal(caches[0][part].view(torch.uint8), caches[1][part].view(torch.uint8))
        assert int(caches[0][part].view(torch.uint8).count_nonzero()) > 1000
    keys, values = empty(2, 2, 16, head_dim), empty(2, 2, 16, head_dim)
    for cache in (keys, values):
        every = torch.arange(cache.numel()) % 127 + 128 * (torch.arange(cache.numel()) // 127 % 2)
        cache.view(torch.uint8).copy_(
            every.to(torch.uint8)[torch.randperm(cache.numel(), generator=g)].view(cache.shape)
        )
    q = torch.randn(5, 4, head_dim, generator=g)
    batch = [torch.tensor(row, dtype=torch.int32) for row in ([0, 1, 5], [9, 16], [[1], [0]])]
    found = ops.paged_attention(q, keys, values, *batch, 1e-3)
    torch.testing.assert_close(found, reference.paged_attention(q, keys, values, *batch, 1e-3), rtol=1e-4, atol=1e-3)


def test_weights_are_not_8_bit_floats(cpu: CpuOps) -> None:
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        cpu.pack([torch.zeros(2, 32).to(FP8)])
