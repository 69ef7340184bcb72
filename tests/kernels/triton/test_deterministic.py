"""Deterministic mode: a row's bits depend on that row alone, in products and in attention."""

from __future__ import annotations

import torch

from kernels.triton.table import TritonOps


def test_a_product_row_has_the_same_bits_in_any_company() -> None:
    ops = TritonOps(deterministic=True)
    draw = torch.Generator().manual_seed(1)
    weight = ops.pack([torch.randn(48, 96, generator=draw)], torch.randn(48, generator=draw))
    x = torch.randn(300, 96, generator=draw)
    whole = ops.linear(x, weight)
    for first, count in ((0, 1), (5, 1), (100, 17), (120, 128), (37, 200)):
        assert torch.equal(ops.linear(x[first : first + count], weight), whole[first : first + count])
    torch.testing.assert_close(whole, x @ weight.matrix.T + weight.bias)  # type: ignore[attr-defined]


def test_an_attention_row_has_the_same_bits_alone_and_among_others() -> None:
    ops = TritonOps(deterministic=True)
    draw = torch.Generator().manual_seed(2)
    keys, values = (torch.randn(12, 1, 16, 16, generator=draw) for _ in range(2))
    q = torch.randn(6, 2, 16, generator=draw)
    starts = torch.tensor([0, 1, 5, 6], dtype=torch.int32)
    lens = torch.tensor([40, 20, 61], dtype=torch.int32)
    table = torch.tensor([[0, 1, 2, 0], [3, 4, 0, 0], [5, 6, 7, 8]], dtype=torch.int32)
    together = ops.paged_attention(q, keys, values, starts, lens, table, 0.25)
    for s in range(3):
        rows = slice(int(starts[s]), int(starts[s + 1]))
        own = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32)
        one = slice(s, s + 1)
        alone = ops.paged_attention(q[rows].contiguous(), keys, values, own, lens[one], table[one].contiguous(), 0.25)
        assert torch.equal(alone, together[rows])
