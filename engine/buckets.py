"""The sizes that steps are padded to, so that a few shapes serve every step.

A bucket of decodes has a row of logits for each of its tokens; a mixed one has any sequences, up to all rows. From 64
on sizes grow by a quarter at most, which bounds what padding wastes.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from kernels.step_layout import StepLayout


def sizes(most: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8, of 16 and of a quarter, up to `most`, which is the last."""
    found = []
    size = 1
    while size < most:
        found.append(size)
        if size < 8:
            size *= 2
        elif size < 32:
            size += 8
        elif size < 64:
            size += 16
        else:
            size += (1 << (size.bit_length() - 1)) // 4
    return [*found, most]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A shape of steps."""

    layout: StepLayout
    decode: bool
    """every token is a sequence's only one and has a row of logits"""


class Buckets:
    """The table: which bucket holds a step."""

    def __init__(self, *, max_running: int, step_tokens: int, page_size: int) -> None:
        self.rows = sizes(max_running)
        """sizes of batches, of decodes as of rows of logits"""
        self.decodes = [Bucket(StepLayout(rows, rows, rows), True) for rows in self.rows]
        self._tokens = [size for size in sizes(step_tokens) if size >= 16 or size == step_tokens]
        self.mixed = [
            Bucket(StepLayout(max_running, tokens, max_running + -(-tokens // page_size)), False)
            for tokens in self._tokens
        ]
        self._of = {bucket.layout: bucket for bucket in (*self.decodes, *self.mixed)}

    @property
    def largest_first(self) -> list[Bucket]:
        """All of them, by tokens."""
        return sorted((*self.decodes, *self.mixed), key=lambda bucket: -bucket.layout.max_tokens)

    @property
    def largest(self) -> StepLayout:
        """The layout that every other one fits into."""
        return self.mixed[-1].layout

    def choose(self, tokens: int, seqs: int, logits: int) -> StepLayout:
        """The layout of the smallest bucket that holds a step."""
        if tokens == seqs == logits:
            return self.decodes[bisect_left(self.rows, tokens)].layout
        return self.mixed[bisect_left(self._tokens, tokens)].layout

    def of(self, layout: StepLayout) -> Bucket:
        """The bucket of a layout that `choose` gave."""
        return self._of[layout]

    def rows_for(self, logits: int) -> int:
        """The smallest size that holds so many rows of logits."""
        return self.rows[bisect_left(self.rows, logits)]
