"""Paged attention against the reference, in the interpreter: mixed batches in caches full of NaN."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.triton.architecture import Architecture
from kernels.triton.attention import paged_attention
from kernels.triton.attention_shape import HEAD_DIMS, AttentionShape
from kernels.triton.attention_split import plan_splits

FP8 = torch.float8_e4m3fn
TYPES = [(torch.float16, torch.float16), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16),
         (torch.float16, FP8), (torch.float32, FP8)]  # fmt: skip
CLOSE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
HOPPER = Architecture(90, 4)
MIXED = [(0, 1), (70, 1), (0, 11), (0, 0), (18, 5)]


def check(batch, *, window: int = 0, softcap: float = 0.0, **options: object) -> Tensor:
    """The kernel's result, which agrees with the reference and is 0 in padding rows."""
    scales = {"k_scale": batch.k_scale, "v_scale": batch.v_scale}
    out = paged_attention(*batch.arguments(), batch.scale, window, softcap=softcap, **scales, **options)
    expected = reference.paged_attention(*batch.arguments(), batch.scale, window, softcap, **scales)
    assert out.dtype == batch.q.dtype
    close = CLOSE[batch.q.dtype]
    torch.testing.assert_close(out, expected, atol=close, rtol=close)
    assert not out[int(batch.q_starts[-1]) :].any()
    return out


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("types", [(torch.float32, torch.float32), (torch.bfloat16, FP8)], ids=str)
def test_mixed_batches_with_padding_agree(
    batch: Callable, types: tuple[torch.dtype, torch.dtype], head_dim: int
) -> None:
    case = batch(MIXED, head_dim=head_dim, dtype=types[0], kv_dtype=types[1], padding_rows=5, padding_seqs=2)
    check(case, arch=HOPPER)


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("page", [32, 64])
def test_types_and_pages(batch: Callable, types: tuple[torch.dtype, torch.dtype], page: int) -> None:
    check(batch(MIXED, dtype=types[0], kv_dtype=types[1], page=page, padding_rows=1), arch=HOPPER)


