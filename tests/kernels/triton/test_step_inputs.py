"""A step's inputs out of one packed buffer, in the interpreter against the plain definition."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.step_layout import CARRIED, LOGITS, PAGES, SEQS, TOKENS, StepInputs, StepLayout
from kernels.triton.step_inputs import step_inputs

ROWS, CONTEXT, PAGE = 7, 70, 16
TABLE_PAGES = 5
UNTOUCHED = -77


def pack(
    layout: StepLayout, seqs: list[tuple[int, int, int, bool, bool]], updates: list[tuple[int, int, int]]
) -> Tensor:
    """A buffer of sequences (request row, first position, count, carried, logits wanted)."""
    buffer = layout.empty()
    described, logits = layout.seqs_of(buffer), layout.logits_of(buffer)
    query = carried = wanted = 0
    for s, (row, position, count, carries, sampled) in enumerate(seqs):
        described[:, s] = torch.tensor([row, query, position, carried if carries else -1])
        if carries:
            layout.tokens_of(buffer)[carried : carried + count] = 1000 * (row + 1) + torch.arange(count)
            carried += count
        if sampled:
            logits[wanted] = s
            wanted += 1
        query += count
    for i, update in enumerate(updates):
        layout.pages_of(buffer)[:, i] = torch.tensor(update)
    for place, number in (
        (SEQS, len(seqs)),
        (TOKENS, query),
        (LOGITS, wanted),
        (PAGES, len(updates)),
        (CARRIED, carried),
    ):
        buffer[place] = number
    return buffer


def untouched(layout: StepLayout) -> StepInputs:
    into = StepInputs.allocate(layout, TABLE_PAGES)
    for field in fields(into):
        getattr(into, field.name).fill_(UNTOUCHED)
    return into


@settings(max_examples=30)
@given(
    seqs=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40), st.booleans(), st.booleans()), max_size=5),
    order=st.permutations(range(ROWS)),
    updates=st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(0, TABLE_PAGES - 1)), max_size=6, unique=True),
    spare=st.tuples(st.integers(0, 3), st.integers(0, 140)),
)
def test_inputs_are_as_defined(
    seqs: list[tuple[int, int, bool, bool]],
    order: list[int],
    updates: list[tuple[int, int]],
    spare: tuple[int, int],
) -> None:
    layout = StepLayout(max(len(seqs) + spare[0], 1), max(sum(seq[1] for seq in seqs) + spare[1], 1), 6)
    described = [(order[s], *seq) for s, seq in enumerate(seqs)]
    buffer = pack(layout, described, [(row, index, 500 + i) for i, (row, index) in enumerate(updates)])
    results = []
    for run in (step_inputs, reference.step_inputs):
        tokens = torch.arange(ROWS * CONTEXT, dtype=torch.int32).view(ROWS, CONTEXT)
        pages = torch.arange(ROWS * TABLE_PAGES, dtype=torch.int32).view(ROWS, TABLE_PAGES) + 100
        into = untouched(layout)
        run(buffer, layout, tokens, pages, PAGE, into)
        results.append([tokens, pages, *(getattr(into, field.name) for field in fields(into))])
    for name, mine, wanted in zip(["tokens", "pages", *(f.name for f in fields(StepInputs))], *results, strict=True):
        assert torch.equal(mine, wanted), name


def test_a_decode_reads_what_the_sampler_wrote_and_a_chunk_what_the_buffer_carries() -> None:
    layout = StepLayout(4, 8, 2)
    tokens = torch.zeros(ROWS, CONTEXT, dtype=torch.int32)
    tokens[5, 20] = 42
    pages = torch.zeros(ROWS, TABLE_PAGES, dtype=torch.int32)
    buffer = pack(layout, [(5, 20, 1, False, True), (2, 15, 3, True, False)], [(5, 1, 9), (2, 0, 3)])
    layout.pages_of(buffer)
    into = untouched(layout)
    step_inputs(buffer, layout, tokens, pages, PAGE, into)
    assert into.token_ids.tolist() == [42, 3000, 3001, 3002, -1, -1, -1, -1]
    assert into.positions.tolist() == [20, 15, 16, 17, 0, 0, 0, 0]
    assert into.slots.tolist() == [9 * 16 + 4, 3 * 16 + 15, 0, 1, -1, -1, -1, -1]
    assert into.q_starts.tolist() == [0, 1, 4, 4, 4]
    assert into.kv_lens.tolist() == [21, 18, 0, 0]
    assert into.page_table[0, :2].tolist() == [0, 9] and into.page_table[0, 2] == UNTOUCHED
    assert (into.logit_rows.tolist(), into.sample_rows.tolist()) == ([0, -1, -1, -1], [5, -1, -1, -1])
    assert into.sample_positions.tolist() == [21, 0, 0, 0]
    assert tokens[2, 15:18].tolist() == [3000, 3001, 3002]


def test_what_does_not_fit_is_refused() -> None:
    layout = StepLayout(2, 4, 2)
    table = torch.zeros(3, 8, dtype=torch.int32)
    into = StepInputs.allocate(layout, 8)
    with pytest.raises(ValueError, match="a buffer of"):
        step_inputs(layout.empty()[1:], layout, table, table, PAGE, into)
    with pytest.raises(ValueError, match="width"):
        step_inputs(layout.empty(), layout, table, table, PAGE, replace(into, page_table=table))
