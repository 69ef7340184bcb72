"""A step's inputs on a CPU: what `kernels.step_layout` packs, unpacked by array arithmetic, without padding.

The host's counterpart of `kernels.triton.step_inputs`, for implementations whose operations take exactly the tokens
of a step. Only chunks of prompts cost Python per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.step_layout import CARRIED, HEADER, LOGITS, PAGES, SEQS, TOKENS, StepLayout

Int32s = npt.NDArray[np.int32]


@dataclass(slots=True)
class HostStep:
    """What a step of T tokens of S sequences reads, R rows of it sampled. Some arrays are views of the buffer."""

    token_ids: Int32s
    """[T]"""
    positions: Int32s
    """[T]"""
    slots: Int32s
    """[T]"""
    q_starts: Int32s
    """[S + 1]"""
    kv_lens: Int32s
    """[S]"""
    page_table: Int32s
    """[S, P], P pages of the longest sequence; entries past a sequence's end are whatever was there"""
    logit_rows: npt.NDArray[np.int64]
    """[R]"""
    sample_rows: Int32s
    """[R], request rows"""
    sample_positions: Int32s
    """[R], positions of the tokens to be sampled"""


def apply_pages(buffer: Int32s, layout: StepLayout, page_table: Int32s) -> None:
    """Write the buffer's page updates into page_table [rows, P]."""
    count = int(buffer[PAGES])
    if count:
        row, index, page = layout.pages_of(buffer)[:, :count]
        page_table[row, index] = page


def host_step(buffer: Int32s, layout: StepLayout, token_table: Int32s, page_table: Int32s, page_size: int) -> HostStep:
    """Apply the page updates and carried tokens of a packed step to token_table [rows, context] and page_table
    [rows, P], then gather its inputs from them."""
    header = buffer[:HEADER].tolist()
    seqs, tokens, logits = header[SEQS], header[TOKENS], header[LOGITS]
    if header[PAGES]:
        apply_pages(buffer, layout, page_table)
    described = layout.seqs_of(buffer)
    rows, positions = described[0, :seqs], described[2, :seqs]
    if header[CARRIED] or not seqs == tokens == logits:
        return _mixed(buffer, layout, header, token_table, page_table, page_size)
    # Decodes alone, whose tokens the table has: the step of hundreds whose cost counts
    starts = np.arange(seqs + 1, dtype=np.int32)
    lens = positions + 1
    return HostStep(
        token_ids=token_table[rows, positions],
        positions=positions,
        slots=_slots(page_table, rows, positions, page_size),
        q_starts=starts,
        kv_lens=lens,
        page_table=_tables(page_table, rows, lens, page_size),
        logit_rows=np.arange(seqs),
        sample_rows=rows,
        sample_positions=lens,
    )


def _mixed(
    buffer: Int32s, layout: StepLayout, header: list[int], token_table: Int32s, page_table: Int32s, page_size: int
) -> HostStep:
    """Any step whose page updates have been applied."""
    seqs, tokens, logits = header[SEQS], header[TOKENS], header[LOGITS]
    rows, firsts, positions, sources = layout.seqs_of(buffer)[:, :seqs]
    starts = np.empty(seqs + 1, dtype=np.int32)
    starts[:seqs] = firsts
    starts[seqs] = tokens
    counts = starts[1:] - starts[:-1]
    lens = positions + counts
    if header[CARRIED]:
        _carry(buffer, layout, rows, positions, counts, sources, token_table)
    row_of = rows.repeat(counts)
    at = np.arange(tokens, dtype=np.int32) + (positions - firsts).repeat(counts)
    wanted = layout.logits_of(buffer)[:logits]
    return HostStep(
        token_ids=token_table[row_of, at],
        positions=at,
        slots=_slots(page_table, row_of, at, page_size),
        q_starts=starts,
        kv_lens=lens,
        page_table=_tables(page_table, rows, lens, page_size),
        logit_rows=(starts[1:][wanted] - 1).astype(np.int64),
        sample_rows=rows[wanted],
        sample_positions=lens[wanted],
    )


def _slots(page_table: Int32s, rows: Int32s, at: Int32s, page_size: int) -> Int32s:
    index = at // page_size
    slots = page_table[rows, index]
    slots -= index
    slots *= page_size
    slots += at
    return slots


def _tables(page_table: Int32s, rows: Int32s, lens: Int32s, page_size: int) -> Int32s:
    return page_table[:, : -(-int(lens.max()) // page_size)].take(rows, axis=0)


def _carry(
    buffer: Int32s, layout: StepLayout, rows: Int32s, positions: Int32s, counts: Int32s, sources: Int32s, table: Int32s
) -> None:
    carried = layout.tokens_of(buffer)
    for s in np.flatnonzero(sources >= 0).tolist():
        position, count, source = int(positions[s]), int(counts[s]), int(sources[s])
        table[rows[s], position : position + count] = carried[source : source + count]
