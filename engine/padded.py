"""Steps padded to buckets, in memory that stays where it is: what CUDA graphs record, run eagerly elsewhere.

A step is two recorded pieces. The body, for a number of tokens: inputs gathered from the packed buffer and the tables,
all layers, the normalised rows of last tokens. The head, for a number of such rows: LM head and the choice of tokens,
plain or sampled; batches that ask for log-probabilities run it unrecorded. Two families keep the number of graphs at
the sum of their sizes and not at the product.

Padding has token ids of −1, slots of −1 and no queries, so that it writes nothing anywhere.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.batch import ForwardBatch, KVTensors
from engine.buckets import Bucket, Buckets
from engine.choice import Choice, Chosen
from engine.device import Result
from engine.graphs import Graphs
from engine.long_prefill import Lengths, LongPrefills
from engine.lora import adapters_of
from engine.request import Request
from engine.runner import LOGPROBS, PLAIN, SAMPLED, Flight
from engine.sampler import Sampled
from kernels.interface import StepInputsOp
from kernels.step_layout import StepInputs, StepLayout


@runtime_checkable
class SplitModel(Protocol):
    """A model whose layers and head can run apart."""

    def hidden(self, batch: ForwardBatch, kv: KVTensors, *, every: bool) -> Tensor:
        """Write the step's keys and values; return the hidden rows [R, H] of batch.logit_rows, where −1 is any row.
        every: rows are the tokens, one by one."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [R, vocab] of hidden rows."""
        ...


