"""Attention with a score of each head's that has no value, and caches whose keys are their own values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cpu import CpuOps
from kernels.interface import Ops
from kernels.reference import ReferenceOps

HEADS, KV_HEADS, SIZE, PAGE = 6, 2, 32, 8
STARTS = torch.tensor([0, 1, 4, 44], dtype=torch.int32)
LENGTHS = torch.tensor([50, 9, 40], dtype=torch.int32)
TABLE = torch.randperm(21, generator=torch.Generator().manual_seed(1)).int().view(3, 7)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("window", [0, 11])
def test_a_sink_takes_its_part_of_the_softmax(window: int, cpu: CpuOps, reference: ReferenceOps) -> None:
    q, keys, values = (
        draw(44, HEADS, SIZE),
        draw(21, KV_HEADS, PAGE, SIZE, seed=1),
        draw(21, KV_HEADS, PAGE, SIZE, seed=2),
    )
    sinks = torch.tensor([-30.0, -1.0, 0.0, 1.5, 5.0, 90.0])
    arguments = (q, keys, values, STARTS, LENGTHS, TABLE, 0.2, window)
    wanted = reference.paged_attention(*arguments, sinks=sinks).view(44, HEADS, SIZE)
    got = cpu.paged_attention(*arguments, sinks=sinks).view(44, HEADS, SIZE)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    plain = cpu.paged_attention(*arguments).view(44, HEADS, SIZE)
    torch.testing.assert_close(got[:, 0], plain[:, 0], rtol=1e-5, atol=1e-6)
    assert not got[:, 5].any() or float(got[:, 5].abs().max()) < 1e-6
    # The second sequence's last query by hand: its share is what the sink leaves
    rows = keys[TABLE[1].long()].transpose(1, 2).reshape(-1, KV_HEADS, SIZE)[max(0, 9 - window) if window else 0 : 9, 0]
    scores = torch.cat([rows @ q[3, 1] * 0.2, sinks[1:2]])
    share = 1 - float(scores.softmax(0)[-1])
    torch.testing.assert_close(got[3, 1], plain[3, 1] * share, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match=r"sinks must be \[6\]"):
        cpu.paged_attention(*arguments, sinks=sinks[:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_may_be_the_values(dtype: torch.dtype, cpu: CpuOps, reference: ReferenceOps) -> None:
    """One tensor given for both: no values are written, and attention reads the rotated keys for them."""
    slots = torch.cat([TABLE[s, :7].long() * PAGE for s in range(3)])[:14].int() + 3
    positions = torch.arange(14, dtype=torch.int32)
    rows, angles = draw(14, (HEADS + KV_HEADS) * SIZE), draw(14, SIZE, seed=3)
    norm = torch.linspace(0.5, 1.5, SIZE)
    found = []
    implementations: tuple[Ops, ...] = (cpu, reference)
    for ops in implementations:
        cache = torch.zeros(21, KV_HEADS, PAGE, SIZE, dtype=dtype)
        q = ops.rope_and_cache(rows, HEADS, KV_HEADS, positions, slots, angles, cache, cache, norm, norm)
        twice = torch.cat([rows, torch.full((14, KV_HEADS * SIZE), float("nan"))], dim=1)
        keys, values = torch.zeros_like(cache), torch.zeros_like(cache)
        other = ops.rope_and_cache(twice, HEADS, KV_HEADS, positions, slots, angles, keys, values, norm, norm)
        assert torch.equal(q, other) and torch.equal(cache, keys)
        starts, lengths = torch.tensor([0, 14], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
        found.append(ops.paged_attention(q, cache, cache, starts, lengths, TABLE[:1], 0.2))
        assert torch.equal(found[-1], ops.paged_attention(q, cache, cache.clone(), starts, lengths, TABLE[:1], 0.2))
    close = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found[0], found[1], rtol=close, atol=close)
    with pytest.raises(ValueError, match="do not fit heads"):
        cpu.rope_and_cache(twice, HEADS, KV_HEADS, positions, slots, angles, cache, cache)
