"""Steps of exactly their own size, for kernels that take no padding: tables in main memory, sampling on the host."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.batch import ForwardBatch, KVTensors
from engine.device import Result
from engine.lora import adapters_of
from engine.packing import Int32s
from engine.request import Request
from engine.runner import Flight
from engine.sampler import RowState, Sampled, Sampler
from engine.sizing import Shape
from kernels.host_step import HostStep, apply_pages, host_step
from kernels.step_layout import StepLayout


class Model(Protocol):
    """What a step needs of a model."""

    def forward(self, batch: ForwardBatch, kv: KVTensors) -> Tensor:
        """Write the step's keys and values and return float32 logits [R, vocab] of batch.logit_rows (R may be 0)."""
        ...


class LoadedModel(Model, Protocol):
    """A loaded model (engine.models.registry.CausalLM)."""

    @property
    def config(self) -> Shape:
        """Its dimensions."""
        ...

    @property
    def packed(self) -> bool:
        """True when matrices run in quantised blocks."""
        ...


class ExactSteps:
    """The steps of a model without padding; see `engine.runner.Steps`."""

    def __init__(
        self,
        model: Model,
        kv: KVTensors,
        sampler: Sampler,
        *,
        max_running: int,
        step_tokens: int,
        max_context: int,
        max_seqs: int = 0,
    ) -> None:
        """max_seqs: most sequences of a step, if they are more than the rows."""
        self._model = model
        self._kv = kv
        self._sampler = sampler
        self._page_size = kv.page_size
        self._tokens: Int32s = np.zeros((max_running, max_context), dtype=np.int32)
        self._pages: Int32s = np.zeros((max_running, -(-max_context // kv.page_size)), dtype=np.int32)
        seqs = max(max_seqs, max_running)
        self._adapters: Int32s | None = None
        """slots of the rows' adapters, where the model has any"""
        if adapters_of(model) is not None:
            self._adapters = np.full(max_running, -1, dtype=np.int32)
        self._layout = StepLayout(seqs, step_tokens, 2 * seqs + -(-step_tokens // kv.page_size))

    @property
    def largest(self) -> StepLayout:
        """The only layout."""
        return self._layout

    overlaps = True
    summary = ""

    @property
    def max_edits(self) -> int | None:
        """Any number."""
        return None

    def state(self, request: Request) -> object:
        """What the host's sampler needs."""
        return RowState(request)

    def bucket(self, tokens: int, seqs: int, logits: int) -> StepLayout:
        """The only layout."""
        return self._layout

    def __call__(self, flight: Flight) -> Result:
        """Run the step; what was chosen stays in the flight."""
        packed = flight.packed
        for row, state in flight.admitted:
            assert state is None or isinstance(state, RowState)
            self._sampler.install(row, state)
        for extra in packed.before:
            apply_pages(extra.array, packed.layout, self._pages)
        step = host_step(packed.buffer.array, packed.layout, self._tokens, self._pages, self._page_size)
        batch = ForwardBatch.of_step(step, "cpu")
        if self._adapters is not None:
            batch.adapters = self._slots(flight, step, self._adapters)
        logits = self._model.forward(batch, self._kv)
        flight.sampled = Sampled([])
        if packed.sampling:
            flight.sampled = self._sampler.sample(logits, step.sample_rows, step.sample_positions, self._tokens)
        return ()

    def tokens(self, flight: Flight, result: Result) -> Sampled:
        """What the host's sampler chose."""
        assert flight.sampled is not None
        return flight.sampled

    def _slots(self, flight: Flight, step: HostStep, slots: Int32s) -> Tensor | None:
        """The slot of each token; None where nobody has an adapter."""
        for row, slot in flight.adapters:
            slots[row] = slot
        packed = flight.packed
        of_seq = slots[packed.layout.seqs_of(packed.buffer.array)[0, : packed.seqs]]
        if of_seq.max() < 0:
            return None
        return torch.from_numpy(of_seq.repeat(np.diff(step.q_starts)))
