"""Rotary embedding, cache writes and paged attention of the native implementation against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu import CpuOps
from kernels.interface import Ops
from kernels.reference import ReferenceOps

SHAPES = [
    (64, 9, 3, 16),
    (80, 4, 4, 32),
    (96, 6, 2, 64),
    (128, 8, 1, 16),
    (256, 4, 2, 32),
    (16, 5, 5, 5),
    (34, 2, 1, 3),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CLOSE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass
class Case:
    """Sequences of (cached, new) tokens in a shuffled cache whose every other slot is NaN."""

    qkv: Tensor
    positions: Tensor
    slots: Tensor
    q_starts: Tensor
    kv_lens: Tensor
    page_table: Tensor
    keys: Tensor
    values: Tensor
    angles: Tensor
    heads: tuple[int, int]


def make_case(seqs: list[tuple[int, int]], shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int = 0) -> Case:
    D, Hq, Hkv, page = shape
    g = torch.Generator().manual_seed(seed)
    per_seq = [-(-(cached + new) // page) for cached, new in seqs]
    order = (torch.randperm(sum(per_seq) + 3, generator=g)).int()
    table = torch.zeros(len(seqs), max(per_seq) + 1, dtype=torch.int32)
    keys = torch.full((sum(per_seq) + 3, Hkv, page, D), float("nan"), dtype=dtype)
    values, positions, slots, taken = keys.clone(), [], [], 0
    for s, (cached, new) in enumerate(seqs):
        table[s, : per_seq[s]] = order[taken : taken + per_seq[s]]
        taken += per_seq[s]
        where = torch.arange(cached + new)
        slot = table[s, where // page].long() * page + where % page
        for cache in (keys, values):
            cache[slot[:cached] // page, :, slot[:cached] % page] = torch.randn(cached, Hkv, D, generator=g).to(dtype)
        positions.append(where[cached:])
        slots.append(slot[cached:])
    new_tokens = torch.tensor([new for _, new in seqs])
    return Case(
        qkv=torch.randn(int(new_tokens.sum()), (Hq + 2 * Hkv) * D, generator=g),
        positions=torch.cat(positions).int(),
        slots=torch.cat(slots).int(),
        q_starts=torch.cat([torch.zeros(1), new_tokens.cumsum(0)]).int(),
        kv_lens=torch.tensor([cached + new for cached, new in seqs], dtype=torch.int32),
        page_table=table,
        keys=keys,
        values=values,
        angles=torch.randn(max(cached + new for cached, new in seqs), D, generator=g),
        heads=(Hq, Hkv),
    )


def run(
    ops: Ops, case: Case, window: int = 0, norms: bool = False, softcap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention output, and the caches after the writes."""
    keys, values, D = case.keys.clone(), case.values.clone(), case.keys.shape[3]
    norm = torch.linspace(0.5, 1.5, D) if norms else None
    q = ops.rope_and_cache(
        case.qkv, *case.heads, case.positions, case.slots, case.angles, keys, values, norm, norm, 1e-6
    )
    out = ops.paged_attention(q, keys, values, case.q_starts, case.kv_lens, case.page_table, D**-0.5, window, softcap)
    return out, keys, values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", ["native", "portable", "portable16"])
def test_agrees_with_the_reference_and_never_reads_or_writes_elsewhere(
    variant: str,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    build_variant: Callable[[str], CpuOps],
    reference: ReferenceOps,
) -> None:
    seqs = [(0, 1), (37, 1), (0, 50), (18, 33), (64, 1), (31, 2)]
    ops = build_variant(variant)
    for window, norms, softcap in ((0, False, 0.5), (9, True, 0.0)):
        case = make_case(seqs, shape, dtype)
        out, keys, values = run(ops, case, window, norms, softcap)
        expected, keys_too, values_too = run(reference, case, window, norms, softcap)
        # Slots that nobody wrote are NaN in both: equality here says that nothing else was touched, and a finite result
        # that nothing else was read. Rotated keys may differ by one rounding.
        torch.testing.assert_close(keys, keys_too, equal_nan=True, atol=1e-5, rtol=float(torch.finfo(dtype).eps) * 2)
        assert torch.equal(values.nan_to_num(7.0), values_too.nan_to_num(7.0))
        torch.testing.assert_close(out, expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seqs=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 70)), min_size=1, max_size=4),
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(DTYPES),
    window=st.sampled_from([0, 1, 5, 32, 40]),
    softcap=st.sampled_from([0.0, 0.5, 50.0]),
    seed=st.integers(0, 2**31),
)
def test_random_batches_agree_with_the_reference(
    seqs: list[tuple[int, int]],
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    window: int,
    softcap: float,
    seed: int,
    cpu: CpuOps,
    reference: ReferenceOps,
) -> None:
    case = make_case(seqs, shape, dtype, seed)
    out, expected = (run(ops, case, window, softcap=softcap)[0] for ops in (cpu, reference))
    torch.testing.assert_close(out, expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])


