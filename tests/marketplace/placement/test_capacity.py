"""The arithmetic of capacity."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marketplace.placement.capacity import (
    GIB,
    NOTHING,
    Amount,
    CpuPolicy,
    Standing,
    largest_quota,
    pages,
    split_pages,
    threads_for,
    total,
    unallocated,
    vcpus_in,
)

_amounts = st.builds(Amount, *(st.integers(0, limit) for limit in (8, 128, 1 << 40, 1 << 42)))
_standings = st.lists(st.builds(Standing, st.just("q"), st.just("a"), _amounts, _amounts), max_size=4)


@settings(max_examples=50)
@given(_amounts, _amounts, _standings)
def test_what_is_unallocated_and_what_quotas_hold_fit_into_what_is_free(
    capacity: Amount, used: Amount, standings: list[Standing]
) -> None:
    left = unallocated(capacity, used, standings)
    held = total(standing.headroom for standing in standings)
    assert NOTHING.within(left) and left.within(capacity.less(used))
    if held.within(capacity.less(used)):
        assert (left + held + used).within(capacity.most(used))
    closed = [*standings, Standing("x", "b", NOTHING, NOTHING, exclusive=True)]
    assert unallocated(capacity, used, closed) == NOTHING


@settings(max_examples=50)
@given(_amounts, _amounts, _standings)
def test_a_quota_of_the_largest_size_never_promises_what_is_used(
    capacity: Amount, beside: Amount, others: list[Standing]
) -> None:
    granted = largest_quota(capacity, beside, others)
    if granted != NOTHING:
        reserved = total(other.budget.most(other.consumed) for other in others)
        for name in ("gpu", "threads", "dram", "disk"):
            given_out = getattr(granted, name)
            if given_out:
                together = given_out + getattr(reserved, name) + getattr(beside, name)
                assert together == getattr(capacity, name)


@pytest.mark.parametrize(
    ("policy", "vcpu", "threads", "back"),
    [("Dedicated", 4, 8, 4), ("Packed", 4, 4, 4), ("Packed", 5, 6, 6), ("Shared", 4, 2, 4), ("Shared", 5, 3, 6)],
)
def test_vcpus_are_counted_in_threads(policy: CpuPolicy, vcpu: int, threads: int, back: int) -> None:
    assert threads_for(vcpu, policy, per_core=2, overcommit_percent=200) == threads
    assert vcpus_in(threads, policy, per_core=2, overcommit_percent=200) == back


@settings(max_examples=50)
@given(st.integers(0, 500), st.dictionaries(st.integers(0, 7), st.integers(1, 64), min_size=1, max_size=8))
def test_pages_are_split_without_losing_any(count: int, weights: dict[int, int]) -> None:
    split = split_pages(count, weights)
    assert sum(split.values()) == count and set(split) <= set(weights)
    for numa, weight in weights.items():
        assert abs(split.get(numa, 0) * sum(weights.values()) - count * weight) < sum(weights.values())


def test_memory_is_rounded_up_to_pages() -> None:
    assert [pages(size) for size in (0, 1, GIB, GIB + 1)] == [0, 1, 1, 2]
