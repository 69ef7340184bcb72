"""The CUDA device and its graphs on a fake of torch.cuda that only keeps a log: the calls exist, their order is right.
What a GPU does with them is not tested here."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from engine import cuda, graphs
from engine.batch import KVTensors
from engine.config import EngineConfig
from engine.device import Device
from engine.distributed import Team, TeamDevice
from engine.monitor import MONITOR
from engine.steps import make_steps
from kernels.reference import ReferenceOps


class FakeStream:
    def __init__(self, fake: FakeCuda) -> None:
        self.fake = fake
        self.name = f"stream {fake.streams}"
        fake.streams += 1

    def wait_event(self, event: FakeEvent) -> None:
        self.fake.log.append(f"{self.name} waits for {event.name}")

    def synchronize(self) -> None:
        self.fake.log.append(f"host waits for {self.name}")


class FakeEvent:
    def __init__(self, fake: FakeCuda) -> None:
        self.fake = fake
        self.name = f"event {fake.events}"
        self.fault: Exception | None = None
        fake.events += 1

    def record(self, stream: FakeStream | None = None) -> None:
        self.fake.log.append(f"{self.name} on {self.fake.current[-1] if stream is None else stream.name}")

    def elapsed_time(self, end: FakeEvent) -> float:
        """Milliseconds, one for each piece of work between."""
        log = self.fake.log
        began, ended = (
            next(at for at, what in enumerate(log) if what.startswith(f"{one.name} on")) for one in (self, end)
        )
        return float(ended - began - 1)

    def query(self) -> bool:
        if self.fault is not None:
            raise self.fault
        return True

    def synchronize(self) -> None:
        self.query()


class FakeGraph:
    def __init__(self, fake: FakeCuda) -> None:
        self.fake = fake

    def replay(self) -> None:
        self.fake.log.append("replay")


class FakeCuda:
    """The names of torch.cuda that engine.cuda and engine.graphs use."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.streams = self.events = 0
        self.current: list[str] = ["default"]

    def Stream(self) -> FakeStream:  # noqa: N802 - torch's name
        return FakeStream(self)

    def Event(self, enable_timing: bool = False) -> FakeEvent:  # noqa: N802 - torch's name
        return FakeEvent(self)

    def CUDAGraph(self) -> FakeGraph:  # noqa: N802 - torch's name
        return FakeGraph(self)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.current.append(stream.name)
        yield
        self.current.pop()

    @contextmanager
    def graph(self, graph: FakeGraph, *, pool: str, stream: FakeStream) -> Iterator[None]:
        self.log.append(f"capture on {stream.name} into {pool}")
        with self.stream(stream):
            yield
        self.log.append("captured")

    def graph_pool_handle(self) -> str:
        return "the pool"

    def memory_reserved(self) -> int:
        return 0

    def synchronize(self) -> None:
        self.log.append("host waits for all")


class OnDevice(Tensor):
    """A tensor that can be told of a stream, as one on a GPU can."""

    log: list[str]

    def record_stream(self, stream: Any) -> None:
        self.log.append(f"result kept for {stream.name}")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in (name for name in dir(FakeCuda) if not name.startswith("_")):
        assert hasattr(torch.cuda, name), f"torch.cuda has no {name}"
    monkeypatch.setattr(cuda, "_cuda", fake)
    monkeypatch.setattr(graphs, "_cuda", fake)
    monkeypatch.setattr(cuda, "_pinned", lambda size, dtype: torch.zeros(size, dtype=dtype))
    return fake


def on_device(fake: FakeCuda, values: list[int]) -> Tensor:
    tensor = torch.tensor(values, dtype=torch.int32).as_subclass(OnDevice)
    tensor.log = fake.log
    return tensor


def test_results_are_copied_on_a_second_stream_and_the_next_step_waits_for_the_copy(fake: FakeCuda) -> None:
    device = cuda.CudaDevice()

    def work() -> tuple[Tensor, ...]:
        fake.log.append(f"work on {fake.current[-1]}")
        return (on_device(fake, [4, 5]),)

    pending = device.run(work)
    assert fake.log == [
        "work on stream 0", "event 0 on stream 0", "stream 1 waits for event 0", "result kept for stream 1",
        "event 1 on stream 1", "stream 0 waits for event 1",
    ]  # fmt: skip
    assert pending.ready() and pending.wait()[0].tolist() == [4, 5]
    fake.log.clear()
    assert device.run(lambda: ()).wait() == ()
    assert fake.log == ["event 2 on stream 0"]


def test_results_of_three_steps_stay_and_no_size_takes_new_memory(fake: FakeCuda) -> None:
    device = cuda.CudaDevice()
    held = [device.run(lambda i=i: (on_device(fake, [i] * (i + 1)),)) for i in range(4)]  # type: ignore[misc]
    assert [pending.wait()[0].tolist() for pending in held] == [[0], [1, 1], [2, 2, 2], [3, 3, 3, 3]]
    memory = {pending.wait()[0].data_ptr() for pending in held}
    again = [device.run(lambda: (on_device(fake, [7] * 200),)) for _ in range(8)]
    assert {pending.wait()[0].data_ptr() for pending in again} == memory


def test_work_is_timed_warm_on_the_device_and_on_the_host(fake: FakeCuda) -> None:
    def work() -> None:
        fake.log.append("work")

    assert cuda.device_seconds(work, times=4) == pytest.approx(0.001)
    assert fake.log == ["work", "event 0 on default", *["work"] * 4, "event 1 on default"]
    fake.log.clear()
    assert cuda.launch_seconds(work) < 1
    assert fake.log == ["work", "host waits for all", "work", "host waits for all"]


def test_a_fault_is_told_by_who_waits_and_the_device_is_lost(fake: FakeCuda) -> None:
    device = cuda.CudaDevice()
    pending: Any = device.run(lambda: ())
    fault = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    pending._event.fault = fault
    assert pending.ready()
    with pytest.raises(torch.AcceleratorError):
        pending.wait()
    assert device.lost(fault)
    assert device.lost(RuntimeError("Triton Error [CUDA]: unspecified launch failure"))
    assert not device.lost(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert not device.lost(ValueError("another shape"))


def test_a_graph_runs_once_and_is_then_captured_on_the_stream_of_the_steps(fake: FakeCuda) -> None:
    device = cuda.CudaDevice()
    table = graphs.CudaGraphs(device.stream)
    MONITOR.disarm()
    with device.building():
        assert not gc.isenabled()
        table.capture("a", lambda: fake.log.append(f"work on {fake.current[-1]}"))
    assert gc.isenabled()
    assert fake.log == [
        "host waits for all", "work on stream 0", "host waits for stream 0", "capture on stream 0 into the pool",
        "work on stream 0", "captured", "host waits for all",
    ]  # fmt: skip
    table.replay("a")
    assert fake.log[-1] == "replay" and table.summary.startswith("1 graphs")


@pytest.mark.parametrize("ranks", [1, 2])
def test_kernels_that_look_at_numbers_on_the_host_are_not_recorded(fake: FakeCuda, ranks: int) -> None:
    class Split:
        def hidden(self, *args: Any, **kwargs: Any) -> None: ...

        def logits(self, hidden: Tensor) -> None: ...

    model: Any = Split()
    config = EngineConfig(graphs="on")
    device: Device = cuda.CudaDevice()
    if ranks > 1:
        device = TeamDevice(device, cast(Team, None))
    with pytest.raises(ValueError, match="need the triton kernels"):
        make_steps(
            config, model, ReferenceOps(), KVTensors([], [], 16), device, vocab_size=8, max_running=1, max_context=16,
        )  # fmt: skip
