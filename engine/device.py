"""The device port: work is given in order, its results are there later.

One object stands for the device that an engine computes on. What `run` is given happens in the order in which it is
given; on a GPU the host goes on at once, and the results come by a copy on a second stream that the host waits for only
when it wants them. On a CPU the work is done when `run` returns, through the same code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Result = tuple[Tensor, ...]
"""Tensors that the host wants to see"""
Work = Callable[[], Result]


class Pending(Protocol):
    """The results of work that was given to a device."""

    def ready(self) -> bool:
        """True when wait() would return at once."""
        ...

    def wait(self) -> Result:
        """The work's tensors in host memory, when it is done. Raises what the work raised."""
        ...


class Device(Protocol):
    """Where an engine computes. Used by one thread."""

    @property
    def name(self) -> str:
        """Torch's name: "cpu" or "cuda"."""
        ...

    @property
    def asynchronous(self) -> bool:
        """True when `run` returns before the work is done, so that the host has something to overlap."""
        ...

    def staging(self, size: int) -> Tensor:
        """Host memory int32 [size] of zeros that the device copies from by itself."""
        ...

    def run(self, work: Work) -> Pending:
        """Do `work` after everything that was given before. It may raise here or when its results are waited for."""
        ...

    def lost(self, error: Exception) -> bool:
        """True when work that raised this says that the device will do no more work for this process."""
        ...


class DeviceLostError(RuntimeError):
    """The device does no more work for this process."""


class Done:
    """Results that are there."""

    __slots__ = ("_result",)

    def __init__(self, result: Result) -> None:
        self._result = result

    def ready(self) -> bool:
        """Always."""
        return True

    def wait(self) -> Result:
        """The results."""
        return self._result


class CpuDevice:
    """The CPU: work is done at once, in the calling thread."""

    name = "cpu"
    asynchronous = False

    def staging(self, size: int) -> Tensor:
        """Plain memory."""
        return torch.zeros(size, dtype=torch.int32)

    def run(self, work: Work) -> Pending:
        """Do it now; raises what it raises."""
        return Done(work())

    def lost(self, error: Exception) -> bool:
        """Never."""
        return False


def open_device(name: str) -> Device:
    """The device of this name, "cpu" or "cuda"."""
    if name == "cpu":
        return CpuDevice()
    from engine.cuda import CudaDevice

    return CudaDevice()


PATIENCE = 3
"""How often a ScriptedDevice is asked whether work is done before it does it."""


class ScriptedDevice:
    """A device that does its work as late as it may, in order: when somebody waits for a result, or has asked for it
    PATIENCE times.

    For tests: a host that overwrites what has not been copied yet, or reads what is not known yet, is found out.
    """

    name = "cpu"
    asynchronous = True

    def __init__(self) -> None:
        self._queue: deque[_Late] = deque()

    @property
    def queued(self) -> int:
        """Pieces of work that have not been done."""
        return len(self._queue)

    def staging(self, size: int) -> Tensor:
        """Plain memory."""
        return torch.zeros(size, dtype=torch.int32)

    def run(self, work: Work) -> Pending:
        """Queue it."""
        late = _Late(self, work)
        self._queue.append(late)
        return late

    def advance(self) -> None:
        """Do the oldest piece of work."""
        self._queue.popleft().do()

    def lost(self, error: Exception) -> bool:
        """Of errors that say so themselves."""
        return isinstance(error, DeviceLostError)


class _Late:
    """Work on a ScriptedDevice."""

    def __init__(self, device: ScriptedDevice, work: Work) -> None:
        self._device = device
        self._work: Work | None = work
        self._asked = 0
        self._result: Result = ()
        self._error: Exception | None = None

    def do(self) -> None:
        """Do it, keep what comes of it."""
        assert self._work is not None
        work, self._work = self._work, None
        try:
            # Results are copies on a real device: what the next step writes must not reach them
            self._result = tuple(tensor.clone() for tensor in work())
        except Exception as error:  # a supervision boundary, as a stream is: whoever waits gets it
            self._error = error

    def ready(self) -> bool:
        """True when it has been done, by now at the latest when this has been asked often."""
        self._asked += 1
        while self._work is not None and self._asked >= PATIENCE:
            self._device.advance()
        return self._work is None

    def wait(self) -> Result:
        """Let the device come this far."""
        while self._work is not None:
            self._device.advance()
        if self._error is not None:
            raise self._error
        return self._result
