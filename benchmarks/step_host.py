"""Host time of one engine step without its model: decide, pack, launch, collect.

    python -m benchmarks.step_host [--quiet SECONDS]

Two ways. "device": steps overlap as on a GPU, on a device that only counts: what is sent to it is dropped, and a canned
token comes back for every row, so that a step's time is the host's own. "CPU": a model that returns canned logits at
once, so that inputs are gathered and tokens chosen on the host, too; with a tiny vocabulary, and with the default
model's. CPU time is what a step costs; wall time is the same when the machine does nothing else. Exits with 1 when the
host's own time is over 1.5 times its bound (0.25 ms at 1 running, 0.5 at 64, 1.5 at 256).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.rig import results
from benchmarks.rig.machine import wait_until_quiet
from engine.batch import ForwardBatch, KVTensors
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.device import Done, Pending, Result, Work
from engine.exact import ExactSteps
from engine.runner import Flight
from engine.sampler import Sampled
from engine.sampling_params import SamplingParams
from engine.wire import Submit, pack_tokens

BOUNDS_MS = {1: 0.25, 64: 0.5, 256: 1.5}
MARGIN = 1.5
"""Times the bound at which the benchmark fails"""
TINY, REAL = 64, 49_152
"""Vocabularies"""
PROMPT = 64
SAMPLERS: dict[str, dict[str, float | int]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "top_p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "logprobs 5": {"temperature": 0.0, "logprobs": 5},
}


@dataclass(frozen=True)
class ScriptedShape:
    """Just enough of a model's dimensions."""

    vocab_size: int
    num_layers: int = 1
    num_kv_heads: int = 1
    shared_kv: bool = False
    head_dim: int = 2
    max_position: int = 8192
    eos_token_ids: tuple[int, ...] = ()
    torch_dtype: str = "float32"


class ScriptedModel:
    """Returns the first rows of a canned matrix."""

    packed = False

    def __init__(self, vocab_size: int, rows: int) -> None:
        self.config = ScriptedShape(vocab_size)
        # As spread as a language model's logits are
        self._logits = 2.5 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0))

    def forward(self, batch: ForwardBatch, kv: KVTensors) -> torch.Tensor:
        return self._logits[: batch.logit_rows.shape[0]]


class CountingDevice:
    """Computes nothing and is always done: whatever it is given comes back as the token 1 for every row."""

    name = "cpu"
    asynchronous = True

    def __init__(self, rows: int) -> None:
        self._result = (torch.ones(rows, dtype=torch.int32),)

    def staging(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def run(self, work: Work) -> Pending:
        return Done(self._result)

    def lost(self, error: Exception) -> bool:
        return False


class CountingSteps(ExactSteps):
    """Reads results as those of a GPU are read."""

    def tokens(self, flight: Flight, result: Result) -> Sampled:
        return Sampled(result[0][: len(flight.sampling)].tolist())


def engine(running: int, vocab_size: int, on_device: bool) -> EngineCore:
    """An engine whose model costs nothing."""
    config = EngineConfig(max_running=running, step_tokens=running * PROMPT, kv_memory_mib=64, max_context=8192)
    if not on_device:
        return EngineCore(config, ScriptedModel(vocab_size, running))
    core = EngineCore(config, ScriptedModel(vocab_size, running), device=CountingDevice(running))
    assert isinstance(core.steps, ExactSteps)
    core.steps.__class__ = CountingSteps
    return core


def measure(
    running: int, vocab_size: int, steps: int, sampler: str, *, on_device: bool
) -> tuple[list[float], list[float]]:
    """CPU and wall milliseconds of each of `steps` decode steps with `running` requests."""
    core = engine(running, vocab_size, on_device)
    params = SamplingParams(max_tokens=8000, ignore_eos=True, seed=1, **SAMPLERS[sampler])  # type: ignore[arg-type]
    for i in range(running):
        prompt = pack_tokens((i + j) % vocab_size for j in range(PROMPT))
        refused = core.submit(Submit(request_id=f"request-{i}", prompt=prompt, params=params))
        if refused is not None:
            raise RuntimeError(refused.message)
    for _ in range(20):
        core.step()
    cpu, wall = [], []
    for _ in range(steps):
        cpu_start, start = time.thread_time(), time.perf_counter()
        progress = core.step()
        cpu.append((time.thread_time() - cpu_start) * 1e3)
        wall.append((time.perf_counter() - start) * 1e3)
        if len(progress) != running:
            raise RuntimeError(f"{len(progress)} of {running} requests got a token")
    return cpu, wall


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.step_host", description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--quiet", type=float, default=0, help="wait at most this many seconds for a quiet machine")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows: list[results.Row] = []
    cases = [(n, TINY, "greedy", on_device) for on_device in (True, False) for n in BOUNDS_MS]
    cases += [(n, REAL, sampler, False) for sampler in SAMPLERS for n in (1, 16, 64)]
    failed = False
    for running, vocab_size, sampler, on_device in cases:
        wait_until_quiet(options.quiet)
        steps = options.steps if vocab_size == TINY else max(20, options.steps // 10)
        cpu, wall = measure(running, vocab_size, steps, sampler, on_device=on_device)
        bound = BOUNDS_MS[running] if vocab_size == TINY else None
        median = results.percentile(cpu, 0.5)
        failed = failed or (bound is not None and median > MARGIN * bound)
        rows.append(
            {
                "running": running,
                "steps on": "device" if on_device else "CPU",
                "vocabulary": vocab_size,
                "sampling": sampler,
                "CPU ms, median": median,
                "wall ms, median": results.percentile(wall, 0.5),
                "wall ms, p99": results.percentile(wall, 0.99),
                "bound ms": bound,
                "holds": "-" if bound is None else "yes" if median <= bound else "NO",
            }
        )
    results.report("step_host", rows, {"steps": options.steps, "summary": rows})
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
