"""The one buffer that tells a device what a step is: where everything lies in it, and the views that fill it.

All int32, one fixed size for a bucket, so that one copy and one launch serve every step of it:

    header   8            S sequences, T tokens, R rows of logits, U page updates, W carried tokens, 3 unused
    seqs     4 × max_seqs  request row | first query | first position | carried tokens from (−1: the token table)
    logits   max_seqs      sequence whose last token's logits are wanted, ascending
    pages    3 × max_pages request row | index in its page table | page
    tokens   max_tokens    carried tokens

Sequence s owns queries first_query[s] to first_query[s + 1] (T after the last) at consecutive positions. Its tokens are
those that the token table holds at these positions (a decode reads what the sampler wrote there, without the host
knowing it), or W tokens that the buffer carries (chunks of prompts), which the step also writes into the table. Page
updates are applied before anything else is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Buffer = TypeVar("Buffer", Tensor, npt.NDArray[np.int32])
"""A step's buffer, as a tensor or as an array over the same memory"""

HEADER = 8
SEQS, TOKENS, LOGITS, PAGES, CARRIED = range(5)
"""Places in the header"""


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Sizes of a bucket's buffer, and from them where its sections begin."""

    max_seqs: int
    max_tokens: int
    max_pages: int

    @property
    def logits(self) -> int:
        """Where the rows of logits begin."""
        return HEADER + 4 * self.max_seqs

    @property
    def pages(self) -> int:
        """Where the page updates begin."""
        return self.logits + self.max_seqs

    @property
    def tokens(self) -> int:
        """Where the carried tokens begin."""
        return self.pages + 3 * self.max_pages

    @property
    def size(self) -> int:
        """Numbers in the buffer."""
        return self.tokens + self.max_tokens

    def empty(self, *, pinned: bool = False) -> Tensor:
        """A host buffer int32 [size] of zeros: a step of nothing. pinned: for copies that a device makes by itself."""
        return torch.zeros(self.size, dtype=torch.int32, pin_memory=pinned)

    def seqs_of(self, buffer: Buffer) -> Buffer:
        """View int32 [4, max_seqs]: request rows, first queries, first positions, carried from."""
        return buffer[HEADER : self.logits].reshape(4, self.max_seqs)

    def logits_of(self, buffer: Buffer) -> Buffer:
        """View int32 [max_seqs]: sequences whose logits are wanted."""
        return buffer[self.logits : self.pages]

    def pages_of(self, buffer: Buffer) -> Buffer:
        """View int32 [3, max_pages]: request rows, indices, pages."""
        return buffer[self.pages : self.tokens].reshape(3, self.max_pages)

    def tokens_of(self, buffer: Buffer) -> Buffer:
        """View int32 [max_tokens]: carried tokens."""
        return buffer[self.tokens : self.size]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a step reads, in memory that stays where it is: padded to the bucket in a way that touches nothing live."""

    token_ids: Tensor
    """int32 [max_tokens], −1 past the T tokens"""
    positions: Tensor
    """int32 [max_tokens], 0 past them"""
    slots: Tensor
    """int32 [max_tokens], −1 past them: nothing is written there"""
    q_starts: Tensor
    """int32 [max_seqs + 1], T past the S sequences"""
    kv_lens: Tensor
    """int32 [max_seqs], 0 past them"""
    page_table: Tensor
    """int32 [max_seqs, P], each sequence's pages; entries past its end are whatever was there"""
    logit_rows: Tensor
    """int32 [max_seqs], rows of the tokens; −1 past the R rows of logits"""
    sample_rows: Tensor
    """int32 [max_seqs], request rows to sample for; −1 past them"""
    sample_positions: Tensor
    """int32 [max_seqs], positions of the tokens to be sampled; 0 past them"""

    @classmethod
    def allocate(cls, layout: StepLayout, pages: int, device: str = "cpu") -> StepInputs:
        """Memory for a bucket; pages: P, the most that a sequence has."""

        def ints(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        tokens, seqs = layout.max_tokens, layout.max_seqs
        return cls(
            ints(tokens), ints(tokens), ints(tokens), ints(seqs + 1), ints(seqs), ints(seqs, pages), ints(seqs),
            ints(seqs), ints(seqs),
        )  # fmt: skip
