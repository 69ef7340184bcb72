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
from engine.request import Request
from engine.sampler import RowState, Sampled, plain
from engine.scheduler import Applied, Work
from engine.step_time import StepShape
from kernels.step_layout import StepLayout


@dataclass(slots=True)
class Flight:
    """A step from the moment it is prepared until its results are known. A request takes part in the epoch that it had
    then; results for another epoch are void."""

    work: Sequence[Work]
    epochs: list[int]
    sampling_epochs: list[int]
    """of those that get a token"""
    ends: list[int]
    """how many tokens of each are computed afterwards"""
    packed: Packed
    admitted: list[tuple[int, RowState | None]]
    """rows that got a new owner, with its sampling"""
    plain: bool
    """every row takes its largest logit"""
    sampled: Sampled | None = None
    """what the host's sampler chose"""
    pending: Pending | None = None
    started: float = 0.0
    """by the engine's clock"""
    shape: StepShape = StepShape(0, 0, 0, 0)  # noqa: RUF009 - a tuple cannot change

    @property
    def sampling(self) -> list[Request]:
        """Requests that get a token."""
        return self.packed.sampling


class Steps(Protocol):
    """A model with the tables of its rows: what runs on the device."""

    def bucket(self, tokens: int, seqs: int) -> StepLayout:
        """The layout in which a step of so many tokens and sequences is packed."""
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
    _plain: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self._packer = StepPacker(
            rows=self.rows,
            page_size=self.page_size,
            bucket=self.steps.bucket,
            largest=self.steps.largest.size,
            staging=self.device.staging,
        )
        self._plain = [True] * self.rows

    def prepare(self, applied: Applied) -> Flight:
        """Pack the step and count its tokens as on their way. At least one request takes part."""
        admitted: list[tuple[int, RowState | None]] = []
        for request in applied.admitted:
            self._packer.admit(request.row)
            is_plain = self._plain[request.row] = plain(request)
            admitted.append((request.row, None if is_plain else RowState(request)))
        work = applied.work
        packed = self._packer.pack(work)
        flags = self._plain
        flight = Flight(
            work=work,
            epochs=[request.epoch for request, _ in work],
            sampling_epochs=[request.epoch for request in packed.sampling],
            ends=[request.scheduled for request, _ in work],
            packed=packed,
            admitted=admitted,
            plain=all(flags[request.row] for request in packed.sampling),
        )
        for request, _ in work:
            request.dispatch()
        for request in packed.sampling:
            request.expect()
        return flight

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
