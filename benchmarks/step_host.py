"""Host time of one engine step without its model: schedule, pack, sample, collect, on a scripted device.

    python -m benchmarks.step_host [--quiet SECONDS]

The scripted model returns canned logits at once, so a step's time is the engine's own. Two vocabularies: a tiny one
leaves the bookkeeping alone; the default model's adds the choice of tokens from its logits. CPU time is what a step
costs; wall time is the same when the machine does nothing else. Exits with 1 when the bookkeeping is over its bound
(0.25 ms at 1 running, 0.5 at 64, 1.5 at 256).
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
from engine.sampling_params import SamplingParams
from engine.wire import Submit, pack_tokens

BOUNDS_MS = {1: 0.25, 64: 0.5, 256: 1.5}
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


def measure(running: int, vocab_size: int, steps: int, sampler: str) -> tuple[list[float], list[float]]:
    """CPU and wall milliseconds of each of `steps` decode steps with `running` requests."""
    config = EngineConfig(max_running=running, step_tokens=running * PROMPT, kv_memory_mib=64, max_context=8192)
    core = EngineCore(config, ScriptedModel(vocab_size, running))
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
    cases = [(n, TINY, "greedy") for n in BOUNDS_MS]
    cases += [(n, REAL, sampler) for sampler in SAMPLERS for n in (1, 16, 64)]
    for running, vocab_size, sampler in cases:
        wait_until_quiet(options.quiet)
        steps = options.steps if vocab_size == TINY else max(20, options.steps // 10)
        cpu, wall = measure(running, vocab_size, steps, sampler)
        bound = BOUNDS_MS[running] if vocab_size == TINY else None
        rows.append(
            {
                "running": running,
                "vocabulary": vocab_size,
                "sampling": sampler,
                "CPU ms, median": results.percentile(cpu, 0.5),
                "wall ms, median": results.percentile(wall, 0.5),
                "wall ms, p99": results.percentile(wall, 0.99),
                "bound ms": bound,
                "holds": "-" if bound is None else "yes" if results.percentile(cpu, 0.5) <= bound else "NO",
            }
        )
    results.report("step_host", rows, {"steps": options.steps, "summary": rows})
    return int(any(row["holds"] == "NO" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
