"""One forward pass: packs a step's work into tensors, runs the model, samples. Feature code does not live here.

Every running request owns a stable row. Its page table is a row of `_pages`, extended as pages are added, so a step's
tables are one gather. A step writes into buffers that are allocated once. Decodes come first in the work and are packed
by array arithmetic alone; only chunks of prompts cost Python per request. Rows are never padded or reordered in a way
that a row's result could depend on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.batch import ForwardBatch, KVTensors
from engine.request import Request
from engine.sampler import Sampled, Sampler
from engine.scheduler import Applied, Work

Int32s = npt.NDArray[np.int32]


class Model(Protocol):
    """What the runner needs of a model."""

    def forward(self, batch: ForwardBatch, kv: KVTensors) -> Tensor:
        """Write the step's keys and values and return float32 logits [R, vocab] of batch.logit_rows (R may be 0)."""
        ...


class Runner:
    """Device state of the running requests, and the pass over them."""

    def __init__(
        self,
        model: Model,
        kv: KVTensors,
        sampler: Sampler,
        *,
        max_running: int,
        step_tokens: int,
        max_context: int,
        device: str = "cpu",
    ) -> None:
        self._model = model
        self._kv = kv
        self._sampler = sampler
        self._device = device
        self._page_size = kv.page_size
        self._pages: Int32s = np.zeros((max_running, -(-max_context // kv.page_size)), dtype=np.int32)
        self._tokens: Int32s = np.empty(step_tokens, dtype=np.int32)
        self._positions: Int32s = np.empty(step_tokens, dtype=np.int32)
        self._slots: Int32s = np.empty(step_tokens, dtype=np.int32)
        self._starts: Int32s = np.arange(max_running + 1, dtype=np.int32)
        self._lens: Int32s = np.empty(max_running, dtype=np.int32)
        self._arange: Int32s = np.arange(step_tokens, dtype=np.int32)

    def sync(self, applied: Applied) -> None:
        """Bring rows up to date with what the scheduler did."""
        for _request, row in applied.preempted:
            self._sampler.release(row)
        for request in applied.admitted:
            self._pages[request.row, : len(request.pages)] = request.pages
            self._pages[request.row, len(request.pages) :] = 0
            self._sampler.admit(request)
        for request in applied.grown:
            count = len(request.pages)
            self._pages[request.row, count - 1] = request.pages[count - 1]

    def release(self, row: int) -> None:
        """A request has left its row."""
        self._sampler.release(row)

    def execute(self, work: Sequence[Work]) -> tuple[list[Request], Sampled]:
        """Run the model over `work` (decodes first) and sample for the requests whose tokens are all computed then.

        Returns those requests and their next tokens, in the same order.
        """
        batch, sampling = self._pack(work)
        with torch.inference_mode():
            logits = self._model.forward(batch, self._kv)
            if not sampling:
                return sampling, Sampled([])
            return sampling, self._sampler.sample(logits, sampling)

    def _pack(self, work: Sequence[Work]) -> tuple[ForwardBatch, list[Request]]:
        decodes = 0
        sampling = []
        for request, count in work:
            if count != 1 or request.scheduled != len(request.tokens):
                break
            sampling.append(request)
            decodes += 1
        seqs = len(work)
        page_size = self._page_size
        rows = np.array([request.row for request, _ in work], dtype=np.intp)
        lens = self._lens[:seqs]
        lens[:] = [request.scheduled for request, _ in work]
        table: Int32s = self._pages[:, : -(-int(lens.max()) // page_size)].take(rows, axis=0)
        tokens, positions, slots = self._tokens, self._positions, self._slots
        if decodes:
            tokens[:decodes] = [request.tokens[-1] for request in sampling]
            np.subtract(lens[:decodes], 1, out=positions[:decodes])
        if decodes == seqs:
            total = decodes
            starts = self._starts[: seqs + 1]
            logit_rows = np.arange(decodes, dtype=np.int64)
            owners: npt.NDArray[np.int32] = self._arange[:decodes]
        else:
            total, starts, logit_rows, owners = self._pack_chunks(work, decodes, sampling)
        at = positions[:total]
        slots[:total] = table[owners, at // page_size] * page_size + at % page_size
        return (
            ForwardBatch(
                token_ids=self._tensor(tokens[:total]),
                positions=self._tensor(at),
                slots=self._tensor(slots[:total]),
                q_starts=self._tensor(starts),
                kv_lens=self._tensor(lens),
                page_table=self._tensor(table),
                logit_rows=self._tensor(logit_rows),
            ),
            sampling,
        )

    def _pack_chunks(
        self, work: Sequence[Work], decodes: int, sampling: list[Request]
    ) -> tuple[int, Int32s, npt.NDArray[np.int64], Int32s]:
        """Append the chunks after `decodes` decodes; returns total tokens, q_starts, logit rows, each token's
        sequence."""
        total = decodes
        counts = np.ones(len(work), dtype=np.int32)
        logit_rows = list(range(decodes))
        for index in range(decodes, len(work)):
            request, count = work[index]
            end = request.scheduled
            self._tokens[total : total + count] = request.tokens[end - count : end]
            np.add(self._arange[:count], end - count, out=self._positions[total : total + count])
            counts[index] = count
            total += count
            if end == len(request.tokens):
                sampling.append(request)
                logit_rows.append(total - 1)
        starts = np.zeros(len(work) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        owners = np.repeat(self._arange[: len(work)], counts)
        return total, starts, np.array(logit_rows, dtype=np.int64), owners

    def _tensor(self, array: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device == "cpu" else tensor.to(self._device)
