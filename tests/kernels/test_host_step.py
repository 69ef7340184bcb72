"""A step's inputs on the host against the plain definition, which pads them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.host_step import host_step
from kernels.step_layout import CARRIED, LOGITS, PAGES, SEQS, TOKENS, StepInputs, StepLayout

ROWS, CONTEXT, PAGE, TABLE_PAGES = 7, 70, 16, 5

seqs_of_a_step = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from([1, 1, 5, 40]), st.booleans(), st.booleans()), min_size=1, max_size=5
)


@settings(max_examples=50)
@given(
    seqs=seqs_of_a_step,
    order=st.permutations(range(ROWS)),
    updates=st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(0, TABLE_PAGES - 1)), max_size=6, unique=True),
)
def test_inputs_are_as_defined(
    seqs: list[tuple[int, int, bool, bool]], order: list[int], updates: list[tuple[int, int]]
) -> None:
    total = sum(count for _, count, _, _ in seqs)
    layout = StepLayout(6, total + 3, 6)
    buffer = layout.empty()
    described = layout.seqs_of(buffer)
    query = carried = wanted = 0
    for s, (position, count, carries, sampled) in enumerate(seqs):
        described[:, s] = torch.tensor([order[s], query, position, carried if carries else -1])
        if carries:
            layout.tokens_of(buffer)[carried : carried + count] = 1000 * (s + 1) + torch.arange(count)
            carried += count
        if sampled:
            layout.logits_of(buffer)[wanted] = s
            wanted += 1
        query += count
    for i, (row, index) in enumerate(updates):
        layout.pages_of(buffer)[:, i] = torch.tensor([row, index, 500 + i])
    for place, number in (
        (SEQS, len(seqs)),
        (TOKENS, query),
        (LOGITS, wanted),
        (PAGES, len(updates)),
        (CARRIED, carried),
    ):
        buffer[place] = number
    tables = []
    for _ in range(2):
        tokens = torch.arange(ROWS * CONTEXT, dtype=torch.int32).view(ROWS, CONTEXT)
        pages = torch.arange(ROWS * TABLE_PAGES, dtype=torch.int32).view(ROWS, TABLE_PAGES) + 100
        tables.append((tokens, pages))
    into = StepInputs.allocate(layout, TABLE_PAGES)
    reference.step_inputs(buffer, layout, *tables[0], PAGE, into)
    step = host_step(buffer.numpy(), layout, tables[1][0].numpy(), tables[1][1].numpy(), PAGE)
    assert all(torch.equal(a, b) for a, b in zip(*tables, strict=True))
    for name, size in (
        ("token_ids", total), ("positions", total), ("slots", total), ("q_starts", len(seqs) + 1),
        ("kv_lens", len(seqs)), ("logit_rows", wanted), ("sample_rows", wanted), ("sample_positions", wanted),
    ):  # fmt: skip
        assert getattr(step, name).tolist() == getattr(into, name)[:size].tolist(), name
    assert step.logit_rows.dtype == np.int64
    for s, length in enumerate(step.kv_lens.tolist()):
        used = -(-length // PAGE)
        assert step.page_table[s, :used].tolist() == into.page_table[s, :used].tolist()
