"""One step over the device: packs the work, gives it to the device, reads the new tokens when they are there.

Every running request owns a stable row of the tables that the device keeps. `prepare` decides all that the device will
be told, `launch` gives it to the device, `collect` waits for what came of it; between the last two the host may prepare
and launch the next step, because what that one reads of this one lies on the device. Rows are never padded or reordered
in a way that a row's result could depend on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from engine.device import Device, Pending, Result
from engine.packing import Packed, StepPacker
from engine.request import Draft, Request, Work
from engine.sampler import Sampled, plain
from engine.scheduler import Applied, shape_of
from engine.step_time import StepShape
from kernels.step_layout import StepLayout

PLAIN, SAMPLED, LOGPROBS = range(3)
"""What rows ask: the largest logit, a draw or edited logits, log-probabilities as well. A step does what its most
demanding row asks."""


@dataclass(slots=True)
class Flight:
    """A step from the moment it is prepared until its results are known. A request takes part in the epoch that it had
    then; results for another epoch are void."""

    work: Sequence[Work]
    epochs: list[int]
    sampling_epochs: list[int]
    """of those that get a token"""
    packed: Packed
    shape: StepShape
    admitted: list[tuple[int, object | None]]
    """rows that got a new owner, with what choosing its tokens needs; None for a plain one"""
    adapters: list[tuple[int, int]]
    """rows that got a new owner, with the slot of its adapter, −1 for none"""
    kind: int
    """what choosing the tokens takes: PLAIN, SAMPLED or LOGPROBS"""
    drafts: Sequence[Draft] = ()
    """guesses that are computed as well: their choices follow those of the others, in this order"""
    sampled: Sampled | None = None
    """what the host's sampler chose"""
    pending: Pending | None = None
    started: float = 0.0
    """by the engine's clock"""

    @property
    def sampling(self) -> list[Request]:
        """Requests that get a token."""
        if self.drafts:
            return self.packed.sampling[: len(self.sampling_epochs)]
        return self.packed.sampling


class Steps(Protocol):
    """A model with the tables of its rows: what runs on the device."""

    def bucket(self, tokens: int, seqs: int, logits: int) -> StepLayout:
        """The layout in which a step of so many tokens, sequences and rows of logits is packed."""
        ...

    def state(self, request: Request) -> object:
        """What choosing this request's tokens needs, as the request is now."""
        ...

    @property
    def overlaps(self) -> bool:
        """True when the host need not wait for a step to launch the next one."""
        ...

    @property
    def summary(self) -> str:
        """What was recorded at the start, in words; empty for nothing."""
        ...

    @property
    def max_edits(self) -> int | None:
        """Most entries of logit_bias and stop tokens of one request together; None: any number."""
        ...

    @property
    def largest(self) -> StepLayout:
        """The layout with the largest buffer."""
        ...

    def __call__(self, flight: Flight) -> Result:
        """Run a step: read its buffers, write its keys and values, choose its tokens and write them into the token
        table. Returns the tensors that `tokens` reads, on the device."""
        ...

    def tokens(self, flight: Flight, result: Result) -> Sampled:
        """What was chosen, from the results in host memory."""
        ...


@dataclass(slots=True)
class Runner:
    """The steps of one engine."""

    steps: Steps
    device: Device
    rows: int
    page_size: int
    _packer: StepPacker = field(init=False)
    _asks: list[int] = field(init=False)
    _last: Flight | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._packer = StepPacker(
            rows=self.rows,
            page_size=self.page_size,
            bucket=self.steps.bucket,
            largest=self.steps.largest.size,
            staging=self.device.staging,
        )
        self._asks = [PLAIN] * self.rows

    def prepare(self, applied: Applied, drafts: Sequence[Draft] = ()) -> Flight:
        """Pack the step and count its tokens as on their way. At least one request takes part."""
        admitted: list[tuple[int, object | None]] = []
        adapters: list[tuple[int, int]] = []
        for request in applied.admitted:
            self._packer.admit(request.row)
            asks = PLAIN if plain(request) else SAMPLED if request.params.logprobs is None else LOGPROBS
            self._asks[request.row] = asks
            adapters.append((request.row, -1 if request.adapter is None else request.adapter.slot))
            admitted.append((request.row, None if asks == PLAIN else self.steps.state(request)))
        work = applied.work
        packed = self._packer.pack(work, drafts)
        guesses = sum(len(draft.tokens) for draft in drafts) if drafts else 0
        sampling = packed.sampling[:-guesses] if guesses else packed.sampling
        last = self._last
        if packed.same and last is not None:
            epochs, sampling_epochs, kind = last.epochs, last.sampling_epochs, last.kind
        else:
            epochs = [request.epoch for request, _ in work]
            sampling_epochs = [request.epoch for request in sampling]
            kind = max([self._asks[request.row] for request in sampling], default=PLAIN)
        if packed.tokens == packed.seqs:
            shape = StepShape(packed.seqs, packed.seqs, int(packed.lens.sum()), 0)
        else:
            shape = shape_of(work)
            if guesses:
                requests, tokens, context, pairs = shape
                context += int(packed.lens[len(work) :].sum())
                shape = StepShape(requests + guesses, tokens + guesses, context, pairs)
        # For hundreds in a step: as dispatch() does, and expect() of those that get a token
        for request, _ in work:
            request.computed = request.scheduled
        for request in sampling:
            request.tokens.append(0)
            request.ahead += 1
        flight = self._last = Flight(work, epochs, sampling_epochs, packed, shape, admitted, adapters, kind, drafts)
        return flight

    def accept(self, row: int, tokens: int) -> None:
        """So many guesses of a row stood."""
        self._packer.accept(row, tokens)

    def launch(self, flight: Flight) -> None:
        """Give the step to the device. Raises what the model raises, here or in `collect`."""

        def work() -> Result:
            with torch.inference_mode():
                return self.steps(flight)

        flight.pending = self.device.run(work)

    def collect(self, flight: Flight) -> Sampled:
        """Wait for the step; returns the tokens of flight.sampling. Raises what the model raised."""
        assert flight.pending is not None
        return self.steps.tokens(flight, flight.pending.wait())