@pytest.mark.parametrize("heads", [(1, 1), (5, 5), (6, 2), (7, 1), (8, 1), (20, 1), (71, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_number_of_query_heads_for_a_key_head(batch: Callable, heads: tuple[int, int], dtype: torch.dtype) -> None:
    check(batch([(37, 1), (3, 6)], heads=heads, dtype=dtype, padding_rows=2), arch=HOPPER)


@pytest.mark.parametrize("window", [1, 20, 64])
@pytest.mark.parametrize("split", [True, False])
def test_sliding_windows(batch: Callable, window: int, split: bool) -> None:
    case = batch([(190, 1), (0, 30), (90, 7), (0, 1)], dtype=torch.bfloat16, padding_rows=3)
    check(case, window=window, split=split, arch=HOPPER)


@pytest.mark.parametrize("types", [(torch.float32, torch.float32), (torch.bfloat16, FP8)], ids=str)
def test_soft_cap_bounds_scores(batch: Callable, types: tuple[torch.dtype, torch.dtype]) -> None:
    case = batch(MIXED, dtype=types[0], kv_dtype=types[1])
    capped = check(case, softcap=0.5, arch=HOPPER)
    assert not torch.allclose(capped, check(case, arch=HOPPER), atol=1e-2)
    check(case, softcap=20.0, window=30, split=False, arch=HOPPER)


@pytest.mark.parametrize(
    ("tokens", "capability"),
    [(100, 90), (600, 90), *(pytest.param(2048, at, marks=pytest.mark.slow) for at in (80, 90))],
)
def test_large_steps_take_larger_tiles(batch: Callable, tokens: int, capability: int) -> None:
    """Padding rows choose the tile of a large bucket without the work of one."""
    case = batch([(70, 1), (0, 33), (90, 40)], dtype=torch.float16, heads=(4, 1), padding_rows=tokens - 74)
    check(case, arch=Architecture(capability, 2))
    check(case, split=False, window=50, arch=Architecture(capability, 2))


def test_splits_change_a_result_by_rounding_alone_and_repeat_exactly(batch: Callable) -> None:
    case = batch([(400, 1), (3, 1), (290, 3)], heads=(2, 1))
    arch = Architecture(90, 4)
    split = check(case, arch=arch)
    whole = check(case, split=False, arch=arch)
    torch.testing.assert_close(split, whole, atol=2e-6, rtol=2e-6)
    assert not torch.equal(split, whole), "nothing was split"
    assert torch.equal(split, check(case, arch=arch))


def test_a_plan_serves_every_layer(batch: Callable) -> None:
    layers = [batch([(300, 1), (20, 3)], dtype=torch.float16, seed=seed) for seed in (1, 2)]
    shape, first = AttentionShape.of(layers[0].q, layers[0].keys), layers[0]
    plan = plan_splits(first.q_starts, first.kv_lens, first.q.shape[0], shape, arch=HOPPER)
    for layer in layers:
        assert torch.equal(check(layer, plan=plan, arch=HOPPER), check(layer, arch=HOPPER))
    with pytest.raises(ValueError, match="another number of tokens"):
        many = batch([(0, 70)], dtype=torch.float16)
        paged_attention(*many.arguments(), 1.0, plan=plan, arch=HOPPER)


def test_a_plan_balances_and_stays_in_bounds() -> None:
    shape = AttentionShape(8, 2, 64, 16, torch.bfloat16, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        seqs = int(torch.randint(1, 9, (1,), generator=generator))
        lens = torch.randint(0, 4000, (seqs,), generator=generator, dtype=torch.int32)
        new = torch.minimum(torch.randint(0, 12, (seqs,), generator=generator, dtype=torch.int32), lens)
        starts = torch.cat([torch.zeros(1), new.cumsum(0)]).int()
        plan = plan_splits(starts, lens, int(starts[-1]), shape, arch=Architecture(90, 8), min_chunk=16)
        first, splits, parts, groups = plan.table.tolist()
        blocks = [-(-int(n) // plan.block_q) for n in new]
        assert [b - a for a, b in pairwise(first)] == [n * k for n, k in zip(blocks, splits)]
        assert first[-1] <= sum(blocks) + plan.slots
        assert parts[-1] == sum(n * k for n, k in zip(blocks, splits) if k > 1) <= 2 * plan.slots
        assert groups[-1] == sum(n for n, k in zip(blocks, splits) if k > 1) <= plan.slots
        share = max(16, -(-sum(n * int(k) for n, k in zip(blocks, lens)) // plan.slots))
        assert all(-(-int(length) // k) <= share for length, k, n in zip(lens, splits, blocks) if n)


def test_deterministic_rows_have_the_same_bits_in_any_batch(batch: Callable, exact_rows: None) -> None:
    """Alone or beside others, in one chunk, in several or token by token, in small and large steps."""
    case = batch([(0, 100), (40, 1), (7, 30)], dtype=torch.bfloat16, heads=(6, 2))
    options = {"deterministic": True, "arch": HOPPER}
    whole = check(case, **options)
    edges = [0, 1, 2, 37, 64, 99, 100]
    for padding in (0, 600):
        for begin, end in pairwise(edges):
            q = torch.cat([case.q[130:131], case.q[begin:end], case.q[:padding].new_zeros(padding, 6, 64)])
            part = paged_attention(
                q,
                case.keys,
                case.values,
                torch.tensor([0, 1, 1 + end - begin], dtype=torch.int32),
                torch.tensor([37, end], dtype=torch.int32),
                case.page_table[[2, 0]].contiguous(),
                case.scale,
                **options,
            )
            assert torch.equal(part[1 : 1 + end - begin], whole[begin:end])
            assert torch.equal(part[0], whole[130])
            if padding:
                break


def test_live_pages_are_only_read(batch: Callable) -> None:
    case = batch(MIXED, padding_rows=9, padding_seqs=3)
    before = [t.clone() for t in case.arguments()]
    check(case, arch=HOPPER)
    for tensor, copy in zip(case.arguments(), before, strict=True):
        assert torch.equal(tensor.nan_to_num(7.0), copy.nan_to_num(7.0))


def test_nothing_to_do(batch: Callable) -> None:
    case = batch([(0, 1)], padding_rows=3, padding_seqs=1)
    case.q_starts.zero_()
    assert not paged_attention(*case.arguments(), 1.0, arch=HOPPER).any()
    case.q = case.q[:0]
    assert paged_attention(*case.arguments(), 1.0, arch=HOPPER).shape == (0, 256)


def test_what_does_not_fit_is_refused(batch: Callable) -> None:
    case = batch([(3, 4)])

    def attend(**changed: Tensor) -> Tensor:
        names = ("q", "keys", "values", "q_starts", "kv_lens", "page_table")
        return paged_attention(*(changed.get(name, getattr(case, name)) for name in names), 1.0, arch=HOPPER)

    with pytest.raises(ValueError, match="do not fit together"):
        attend(q=case.q[:, :, :32].contiguous())
    with pytest.raises(ValueError, match="not a multiple of 2"):
        attend(q=case.q[:, :3].contiguous())
    with pytest.raises(ValueError, match="multiples of 16"):
        attend(keys=case.keys[:, :, :8].contiguous())
    with pytest.raises(ValueError, match="equal in shape"):
        attend(values=case.values.half())
    with pytest.raises(ValueError, match="do not fit together"):
        attend(kv_lens=case.kv_lens.repeat(2))
    with pytest.raises(ValueError, match="kv_lens must be contiguous int32"):
        attend(kv_lens=case.kv_lens.long())
    with pytest.raises(ValueError, match="q must be contiguous"):
        attend(q=case.q.transpose(0, 1).contiguous().transpose(0, 1))
    with pytest.raises(ValueError, match="needs k_scale"):
        attend(keys=case.keys.to(FP8), values=case.values.to(FP8))


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seqs=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 40)), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (10, 2)]),
    head_dim=st.sampled_from(HEAD_DIMS),
    types=st.sampled_from([(torch.float32, torch.float32), (torch.float16, torch.float16), (torch.bfloat16, FP8)]),
    page=st.sampled_from([16, 32, 64]),
    padding=st.tuples(st.integers(0, 30), st.integers(0, 3)),
    window=st.sampled_from([0, 0, 1, 20, 64]),
    softcap=st.sampled_from([0.0, 0.0, 5.0]),
    split=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_random_batches_agree(
    batch: Callable,
    seqs: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    types: tuple[torch.dtype, torch.dtype],
    page: int,
    padding: tuple[int, int],
    window: int,
    softcap: float,
    split: bool,
    seed: int,
) -> None:
    case = batch(seqs, heads=heads, head_dim=head_dim, page=page, dtype=types[0], kv_dtype=types[1],
                 padding_rows=padding[0], padding_seqs=padding[1], seed=seed)  # fmt: skip
    check(case, window=window, softcap=softcap, split=split, arch=HOPPER)


GRID = [
    (
        dtype,
        kv,
        head_dim,
        (16, 32, 64)[(place + number) % 3],
        ((4, 4), (4, 1), (9, 3), (14, 2))[(place + 2 * number) % 4],
    )
    for number, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16))
    for place, (head_dim, kv) in enumerate(product(HEAD_DIMS, (dtype, FP8)))
]
"""Every type with every head size, page sizes and groups taken in turn."""


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "kv", "head_dim", "page", "heads"), GRID, ids=str)
def test_the_whole_grid(
    batch: Callable, dtype: torch.dtype, kv: torch.dtype, head_dim: int, page: int, heads: tuple[int, int]
) -> None:
    case = batch(MIXED, dtype=dtype, kv_dtype=kv, page=page, head_dim=head_dim, heads=heads, padding_rows=6,
                 padding_seqs=1)  # fmt: skip
    for window, softcap, split in ((0, 0.0, True), (33, 10.0, False)):
        check(case, window=window, softcap=softcap, split=split, arch=HOPPER)
