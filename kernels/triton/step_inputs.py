"""A step's inputs, gathered on the device from one packed buffer and the tables of the requests' rows.

The buffer is laid out in `kernels.step_layout`. token_table int32 [rows, context], page_table int32 [rows, P]: the
state of the running requests. Two kernels: `_apply` writes page updates and carried tokens into the tables; `_gather`
then fills `StepInputs`, one program per block of tokens (which find their sequence by binary search over the first
queries) and one per sequence, which copies as much of its page table as it uses. Grids depend on the bucket alone, and
the sizes of buckets are plain arguments: a page size compiles once, whatever the number of buckets.
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

SIZES = [
    "table_width", "table_pages", "max_seqs", "max_pages", "max_tokens", "pages_at", "tokens_at", "logits_at", "steps",
]  # fmt: skip
"""Arguments that differ between buckets and engines"""

_HEADER = tl.constexpr(HEADER)
_SEQS, _TOKENS, _LOGITS, _PAGES, _CARRIED = (tl.constexpr(place) for place in (SEQS, TOKENS, LOGITS, PAGES, CARRIED))


@triton.jit
def _sequence_of(buffer, query, seqs, max_seqs, steps):
    """The last sequence whose first query is at or before `query`, by bisection in so many steps."""
    low = tl.zeros_like(query)
    high = tl.zeros_like(query) + (seqs - 1)
    for _ in range(steps):
        middle = (low + high + 1) // 2
        begins = tl.load(buffer + _HEADER + max_seqs + tl.maximum(middle, 0))
        low = tl.where(begins <= query, middle, low)
        high = tl.where(begins <= query, high, middle - 1)
    return low


@triton.jit(do_not_specialize=SIZES)
def _apply(
    buffer, token_table, page_table, table_width, table_pages, max_seqs, max_pages, pages_at, tokens_at, steps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    update = entries < tl.load(buffer + _PAGES)
    row = tl.load(buffer + pages_at + entries, mask=update, other=0).to(tl.int64)
    index = tl.load(buffer + pages_at + max_pages + entries, mask=update, other=0)
    page = tl.load(buffer + pages_at + 2 * max_pages + entries, mask=update, other=0)
    tl.store(page_table + row * table_pages + index, page, mask=update)
    tokens = tl.load(buffer + _TOKENS)
    query = tl.minimum(entries, tl.maximum(tokens - 1, 0))
    s = _sequence_of(buffer, query, tl.load(buffer + _SEQS), max_seqs, steps)
    s = tl.maximum(s, 0)
    seq = buffer + _HEADER + s
    source = tl.load(seq + 3 * max_seqs)
    carried = (entries < tokens) & (source >= 0)
    offset = entries - tl.load(seq + max_seqs)
    token = tl.load(buffer + tokens_at + source + offset, mask=carried, other=0)
    position = tl.load(seq + 2 * max_seqs) + offset
    at = token_table + tl.load(seq).to(tl.int64) * table_width + position
    tl.store(at, token, mask=carried & (position < table_width))


@triton.jit
def _gather_tokens(
    buffer, token_table, page_table, token_ids, positions, slots, block, table_width, table_pages, max_seqs, max_tokens,
    steps, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    query = block * BLOCK + tl.arange(0, BLOCK)
    tokens = tl.load(buffer + _TOKENS)
    live = query < tokens
    s = _sequence_of(buffer, query, tl.load(buffer + _SEQS), max_seqs, steps)
    seq = buffer + _HEADER + tl.maximum(s, 0)
    row = tl.load(seq).to(tl.int64)
    position = tl.load(seq + 2 * max_seqs) + query - tl.load(seq + max_seqs)
    token = tl.load(token_table + row * table_width + position, mask=live, other=-1)
    page = tl.load(page_table + row * table_pages + position // PAGE_SIZE, mask=live, other=0)
    inside = query < max_tokens
    tl.store(token_ids + query, token, mask=inside)
    tl.store(positions + query, tl.where(live, position, 0), mask=inside)
    tl.store(slots + query, tl.where(live, page * PAGE_SIZE + position % PAGE_SIZE, -1), mask=inside)


@triton.jit
def _gather_sequence(
    buffer, page_table, q_starts, kv_lens, pages, logit_rows, sample_rows, sample_positions, s, table_pages, max_seqs,
    logits_at, PAGE_SIZE: tl.constexpr, PAGE_BLOCK: tl.constexpr,
):  # fmt: skip
    seqs = tl.load(buffer + _SEQS)
    tokens = tl.load(buffer + _TOKENS)
    live = s < seqs
    seq = buffer + _HEADER + s
    begins = tl.load(seq + max_seqs, mask=live, other=0)
    ends = tl.load(seq + max_seqs + 1, mask=s + 1 < seqs, other=0)
    ends = tl.where(s + 1 < seqs, ends, tokens)
    length = tl.where(live, tl.load(seq + 2 * max_seqs, mask=live, other=0) + ends - begins, 0)
    tl.store(q_starts + s, tl.where(live, begins, tokens))
    tl.store(kv_lens + s, length)
    if s == max_seqs - 1:
        tl.store(q_starts + max_seqs, tokens)
    row = tl.load(seq, mask=live, other=0).to(tl.int64)
    used = (length + PAGE_SIZE - 1) // PAGE_SIZE
    for start in range(0, used, PAGE_BLOCK):
        index = start + tl.arange(0, PAGE_BLOCK)
        page = tl.load(page_table + row * table_pages + index, mask=index < used, other=0)
        tl.store(pages + s.to(tl.int64) * table_pages + index, page, mask=index < used)
    # The same program serves one row of logits: that of another sequence where some want none
    wanted = s < tl.load(buffer + _LOGITS)
    of = tl.load(buffer + logits_at + s, mask=wanted, other=0)
    other = buffer + _HEADER + of
    first = tl.load(other + max_seqs)
    after = tl.load(other + max_seqs + 1, mask=of + 1 < seqs, other=0)
    after = tl.where(of + 1 < seqs, after, tokens)
    position = tl.load(other + 2 * max_seqs) + after - first
    tl.store(logit_rows + s, tl.where(wanted, after - 1, -1))
    tl.store(sample_rows + s, tl.where(wanted, tl.load(other), -1))
    tl.store(sample_positions + s, tl.where(wanted, position, 0))


@triton.jit(do_not_specialize=SIZES)
def _gather(
    buffer, token_table, page_table, token_ids, positions, slots, q_starts, kv_lens, pages, logit_rows, sample_rows,
    sample_positions, table_width, table_pages, max_seqs, max_tokens, logits_at, steps,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, PAGE_BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < max_seqs:
        _gather_sequence(
            buffer, page_table, q_starts, kv_lens, pages, logit_rows, sample_rows, sample_positions, program,
            table_pages, max_seqs, logits_at, PAGE_SIZE, PAGE_BLOCK,
        )  # fmt: skip
    else:
        _gather_tokens(
            buffer, token_table, page_table, token_ids, positions, slots, program - max_seqs, table_width,
            table_pages, max_seqs, max_tokens, steps, PAGE_SIZE, BLOCK,
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
    context, pages = token_table.shape[1], page_table.shape[1]
    _apply[(-(-max(layout.max_tokens, layout.max_pages) // BLOCK),)](
        buffer, token_table, page_table, context, pages, layout.max_seqs, layout.max_pages, layout.pages, layout.tokens,
        steps, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    _gather[(layout.max_seqs + -(-layout.max_tokens // BLOCK),)](
        buffer, token_table, page_table, into.token_ids, into.positions, into.slots, into.q_starts, into.kv_lens,
        into.page_table, into.logit_rows, into.sample_rows, into.sample_positions, context, pages, layout.max_seqs,
        layout.max_tokens, layout.logits, steps, PAGE_SIZE=page_size, BLOCK=BLOCK, PAGE_BLOCK=PAGE_BLOCK, num_warps=4,
    )  # fmt: skip


def _steps(seqs: int) -> int:
    """Halvings that leave one of `seqs` sequences."""
    return max(1, (seqs - 1).bit_length())


def configurations() -> Iterator[Configuration]:
    """Pages of 16, 32 and 64; tables of any width."""
    tables = dict.fromkeys(("table_width", "table_pages"), "i32")
    sizes = dict.fromkeys(("max_seqs", "steps"), "i32")
    yield Configuration(
        kernel=_apply,
        name="any",
        signature=dict.fromkeys(("buffer", "token_table", "page_table"), "*i32")
        | tables
        | sizes
        | dict.fromkeys(("max_pages", "pages_at", "tokens_at"), "i32"),
        constants={"BLOCK": BLOCK},
        hot=True,
    )
    arrays = dict.fromkeys(
        ("buffer", "token_table", "page_table", "token_ids", "positions", "slots", "q_starts", "kv_lens", "pages",
         "logit_rows", "sample_rows", "sample_positions"), "*i32",
    )  # fmt: skip
    for page_size in (16, 32, 64):
        yield Configuration(
            kernel=_gather,
            name=f"p{page_size}",
            signature=arrays | tables | sizes | dict.fromkeys(("max_tokens", "logits_at"), "i32"),
            constants={"PAGE_SIZE": page_size, "BLOCK": BLOCK, "PAGE_BLOCK": PAGE_BLOCK},
            hot=page_size == 16,
        )