def test_a_soft_cap_bounds_scores_however_large(cpu: CpuOps, reference: ReferenceOps) -> None:
    case = make_case([(0, 40)], SHAPES[0], torch.float32)
    case.qkv *= 5.0
    free, capped = run(cpu, case)[0], run(cpu, case, softcap=2.0)[0]
    torch.testing.assert_close(capped, run(reference, case, softcap=2.0)[0], atol=1e-3, rtol=1e-4)
    assert not torch.allclose(free, capped, atol=1.0)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.integers(2, 150),
    cuts=st.sets(st.integers(1, 149), max_size=5),
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(DTYPES),
    window=st.sampled_from([0, 7, 33]),
    seed=st.integers(0, 2**31),
)
def test_chunks_single_steps_and_neighbours_give_the_same_bits(
    length: int,
    cuts: set[int],
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    window: int,
    seed: int,
    cpu: CpuOps,
) -> None:
    case = make_case([(0, length)], shape, dtype, seed)
    D, (Hq, Hkv) = shape[0], case.heads
    whole, keys, values = run(cpu, case, window)
    q = cpu.rope_and_cache(
        case.qkv, Hq, Hkv, case.positions, case.slots, case.angles, case.keys.clone(), case.values.clone()
    )
    edges = [0, *sorted(cut for cut in cuts if cut < length), length]
    for first, last in pairwise(edges):
        # Beside it in the batch: a single decode step of the same sequence's last token.
        part = cpu.paged_attention(
            torch.cat([q[-1:], q[first:last]]),
            keys,
            values,
            torch.tensor([0, 1, 1 + last - first], dtype=torch.int32),
            torch.tensor([length, last], dtype=torch.int32),
            case.page_table.repeat(2, 1),
            D**-0.5,
            window,
        )
        assert torch.equal(part[1:], whole[first:last])
        assert torch.equal(part[0], whole[-1])


def test_sequences_without_queries_are_passed_over(cpu: CpuOps) -> None:
    case = make_case([(5, 2), (9, 1)], SHAPES[0], torch.float32)
    alone, keys, values = run(cpu, case)
    q = cpu.rope_and_cache(
        case.qkv, *case.heads, case.positions, case.slots, case.angles, case.keys.clone(), case.values.clone()
    )
    out = cpu.paged_attention(
        q,
        keys,
        values,
        torch.tensor([0, 2, 2, 3], dtype=torch.int32),
        torch.tensor([7, 0, 10], dtype=torch.int32),
        case.page_table[[0, 0, 1]].contiguous(),
        64**-0.5,
    )
    assert torch.equal(out, alone)


def test_bad_input_is_refused_before_anything_is_touched(cpu: CpuOps) -> None:
    case = make_case([(3, 4)], SHAPES[0], torch.float16)
    keys, values = case.keys.clone(), case.values.clone()

    def rope(**changed: object) -> Tensor:
        given = {"positions": case.positions, "slots": case.slots, "angles": case.angles, "values": values} | changed
        return cpu.rope_and_cache(
            case.qkv, *case.heads, given["positions"], given["slots"], given["angles"], keys, given["values"]
        )

    with pytest.raises(IndexError, match="slot"):
        rope(slots=torch.tensor([0, 1, 2, 4 * 16], dtype=torch.int32))
    with pytest.raises(IndexError, match="slot"):
        rope(slots=torch.tensor([0, 1, 2, -1], dtype=torch.int32))
    with pytest.raises(IndexError, match="position"):
        rope(positions=torch.tensor([0, 1, 2, 7], dtype=torch.int32))
    with pytest.raises(ValueError, match="equal in shape and type"):
        rope(values=values.float())
    with pytest.raises(ValueError, match="do not fit heads"):
        rope(angles=torch.zeros(9, 32))
    with pytest.raises(ValueError, match=r"must be \[4\]"):
        rope(slots=case.slots[:3].contiguous())
    assert torch.equal(keys.nan_to_num(7.0), case.keys.nan_to_num(7.0))

    q = rope()

    def attend(**changed: object) -> Tensor:
        given = {"starts": case.q_starts, "lengths": case.kv_lens, "table": case.page_table} | changed
        return cpu.paged_attention(q, keys, values, given["starts"], given["lengths"], given["table"], 1.0)

    assert attend().shape == (4, 9 * 64)
    with pytest.raises(IndexError, match="page"):
        attend(table=torch.tensor([[99]], dtype=torch.int32))
    with pytest.raises(ValueError, match="do not fit together"):
        attend(lengths=torch.tensor([3], dtype=torch.int32))
    with pytest.raises(ValueError, match="do not fit together"):
        attend(lengths=torch.tensor([33], dtype=torch.int32))
    with pytest.raises(ValueError, match="do not fit together"):
        attend(starts=torch.tensor([0, 5], dtype=torch.int32))
    with pytest.raises(ValueError, match="need q_starts"):
        attend(starts=torch.tensor([0], dtype=torch.int32))
    with pytest.raises(ValueError, match="int32"):
        attend(lengths=torch.tensor([7]))
