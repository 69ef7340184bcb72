"""A step's work, packed into the one buffer that the device is sent.

Rows are stable: a running request keeps its row of the device's tables until it leaves. The host sends what the device
cannot know: which rows compute how many tokens, the tokens of prompts, and pages that were added. A token that the
device has sampled is not sent back to it: the buffer says that the token table has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.request import Draft, Request, Work
from kernels.step_layout import CARRIED, PAGES, SEQS, StepLayout

Int32s = npt.NDArray[np.int32]

Update = tuple[int, int, int]
"""Request row, index in its page table, page"""

SLOTS = 3
"""Buffers that take turns: one that is filled while the steps of two others may still be read."""


@dataclass(slots=True)
class Buffer:
    """Host memory for the packed inputs of a step, as tensor and as array."""

    tensor: Tensor
    array: Int32s

    @classmethod
    def over(cls, memory: Tensor) -> Buffer:
        """Over host memory int32 [size]."""
        return cls(memory, memory.numpy())


@dataclass(slots=True)
class Packed:
    """A step as the device gets it."""

    layout: StepLayout
    buffer: Buffer
    before: list[Buffer]
    """Buffers of nothing but page updates, of the same layout, that did not fit into the step's own"""
    tokens: int
    """T"""
    seqs: int
    """S"""
    sampling: list[Request]
    """Requests that get a token, in the order of the rows of logits"""
    lens: Int32s
    """Tokens of each sequence that are computed afterwards; behind those of the work the guesses', one by one, each of
    which is a sequence and has a row of logits"""
    landmarks: list[int]
    """Places in the work of sequences that fill a page, or of which the device knew nothing before"""
    same: bool
    """The very requests of the step before, each with its next token"""


@dataclass(slots=True)
class _Decodes:
    """A step of nothing but decodes, in case the next one is of the same."""

    work: list[Work]
    layout: StepLayout
    rows: Int32s
    sampling: list[Request]
    lens: Int32s
    landmarks: list[int]
    positions: list[Int32s | None] = field(default_factory=lambda: [None] * SLOTS)
    """First positions in the buffers that describe it already"""


