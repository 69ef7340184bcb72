"""A step's work, packed into the one buffer that the device is sent.

Rows are stable: a running request keeps its row of the device's tables until it leaves. The host sends what the device
cannot know: which rows compute how many tokens, the tokens of prompts, and pages that were added. A token that the
device has sampled is not sent back to it: the buffer says that the token table has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.request import Request
from engine.scheduler import Work
from kernels.step_layout import CARRIED, LOGITS, PAGES, SEQS, TOKENS, StepLayout

Int32s = npt.NDArray[np.int32]

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
    rows: Int32s
    """Their rows"""


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
        self._turn = 0
        self._sent: Int32s = np.zeros(rows, dtype=np.int32)
        self._expected: Int32s = np.full(rows, -1, dtype=np.int32)
        self._arange: Int32s = np.arange(rows, dtype=np.int32)

    def admit(self, row: int) -> None:
        """A request has got this row; the device knows nothing of it."""
        self._sent[row] = 0
        self._expected[row] = -1

    def pack(self, work: Sequence[Work]) -> Packed:
        """Pack a step whose requests have been scheduled. The buffer may be filled again after two further steps."""
        seqs = len(work)
        rows = np.array([request.row for request, _ in work], dtype=np.int32)
        lens = np.array([request.scheduled for request, _ in work], dtype=np.int32)
        counts = np.array([count for _, count in work], dtype=np.int32)
        sampling = [request for request, _ in work if request.scheduled == len(request.tokens)]
        ends = counts.cumsum(dtype=np.int32)
        tokens = int(ends[-1])
        layout = self._bucket(tokens, seqs, len(sampling))
        buffer = self._slots[self._turn]
        self._turn = (self._turn + 1) % SLOTS
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
        updates, before = self._pages(work, rows, lens, layout, array)
        array[SEQS], array[TOKENS], array[LOGITS], array[PAGES], array[CARRIED] = (
            seqs, tokens, len(sampling), updates, carried,
        )  # fmt: skip
        return Packed(layout, buffer, before, tokens, seqs, sampling, chosen)

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
        self, work: Sequence[Work], rows: Int32s, lens: Int32s, layout: StepLayout, array: Int32s
    ) -> tuple[int, list[Buffer]]:
        """Put pages that the device does not know into the buffer; returns how many, and buffers that go before it."""
        needed = (lens + (self._page_size - 1)) // self._page_size
        sent = self._sent[rows]
        grown = np.flatnonzero(needed > sent)
        if not grown.size:
            return 0, []
        updates: list[tuple[int, int, int]] = []
        for s, start, stop in zip(grown.tolist(), sent[grown].tolist(), needed[grown].tolist(), strict=True):
            request = work[s].request
            row = request.row
            updates += [(row, index, request.pages[index]) for index in range(start, stop)]
        self._sent[rows[grown]] = needed[grown]
        before = []
        room = layout.max_pages
        while len(updates) > room:
            # A long cached prefix brings more pages than the tokens of a step need
            extra = Buffer.over(self._staging(layout.size))
            _put(updates[:room], layout, extra.array)
            extra.array[PAGES] = room
            before.append(extra)
            updates = updates[room:]
        _put(updates, layout, array)
        return len(updates), before


def _put(updates: list[tuple[int, int, int]], layout: StepLayout, array: Int32s) -> None:
    layout.pages_of(array)[:, : len(updates)] = np.array(updates, dtype=np.int32).T
