"""Which steps go by FlashAttention, and what is measured for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import KVTensors
from engine.long_prefill import Costs, measure, seen
from kernels.long_prefill import library
from kernels.reference import ReferenceOps


@given(st.integers(0, 30), st.integers(1, 40))
def test_a_query_sees_the_keys_up_to_its_own(queries: int, more: int) -> None:
    keys = queries + more
    assert seen(queries, keys) == sum(keys - queries + number + 1 for number in range(queries))


def test_it_pays_where_the_attention_is_much() -> None:
    costs = Costs(paged_s=3e-9, library_s=1e-9, gather_s=1e-6, launch_s=2e-3)
    assert costs.saved_s([2048], [8192], 32) > 0.5
    assert costs.saved_s([16], [8192], 32) < 0, "a short rest of a long prompt is not worth its gathering"
    assert costs.saved_s([512], [512], 2) < 0, "nor a short prompt its launch"
    assert costs.saved_s([2048], [8192], 32) > costs.saved_s([2048, *[1] * 64], [8192, *[8192] * 64], 32), (
        "many long decodes beside it are gathered in vain"
    )
    slower = Costs(paged_s=1e-9, library_s=3e-9, gather_s=0.0, launch_s=0.0)
    assert slower.saved_s([8192], [8192], 80) < 0


def test_costs_are_for_each_pair_and_key() -> None:
    kv = KVTensors.allocate(
        layers=1, num_pages=8, kv_heads=2, page_size=16, head_dim=8, dtype=torch.float32, device="cpu"
    )
    by = library("cpu")
    assert by is not None
    took = iter([10.0, 4.0, 30.0])

    def seconds(work: Callable[[], object]) -> float:
        work()
        return next(took)

    costs = measure(
        ReferenceOps(), by, kv, num_heads=4, scale=0.3, step_tokens=32, max_context=1000, dtype=torch.float32,
        seconds=seconds, launch_s=0.5,
    )  # fmt: skip
    pairs = seen(32, 128)
    assert costs.paged_s == pytest.approx(30.0 / pairs) and costs.library_s == pytest.approx(6.0 / pairs)
    assert costs.gather_s == pytest.approx(4.0 / 128) and costs.launch_s == 0.5