class StepPacker:
    """Packs steps; knows what the device has been told of each row."""

    def __init__(
        self,
        *,
        rows: int,
        page_size: int,
        bucket: Callable[[int, int, int], StepLayout],
        largest: int,
        staging: Callable[[int], Tensor],
    ) -> None:
        """bucket: (tokens, sequences, rows of logits) → the layout that holds such a step. largest: numbers
        of the largest layout. staging: takes host memory."""
        self._bucket = bucket
        self._page_size = page_size
        self._staging = staging
        self._slots = [Buffer.over(staging(largest)) for _ in range(SLOTS)]
        self._extras = [[Buffer.over(staging(largest))] for _ in range(SLOTS)]
        """Buffers that go before those of a turn: one is there from the beginning, for taking memory takes long"""
        self._largest = largest
        self._turn = 0
        self._sent: Int32s = np.zeros(rows, dtype=np.int32)
        self._expected: Int32s = np.full(rows, -1, dtype=np.int32)
        self._arange: Int32s = np.arange(rows, dtype=np.int32)
        self._last: _Decodes | None = None

    def admit(self, row: int) -> None:
        """A request has got this row; the device knows nothing of it."""
        self._sent[row] = 0
        self._expected[row] = -1
        self._last = None

    def accept(self, row: int, tokens: int) -> None:
        """So many guesses of a row stood: the device has the token after them."""
        self._expected[row] += tokens

    def pack(self, work: list[Work], drafts: Sequence[Draft] = ()) -> Packed:
        """Pack a step whose requests have been scheduled. The buffer may be filled again after two further steps."""
        last = self._last
        if last is not None and not drafts and work == last.work:
            return self._next(last)
        if drafts:
            return self._speculative(work, drafts)
        seqs = len(work)
        rows = np.array([request.row for request, _ in work], dtype=np.int32)
        lens = np.array([request.scheduled for request, _ in work], dtype=np.int32)
        counts = np.array([count for _, count in work], dtype=np.int32)
        sampling = [request for request, _ in work if request.scheduled == len(request.tokens)]
        ends = counts.cumsum(dtype=np.int32)
        tokens = int(ends[-1])
        layout = self._bucket(tokens, seqs, len(sampling))
        turn = self._turn
        self._turn = (turn + 1) % SLOTS
        buffer = self._slots[turn]
        array = buffer.array
        described = layout.seqs_of(array)
        first = lens - counts
        described[0, :seqs] = rows
        np.subtract(ends, counts, out=described[1, :seqs])
        described[2, :seqs] = first
        relayed = self._expected[rows] == first
        carried = 0
        described[3, :seqs] = -1
        if not relayed.all():
            carried = self._carry(work, np.flatnonzero(~relayed).tolist(), described[3], layout.tokens_of(array))
        wanted = self._arange[:seqs]
        if len(sampling) != seqs:
            wanted = np.array(
                [s for s, (request, _) in enumerate(work) if request.scheduled == len(request.tokens)], dtype=np.int32
            )
        layout.logits_of(array)[: len(sampling)] = wanted
        chosen = rows[wanted]
        self._expected[chosen] = lens[wanted]
        updates, before = self._pages(work, rows, lens, layout, array, turn)
        array[SEQS : CARRIED + 1] = seqs, tokens, len(sampling), updates, carried
        landmarks = np.flatnonzero(~relayed | (counts > 1) | (lens % self._page_size == 0)).tolist()
        self._last = None
        if tokens == seqs == len(sampling):
            self._last = _Decodes(work, layout, rows, sampling, lens, landmarks)
        return Packed(layout, buffer, before, tokens, seqs, sampling, lens, landmarks, False)

    def _next(self, last: _Decodes) -> Packed:
        """The same for a step of the very decodes of the step before: each has got a token, which the device has."""
        seqs = len(last.work)
        turn = self._turn
        self._turn = (turn + 1) % SLOTS
        buffer = self._slots[turn]
        positions = last.positions[turn]
        if positions is None:  # what follows differs from turn to turn in the positions and the pages alone
            described = last.layout.seqs_of(buffer.array)
            described[0, :seqs] = last.rows
            described[1, :seqs] = last.layout.logits_of(buffer.array)[:seqs] = self._arange[:seqs]
            described[3, :seqs] = -1
            buffer.array[SEQS : CARRIED + 1] = seqs, seqs, seqs, 0, 0
            positions = last.positions[turn] = described[2, :seqs]
        positions[:] = last.lens
        lens = last.lens = last.lens + 1
        self._expected[last.rows] = lens
        updates: list[Update] = []
        for s in last.landmarks:  # only who has filled a page needs another one
            request, needed = last.work[s].request, -(-int(lens[s]) // self._page_size)
            if needed > self._sent[request.row]:
                self._sent[request.row] = needed
                updates.append((request.row, needed - 1, request.pages[needed - 1]))
        buffer.array[PAGES] = len(updates)
        if updates:
            _put(updates, last.layout, buffer.array)
        last.landmarks = (lens % self._page_size == 0).nonzero()[0].tolist()
        return Packed(last.layout, buffer, [], seqs, seqs, last.sampling, lens, last.landmarks, True)

    def _speculative(self, work: list[Work], drafts: Sequence[Draft]) -> Packed:
        """A step with guesses: each is a sequence of its own, behind those of the work, of one token that the buffer
        carries, in the row of its request."""
        base, row_of = len(work), {request.row: s for s, (request, _) in enumerate(work)}
        owners = [row_of[draft.request.row] for draft in drafts for _ in draft.tokens]
        guesses = np.array([token for draft in drafts for token in draft.tokens], dtype=np.int32)
        beyond = np.array([i for draft in drafts for i in range(1, len(draft.tokens) + 1)], dtype=np.int32)
        rows = np.array([request.row for request, _ in work], dtype=np.int32)
        lens = np.array([request.scheduled for request, _ in work], dtype=np.int32)
        counts = np.array([count for _, count in work], dtype=np.int32)
        sampling = [s for s, (request, _) in enumerate(work) if request.scheduled == len(request.tokens)]
        all_lens = np.concatenate((lens, lens[owners] + beyond))
        all_counts = np.concatenate((counts, np.ones_like(beyond)))
        ends = all_counts.cumsum(dtype=np.int32)
        seqs, tokens, logits = len(ends), int(ends[-1]), len(sampling) + len(guesses)
        layout = self._bucket(tokens, seqs, logits)
        turn = self._turn
        self._turn = (turn + 1) % SLOTS
        array = self._slots[turn].array
        described, carried = layout.seqs_of(array), layout.tokens_of(array)
        described[0, :seqs] = np.concatenate((rows, rows[owners]))
        np.subtract(ends, all_counts, out=described[1, :seqs])
        np.subtract(all_lens, all_counts, out=described[2, :seqs])
        described[3, :base] = -1
        relayed = self._expected[rows] == lens - counts
        known = self._carry(work, np.flatnonzero(~relayed).tolist(), described[3], carried)
        described[3, base:seqs] = np.arange(known, known + len(guesses))
        carried[known : known + len(guesses)] = guesses
        layout.logits_of(array)[:logits] = [*sampling, *range(base, seqs)]
        self._expected[rows[sampling]] = lens[sampling]
        reach = lens.copy()
        np.maximum.at(reach, owners, all_lens[base:])
        updates, before = self._pages(work, rows, reach, layout, array, turn)
        array[SEQS : CARRIED + 1] = seqs, tokens, logits, updates, known + len(guesses)
        landmarks = np.flatnonzero(~relayed | (counts > 1) | (lens % self._page_size == 0)).tolist()
        self._last = None
        chosen = [work[s].request for s in [*sampling, *owners]]
        return Packed(layout, self._slots[turn], before, tokens, seqs, chosen, all_lens, landmarks, False)

    def _carry(self, work: Sequence[Work], which: list[int], sources: Int32s, into: Int32s) -> int:
        """Copy the tokens of these sequences into the buffer; returns how many."""
        carried = 0
        for s in which:
            request, count = work[s]
            end = request.scheduled
            into[carried : carried + count] = request.tokens[end - count : end]
            sources[s] = carried
            carried += count
        return carried

    def _pages(
        self, work: Sequence[Work], rows: Int32s, lens: Int32s, layout: StepLayout, array: Int32s, turn: int
    ) -> tuple[int, list[Buffer]]:
        """Put pages that the device does not know into the buffer; returns how many, and buffers that go before it."""
        needed = (lens + (self._page_size - 1)) // self._page_size
        sent = self._sent[rows]
        grown = np.flatnonzero(needed > sent)
        if not grown.size:
            return 0, []
        updates: list[Update] = []
        for s, start, stop in zip(grown.tolist(), sent[grown].tolist(), needed[grown].tolist(), strict=True):
            request = work[s].request
            row = request.row
            updates += [(row, index, request.pages[index]) for index in range(start, stop)]
        self._sent[rows[grown]] = needed[grown]
        before: list[Buffer] = []
        extras = self._extras[turn]
        room = layout.max_pages
        while len(updates) > room:
            # A long cached prefix brings more pages than the tokens of a step need
            if len(before) == len(extras):
                extras.append(Buffer.over(self._staging(self._largest)))
            extra = extras[len(before)]
            _put(updates[:room], layout, extra.array)
            extra.array[PAGES] = room
            before.append(extra)
            updates = updates[room:]
        _put(updates, layout, array)
        return len(updates), before


def _put(updates: list[Update], layout: StepLayout, array: Int32s) -> None:
    layout.pages_of(array)[:, : len(updates)] = np.array(updates, dtype=np.int32).T
