"""Embedding models: a decoder whose result is one vector for a text, and the steps that it runs in.

A request's prompt is computed as any other's, in chunks, batched with others over the paged cache; the step that
computes its last token gives its vector and ends it. Where the last token's state is the vector, cached prefixes are
passed over as always, for the last token is computed in any case; where every state counts, nothing is cached.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.batch import ForwardBatch, KVTensors
from engine.device import Result
from engine.models.config import ModelConfig
from engine.packing import Int32s
from engine.request import Request
from engine.runner import Flight
from engine.sampler import Sampled
from engine.weights.pooling import Embedding
from kernels.host_step import HostStep, apply_pages, host_step
from kernels.step_layout import SEQS, StepLayout

_LEAST = 1e-12
"""Vectors shorter than this are left as they are."""


class Encoder(Protocol):
    """A decoder without its head (engine.models.blocks.DecoderModel)."""

    config: ModelConfig
    weight_bytes: int
    packed: bool

    def hidden(self, batch: ForwardBatch, kv: KVTensors, *, every: bool) -> Tensor:
        """Normalised states [R, H] of logit_rows; every: of all tokens."""
        ...


class Embedder:
    """A loaded embedding model."""

    def __init__(self, encoder: Encoder, how: Embedding) -> None:
        self.encoder = encoder
        self.how = how
        # A prompt takes the whole context: there is no answer that needs a place behind it
        self.config = dataclasses.replace(encoder.config, max_position=encoder.config.max_position + 1)
        self.weight_bytes = encoder.weight_bytes
        self.packed = encoder.packed

    @property
    def skips_cached(self) -> bool:
        """True where a vector does not need the states of all tokens."""
        return self.how.pooling == "last"

    def forward(self, batch: ForwardBatch, kv: KVTensors) -> Tensor:
        """The states float32 [R, H] of logit_rows, or of every token where all of them count."""
        every = not self.skips_cached or batch.logit_rows.shape[0] == batch.num_tokens
        return self.encoder.hidden(batch, kv, every=every).to(torch.float32)

    def finish(self, rows: Tensor) -> Tensor:
        """Pooled states [R, H] → vectors."""
        return rows / rows.norm(dim=-1, keepdim=True).clamp(min=_LEAST) if self.how.normalize else rows


def vector_size(model: object) -> int:
    """Numbers of an embedding model's vectors; 0 for a model that generates."""
    return model.config.hidden_size if isinstance(model, Embedder) else 0


class EmbeddingSteps:
    """Steps of exactly their own size on any device; see `engine.runner.Steps`."""

    overlaps = True
    summary = ""

    def __init__(
        self, model: Embedder, kv: KVTensors, *, max_running: int, step_tokens: int, max_context: int, place: str
    ) -> None:
        """place: torch's name of the device."""
        self._model = model
        self._kv = kv
        self._place = place
        self._tokens: Int32s = np.zeros((max_running, max_context), dtype=np.int32)
        self._pages: Int32s = np.zeros((max_running, -(-max_context // kv.page_size)), dtype=np.int32)
        self._layout = StepLayout(max_running, step_tokens, 2 * max_running + -(-step_tokens // kv.page_size))
        self._sums = torch.zeros(0 if model.skips_cached else max_running, model.config.hidden_size, device=place)

    @property
    def largest(self) -> StepLayout:
        """The only layout."""
        return self._layout

    @property
    def max_edits(self) -> int | None:
        """Any number: nothing is sampled."""
        return None

    def state(self, request: Request) -> object:
        """Nothing."""
        return None

    def bucket(self, tokens: int, seqs: int, logits: int) -> StepLayout:
        """The only layout."""
        return self._layout

    def __call__(self, flight: Flight) -> Result:
        """Run the step; returns the vectors [R, H] of the prompts that are complete."""
        packed = flight.packed
        for extra in packed.before:
            apply_pages(extra.array, packed.layout, self._pages)
        step = host_step(packed.buffer.array, packed.layout, self._tokens, self._pages, self._kv.page_size)
        states = self._model.forward(ForwardBatch.of_step(step, self._place), self._kv)
        if not self._model.skips_cached:
            rows = packed.layout.seqs_of(packed.buffer.array)[0, : packed.buffer.array[SEQS]]
            states = self._pooled(states, step, rows, [row for row, _ in flight.admitted])
        return (self._model.finish(states),)

    def tokens(self, flight: Flight, result: Result) -> Sampled:
        """The vectors; tokens stand for them that nobody reads."""
        vectors = result[0].numpy().astype("<f4")
        finite = np.isfinite(vectors).all(axis=1)
        return Sampled([0] * len(vectors), vectors=[row.tobytes() if ok else b"" for row, ok in zip(vectors, finite)])

    def _pooled(self, states: Tensor, step: HostStep, rows: Int32s, admitted: list[int]) -> Tensor:
        """States of all tokens [T, H] → what counts of each complete prompt [R, H], what earlier chunks left
        included."""
        self._sums[admitted] = 0.0
        owner = self._at(rows.repeat(step.q_starts[1:] - step.q_starts[:-1]).astype(np.int64))
        if self._model.how.pooling == "cls":
            first = self._at(np.flatnonzero(step.positions == 0))
            self._sums[owner[first]] = states[first]
        else:
            self._sums.index_add_(0, owner, states)
        pooled = self._sums[self._at(step.sample_rows.astype(np.int64))]
        if self._model.how.pooling == "cls":
            return pooled
        return pooled / self._at(step.sample_positions.astype(np.float32))[:, None]

    def _at(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._place)
