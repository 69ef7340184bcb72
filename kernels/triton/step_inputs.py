"""A step's inputs, gathered on the device from one packed buffer and the tables of the requests' rows.

The buffer is laid out in `kernels.step_layout`. token_table int32 [rows, context], page_table int32 [rows, P]: the
state of the running requests. Two kernels: `_apply` writes page updates and carried tokens into the tables; `_gather`
then fills `StepInputs`, one program per block of tokens (which find their sequence by binary search over the first
queries) and one per sequence, which copies as much of its page table as it uses. Grids depend on the bucket alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from kernels.step_layout import CARRIED, HEADER, LOGITS, PAGES, SEQS, TOKENS, StepInputs, StepLayout
from kernels.triton.configuration import Configuration

BLOCK = 128
"""Tokens or page updates of one program."""

PAGE_BLOCK = 512
"""Pages that one program copies at a time."""

_HEADER = tl.constexpr(HEADER)
_SEQS, _TOKENS, _LOGITS, _PAGES, _CARRIED = (tl.constexpr(place) for place in (SEQS, TOKENS, LOGITS, PAGES, CARRIED))


@triton.jit
def _sequence_of(buffer, query, seqs, MAX_SEQS: tl.constexpr, STEPS: tl.constexpr):
    """The last sequence whose first query is at or before `query`, by bisection."""
    low = tl.zeros_like(query)
    high = tl.zeros_like(query) + (seqs - 1)
    for _ in tl.static_range(STEPS):
        middle = (low + high + 1) // 2
        begins = tl.load(buffer + _HEADER + MAX_SEQS + tl.maximum(middle, 0))
        low = tl.where(begins <= query, middle, low)
        high = tl.where(begins <= query, high, middle - 1)
    return low


@triton.jit
def _apply(
    buffer, token_table, page_table, table_width, table_pages,
    MAX_SEQS: tl.constexpr, MAX_PAGES: tl.constexpr, PAGES_AT: tl.constexpr, TOKENS_AT: tl.constexpr,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    update = entries < tl.load(buffer + _PAGES)
    row = tl.load(buffer + PAGES_AT + entries, mask=update, other=0).to(tl.int64)
    index = tl.load(buffer + PAGES_AT + MAX_PAGES + entries, mask=update, other=0)
    page = tl.load(buffer + PAGES_AT + 2 * MAX_PAGES + entries, mask=update, other=0)
    tl.store(page_table + row * table_pages + index, page, mask=update)
    tokens = tl.load(buffer + _TOKENS)
    query = tl.minimum(entries, tl.maximum(tokens - 1, 0))
    s = _sequence_of(buffer, query, tl.load(buffer + _SEQS), MAX_SEQS, STEPS)
    s = tl.maximum(s, 0)
    seq = buffer + _HEADER + s
    source = tl.load(seq + 3 * MAX_SEQS)
    carried = (entries < tokens) & (source >= 0)
    offset = entries - tl.load(seq + MAX_SEQS)
    token = tl.load(buffer + TOKENS_AT + source + offset, mask=carried, other=0)
    position = tl.load(seq + 2 * MAX_SEQS) + offset
    at = token_table + tl.load(seq).to(tl.int64) * table_width + position
    tl.store(at, token, mask=carried & (position < table_width))


@triton.jit
def _gather_tokens(
    buffer, token_table, page_table, token_ids, positions, slots, block, table_width, table_pages,
    PAGE_SIZE: tl.constexpr, MAX_SEQS: tl.constexpr, MAX_TOKENS: tl.constexpr, STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    query = block * BLOCK + tl.arange(0, BLOCK)
    tokens = tl.load(buffer + _TOKENS)
    live = query < tokens
    s = _sequence_of(buffer, query, tl.load(buffer + _SEQS), MAX_SEQS, STEPS)
    seq = buffer + _HEADER + tl.maximum(s, 0)
    row = tl.load(seq).to(tl.int64)
    position = tl.load(seq + 2 * MAX_SEQS) + query - tl.load(seq + MAX_SEQS)
    token = tl.load(token_table + row * table_width + position, mask=live, other=-1)
    page = tl.load(page_table + row * table_pages + position // PAGE_SIZE, mask=live, other=0)
    inside = query < MAX_TOKENS
    tl.store(token_ids + query, token, mask=inside)
    tl.store(positions + query, tl.where(live, position, 0), mask=inside)
    tl.store(slots + query, tl.where(live, page * PAGE_SIZE + position % PAGE_SIZE, -1), mask=inside)


@triton.jit
def _gather_sequence(
    buffer, page_table, q_starts, kv_lens, pages, logit_rows, sample_rows, sample_positions, s, table_pages,
    PAGE_SIZE: tl.constexpr, MAX_SEQS: tl.constexpr, LOGITS_AT: tl.constexpr, PAGE_BLOCK: tl.constexpr,
):  # fmt: skip
    seqs = tl.load(buffer + _SEQS)
    tokens = tl.load(buffer + _TOKENS)
    live = s < seqs
    seq = buffer + _HEADER + s
    begins = tl.load(seq + MAX_SEQS, mask=live, other=0)
    ends = tl.load(seq + MAX_SEQS + 1, mask=s + 1 < seqs, other=0)
    ends = tl.where(s + 1 < seqs, ends, tokens)
    length = tl.where(live, tl.load(seq + 2 * MAX_SEQS, mask=live, other=0) + ends - begins, 0)
    tl.store(q_starts + s, tl.where(live, begins, tokens))
    tl.store(kv_lens + s, length)
    if s == MAX_SEQS - 1:
        tl.store(q_starts + MAX_SEQS, tokens)
    row = tl.load(seq, mask=live, other=0).to(tl.int64)
    used = (length + PAGE_SIZE - 1) // PAGE_SIZE
    for start in range(0, used, PAGE_BLOCK):
        index = start + tl.arange(0, PAGE_BLOCK)
        page = tl.load(page_table + row * table_pages + index, mask=index < used, other=0)
        tl.store(pages + s.to(tl.int64) * table_pages + index, page, mask=index < used)
    # The same program serves one row of logits: that of another sequence where some want none
    wanted = s < tl.load(buffer + _LOGITS)
    of = tl.load(buffer + LOGITS_AT + s, mask=wanted, other=0)
    other = buffer + _HEADER + of
    first = tl.load(other + MAX_SEQS)
    after = tl.load(other + MAX_SEQS + 1, mask=of + 1 < seqs, other=0)
    after = tl.where(of + 1 < seqs, after, tokens)
    position = tl.load(other + 2 * MAX_SEQS) + after - first
    tl.store(logit_rows + s, tl.where(wanted, after - 1, -1))
    tl.store(sample_rows + s, tl.where(wanted, tl.load(other), -1))
    tl.store(sample_positions + s, tl.where(wanted, position, 0))


@triton.jit
def _gather(
    buffer, token_table, page_table, token_ids, positions, slots, q_starts, kv_lens, pages, logit_rows, sample_rows,
    sample_positions, table_width, table_pages,
    PAGE_SIZE: tl.constexpr, MAX_SEQS: tl.constexpr, MAX_TOKENS: tl.constexpr, LOGITS_AT: tl.constexpr,
    STEPS: tl.constexpr, BLOCK: tl.constexpr, PAGE_BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < MAX_SEQS:
        _gather_sequence(
            buffer, page_table, q_starts, kv_lens, pages, logit_rows, sample_rows, sample_positions, program,
            table_pages, PAGE_SIZE, MAX_SEQS, LOGITS_AT, PAGE_BLOCK,
        )  # fmt: skip
    else:
        _gather_tokens(
            buffer, token_table, page_table, token_ids, positions, slots, program - MAX_SEQS, table_width,
            table_pages, PAGE_SIZE, MAX_SEQS, MAX_TOKENS, STEPS, BLOCK,
        )  # fmt: skip


def step_inputs(
    buffer: Tensor, layout: StepLayout, token_table: Tensor, page_table: Tensor, page_size: int, into: StepInputs
) -> None:
    """Apply what the buffer carries to the tables, then fill `into`. Everything on one device; nothing is checked
    there: the buffer must be as its layout says. Raises ValueError for shapes that do not fit."""
    if buffer.shape != (layout.size,) or into.token_ids.shape[0] != layout.max_tokens:
        raise ValueError(f"a buffer of {layout.size} numbers is needed, not {list(buffer.shape)}")
    if into.page_table.shape != (layout.max_seqs, page_table.shape[1]):
        raise ValueError("the gathered page table has the width of the table that it is gathered from")
    steps = _steps(layout.max_seqs)
    sizes = {"MAX_SEQS": layout.max_seqs, "STEPS": steps, "BLOCK": BLOCK, "num_warps": 4}
    context, pages = token_table.shape[1], page_table.shape[1]
    _apply[(-(-max(layout.max_tokens, layout.max_pages) // BLOCK),)](
        buffer, token_table, page_table, context, pages, MAX_PAGES=layout.max_pages, PAGES_AT=layout.pages,
        TOKENS_AT=layout.tokens, **sizes,
    )  # fmt: skip
    _gather[(layout.max_seqs + -(-layout.max_tokens // BLOCK),)](
        buffer, token_table, page_table, into.token_ids, into.positions, into.slots, into.q_starts, into.kv_lens,
        into.page_table, into.logit_rows, into.sample_rows, into.sample_positions, context, pages,
        PAGE_SIZE=page_size, MAX_TOKENS=layout.max_tokens, LOGITS_AT=layout.logits, PAGE_BLOCK=PAGE_BLOCK, **sizes,
    )  # fmt: skip


def _steps(seqs: int) -> int:
    """Halvings that leave one of `seqs` sequences."""
    return max(1, (seqs - 1).bit_length())


def configurations() -> Iterator[Configuration]:
    """Buckets from one decode to the largest chunk, pages of 16, 32 and 64."""
    ints = dict.fromkeys(
        ("buffer", "token_table", "page_table", "token_ids", "positions", "slots", "q_starts", "kv_lens", "pages",
         "logit_rows", "sample_rows", "sample_positions"), "*i32",
    )  # fmt: skip
    widths = {"table_width": "i32", "table_pages": "i32"}
    for seqs, tokens, page_size in (
        (1, 1, 16),
        (64, 64, 16),
        (256, 256, 16),
        (256, 2048, 16),
        (64, 512, 32),
        (8, 128, 64),
    ):
        layout = StepLayout(seqs, tokens, 256)
        sizes = {"MAX_SEQS": seqs, "STEPS": _steps(seqs), "BLOCK": BLOCK}
        hot = (seqs, tokens) == (256, 2048)
        yield Configuration(
            kernel=_apply,
            name=f"s{seqs} t{tokens} p{page_size}",
            signature={"buffer": "*i32", "token_table": "*i32", "page_table": "*i32", **widths},
            constants={**sizes, "MAX_PAGES": 256, "PAGES_AT": layout.pages, "TOKENS_AT": layout.tokens},
            hot=hot,
        )
        yield Configuration(
            kernel=_gather,
            name=f"s{seqs} t{tokens} p{page_size}",
            signature={**ints, **widths},
            constants={
                **sizes, "PAGE_SIZE": page_size, "MAX_TOKENS": tokens, "LOGITS_AT": layout.logits,
                "PAGE_BLOCK": PAGE_BLOCK,
            },
            hot=hot,
        )  # fmt: skip
