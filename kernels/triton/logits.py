"""Edits of logits before a token is chosen: penalties, bias, tokens that are not possible yet.

logits float32 [R, V] contiguous, changed in place; rows, positions int32 [R] as in sampling.py; the rest is read from
`SamplingRows`. In this order: repetition penalty over prompt and output (CTRL, arXiv 1909.05858), frequency and
presence penalties over the output, then the row's list of edits, which holds a token once. Two kernels: one over tiles
of the rows that have a penalty, one over the lists; rows that ask for nothing cost a look at their parameters. Products
and sums are rounded one by one, as on the host, so that the edited logits are the host's to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling_rows import BANNED, BANNED_UNTIL, COLUMNS, EDITS, IN_PROMPT, SamplingRows
from kernels.triton.configuration import Configuration

TILE = 2048
BLOCK = 256
"""Edits of one program."""

_REPETITION, _FREQUENCY, _PRESENCE = (tl.constexpr(column) for column in range(4, 7))
_EDITS, _BANNED_UNTIL, _COLUMNS = tl.constexpr(EDITS), tl.constexpr(BANNED_UNTIL), tl.constexpr(COLUMNS)
_IN_PROMPT, _BANNED = tl.constexpr(IN_PROMPT), tl.constexpr(BANNED)


@triton.jit
def _penalise(logits, rows, parameters, counts, vocab, TILE: tl.constexpr):
    r = tl.program_id(0)
    request = tl.load(rows + r)
    if request >= 0:
        parameter = parameters + request * _COLUMNS
        repetition = tl.load(parameter + _REPETITION).to(tl.float32)
        frequency = tl.load(parameter + _FREQUENCY).to(tl.float32)
        presence = tl.load(parameter + _PRESENCE).to(tl.float32)
        if (repetition != 1.0) | (tl.abs(frequency) + tl.abs(presence) > 0.0):
            ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
            inside = ids < vocab
            count = tl.load(counts + request.to(tl.int64) * vocab + ids, mask=inside, other=0).to(tl.int32)
            seen = inside & (count > 0)
            at = logits + r.to(tl.int64) * vocab + ids
            x = tl.load(at, mask=seen, other=0.0)
            x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
            made = count & (_IN_PROMPT - 1)
            x = tl.where(made > 0, x - (frequency * made.to(tl.float32) + presence), x)
            tl.store(at, x, mask=seen)


@triton.jit
def _edit(logits, rows, positions, parameters, edit_ids, edit_bias, vocab, max_edits, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    request = tl.load(rows + r)
    if request >= 0:
        parameter = parameters + request * _COLUMNS
        number = tl.load(parameter + _EDITS).to(tl.int32)
        entries = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        held = entries < number
        barred_until = tl.load(parameter + _BANNED_UNTIL).to(tl.int32)
        limit = tl.where(tl.load(positions + r) < barred_until, _BANNED, 0)
        where = request.to(tl.int64) * max_edits + entries
        marked = tl.load(edit_ids + where, mask=held, other=0)
        at = logits + r.to(tl.int64) * vocab + (marked & (_BANNED - 1))
        x = tl.load(at, mask=held, other=0.0) + tl.load(edit_bias + where, mask=held, other=0.0)
        tl.store(at, tl.where((marked & limit) != 0, float("-inf"), x), mask=held)


def rewrite(logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingRows) -> None:
    """Apply every row's penalties and edits in place. Raises ValueError for shapes that do not fit."""
    count, vocab = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous() or vocab != state.vocab_size:
        raise ValueError(f"contiguous float32 logits [R, {state.vocab_size}] are needed, not {list(logits.shape)}")
    if rows.shape != (count,) or positions.shape != (count,):
        raise ValueError(f"{count} rows of logits need as many rows and positions")
    if count:
        _penalise[(count, -(-vocab // TILE))](
            logits, rows, state.parameters, state.counts, vocab, TILE=TILE, num_warps=4, enable_fp_fusion=False
        )
        _edit[(count, -(-state.max_edits // BLOCK))](
            logits, rows, positions, state.parameters, state.edit_ids, state.edit_bias, vocab, state.max_edits,
            BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip


def configurations() -> Iterator[Configuration]:
    """One of each kernel: vocabularies and list lengths are arguments."""
    common = {"logits": "*fp32", "rows": "*i32", "parameters": "*fp64", "vocab": "i32"}
    yield Configuration(
        kernel=_penalise,
        name="penalties",
        signature={**common, "counts": "*i16"},
        constants={"TILE": TILE},
        fp_fusion=False,
        hot=True,
    )
    yield Configuration(
        kernel=_edit,
        name="edits",
        signature={**common, "positions": "*i32", "edit_ids": "*i32", "edit_bias": "*fp32", "max_edits": "i32"},
        constants={"BLOCK": BLOCK},
        hot=True,
    )
