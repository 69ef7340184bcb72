"""Sinks, and caches whose keys are their own values, in the interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels import reference
from kernels.triton.architecture import Architecture
from kernels.triton.attention import paged_attention
from kernels.triton.rope_cache import rope_and_cache

HOPPER = Architecture(90, 4)


@pytest.mark.parametrize(
    ("dtype", "window", "split"),
    [
        (torch.float32, 0, True),
        pytest.param(torch.float32, 33, True, marks=pytest.mark.slow),
        (torch.bfloat16, 0, False),
    ],
    ids=str,
)
def test_a_sink_takes_its_part_once_however_keys_are_cut(
    batch: Callable, dtype: torch.dtype, window: int, split: bool
) -> None:
    case = batch([(290, 1), (0, 0), (18, 3)], heads=(6, 1), dtype=dtype, padding_rows=2)
    sinks = torch.tensor([-30.0, -1.0, 0.0, 1.5, 5.0, 90.0])
    out = paged_attention(*case.arguments(), case.scale, window, sinks=sinks, split=split, arch=HOPPER)
    expected = reference.paged_attention(*case.arguments(), case.scale, window, sinks=sinks)
    close = 2e-5 if dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(out, expected, atol=close, rtol=close)
    plain = reference.paged_attention(*case.arguments(), case.scale, window)
    assert not torch.allclose(out, plain, atol=0.05)
    with pytest.raises(ValueError, match="sinks must be float32"):
        paged_attention(*case.arguments(), case.scale, sinks=sinks[:4])


def test_keys_may_be_the_values() -> None:
    draw = torch.Generator().manual_seed(0)
    heads, size, page = 5, 32, 16
    rows = torch.randn(6, (heads + 1) * size, generator=draw)
    slots = torch.tensor([3, 40, 17, -1, 0, 31], dtype=torch.int32)
    positions = torch.arange(6, dtype=torch.int32)
    angles = torch.randn(6, size, generator=draw)
    cache, wanted = (torch.zeros(3, 1, page, size) for _ in range(2))
    q = rope_and_cache(rows, heads, 1, positions, slots, angles, cache, cache)
    expected = reference.rope_and_cache(rows, heads, 1, positions, slots, angles, wanted, wanted)
    live = slots >= 0
    torch.testing.assert_close(q[live], expected[live], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache, wanted, atol=1e-5, rtol=1e-5)
    assert int(cache.abs().sum(-1).count_nonzero()) == 5
    with pytest.raises(ValueError, match="do not fit heads"):
        rope_and_cache(rows, heads, 1, positions, slots, angles, cache, cache.clone())