class PaddedSteps:
    """The steps of a model in buckets; see `engine.runner.Steps`."""

    def __init__(
        self,
        model: SplitModel,
        kv: KVTensors,
        choice: Choice,
        graphs: Graphs,
        step_inputs: StepInputsOp,
        *,
        max_running: int,
        step_tokens: int,
        max_context: int,
        place: str,
        max_seqs: int = 0,
    ) -> None:
        """place: torch's device of everything. max_seqs: most sequences of a step, if they are more than the rows."""
        self._model = model
        self.kv = kv
        self._choice = choice
        self._graphs = graphs
        self._gather = step_inputs
        self._page_size = kv.page_size
        seqs = max(max_seqs, max_running)
        self.buckets = Buckets(max_running=seqs, step_tokens=step_tokens, page_size=kv.page_size)
        pages = -(-max_context // kv.page_size)
        self._tokens = torch.zeros(max_running, max_context, dtype=torch.int32, device=place)
        self._pages = torch.zeros(max_running, pages, dtype=torch.int32, device=place)
        self._buffer = torch.zeros(self.largest.size, dtype=torch.int32, device=place)
        self._inputs = StepInputs.allocate(self.largest, pages, place)
        self._out = torch.zeros(seqs, dtype=torch.int32, device=place)
        adapters = adapters_of(model)
        self._adapters: Tensor | None = None
        """int32 [rows]: slots of the rows' adapters, where the model has any"""
        if adapters is not None:
            adapters.pad()
            self._adapters = torch.full((max_running,), -1, dtype=torch.int32, device=place)
        self._long: LongPrefills | None = None
        with torch.inference_mode():
            self._hidden = self._probe(seqs)
            self._capture()

    @property
    def largest(self) -> StepLayout:
        """The largest bucket's."""
        return self.buckets.largest

    @property
    def overlaps(self) -> bool:
        """Only the host's sampler makes it wait."""
        return self._choice.recordable

    @property
    def summary(self) -> str:
        """What recording took, and who does the attention of long prompts."""
        return self._graphs.summary if self._long is None else f"{self._graphs.summary}; {self._long.summary}"

    @property
    def activations(self) -> torch.dtype:
        """Type of the model's activations."""
        return self._hidden.dtype

    def take_long(self, long: LongPrefills | None) -> None:
        """From now on steps with long prompts go by a library where that pays; None: no step does."""
        self._long = long

    def launch(self) -> None:
        """Run the smallest step of prompts unrecorded, as a step of nothing: for measuring what launching takes."""
        self._buffer.zero_()
        with torch.inference_mode():
            self._run_layers(self.buckets.mixed[0])

    @property
    def max_edits(self) -> int | None:
        """See `engine.choice.Choice`."""
        return self._choice.max_edits

    def bucket(self, tokens: int, seqs: int, logits: int) -> StepLayout:
        """The smallest that holds the step."""
        return self.buckets.choose(tokens, seqs, logits)

    def state(self, request: Request) -> object:
        """What the choice of its tokens needs."""
        return self._choice.state(request)

    def __call__(self, flight: Flight) -> Result:
        """Run the step."""
        packed = flight.packed
        layout = packed.layout
        for row, state in flight.admitted:
            self._choice.install(row, state)
        if self._adapters is not None:
            for row, slot in flight.adapters:
                self._adapters[row] = slot
        for extra in packed.before:
            self._upload(extra.tensor, layout)
            self._gather(self._view(layout), layout, self._tokens, self._pages, self._page_size, self._into(layout))
        self._upload(packed.buffer.tensor, layout)
        lengths = None if self._long is None else self._long.lengths(flight)
        if lengths is None:
            self._graphs.replay(layout)
        else:  # a library's launch depends on the lengths, so that no recorded step can do it
            self._hidden[: layout.max_seqs].copy_(self._run_layers(Bucket(layout, False), lengths))
        if not packed.sampling:
            return ()
        rows = self.buckets.rows_for(len(packed.sampling))
        if self._choice.recordable and flight.kind != LOGPROBS:
            self._graphs.replay((rows, flight.kind))
            return (self._out[:rows],)
        return self._choose(rows, flight.kind)

    def tokens(self, flight: Flight, result: Result) -> Sampled:
        """What was chosen."""
        if not flight.packed.sampling:
            return Sampled([])
        sampling = flight.packed.sampling
        if flight.kind != LOGPROBS:
            return self._choice.read(result, [None] * len(sampling))
        return self._choice.read(result, [request.params.logprobs for request in sampling])

    def _upload(self, buffer: Tensor, layout: StepLayout) -> None:
        self._view(layout).copy_(buffer[: layout.size], non_blocking=True)

    def _view(self, layout: StepLayout) -> Tensor:
        return self._buffer[: layout.size]

    def _into(self, layout: StepLayout) -> StepInputs:
        """The front of the static inputs, as a bucket's."""
        whole, tokens, seqs = self._inputs, layout.max_tokens, layout.max_seqs
        return StepInputs(
            whole.token_ids[:tokens], whole.positions[:tokens], whole.slots[:tokens], whole.q_starts[: seqs + 1],
            whole.kv_lens[:seqs], whole.page_table[:seqs], whole.logit_rows[:seqs], whole.sample_rows[:seqs],
            whole.sample_positions[:seqs],
        )  # fmt: skip

    def _run_layers(self, bucket: Bucket, lengths: Lengths | None = None) -> Tensor:
        layout = bucket.layout
        into = self._into(layout)
        self._gather(self._view(layout), layout, self._tokens, self._pages, self._page_size, into)
        batch = ForwardBatch(
            token_ids=into.token_ids,
            positions=into.positions,
            slots=into.slots,
            q_starts=into.q_starts,
            kv_lens=into.kv_lens,
            page_table=into.page_table,
            logit_rows=into.logit_rows.to(torch.int64),
            adapters=None if self._adapters is None else self._slots(self._adapters, layout, into),
            decode=bucket.decode,
        )
        if lengths is not None and self._long is not None:
            batch.long = self._long.plan(lengths, into.page_table)
        return self._model.hidden(batch, self.kv, every=bucket.decode)

    def _slots(self, of_row: Tensor, layout: StepLayout, into: StepInputs) -> Tensor:
        """The slot of each token, −1 for padding: its sequence's, found by where it begins."""
        at = torch.arange(layout.max_tokens, dtype=torch.int32, device=of_row.device)
        seqs = torch.searchsorted(into.q_starts[1:], at, right=True).clamp_(max=layout.max_seqs - 1)
        rows = layout.seqs_of(self._view(layout))[0][seqs].to(torch.int64)
        padding = into.token_ids < 0
        # Behind its sequences the buffer holds whatever earlier steps left there, which is no row
        return torch.where(padding, -1, of_row[torch.where(padding, 0, rows)])

    def _choose(self, rows: int, kind: int) -> Chosen:
        whole = self._inputs
        logits = self._model.logits(self._hidden[:rows])
        return self._choice.choose(logits, whole.sample_rows[:rows], whole.sample_positions[:rows], self._tokens, kind)

    def _probe(self, rows: int) -> Tensor:
        """Memory for hidden rows, of the shape and type that the model's have: found by a step of nothing."""
        like = self._run_layers(self.buckets.decodes[0])
        return torch.zeros(rows, like.shape[1], dtype=like.dtype, device=like.device)

    def _capture(self) -> None:
        """Record every bucket, the largest first, as steps of nothing; run what is not recorded once."""
        self._buffer.zero_()
        for bucket in self.buckets.largest_first:
            self._graphs.capture(bucket.layout, self._body(bucket))
        kinds = (PLAIN, SAMPLED) if self._choice.recordable else ()
        for rows in reversed(self.buckets.rows):
            for kind in kinds:
                self._graphs.capture((rows, kind), self._head(rows, kind))
            self._choose(rows, LOGPROBS)

    def _body(self, bucket: Bucket) -> _Work:
        def work() -> None:
            self._hidden[: bucket.layout.max_seqs].copy_(self._run_layers(bucket))

        return work

    def _head(self, rows: int, kind: int) -> _Work:
        def work() -> None:
            self._out[:rows].copy_(self._choose(rows, kind)[0])

        return work


class _Work(Protocol):
    def __call__(self) -> None: ...
