"""Host time of one engine step without its model: schedule, pack, sample, collect, on a scripted device.

    python -m benchmarks.step_host [--out FILE]

The scripted model returns canned logits at once, so a step's time is the engine's own. Two vocabularies: a tiny one
leaves the bookkeeping alone; the default model's adds the argmax over its logits, which is a sweep of memory. Prints a
table and, with --out, writes JSON. Exits with 1 when a bound is exceeded (bookkeeping: 0.25 ms at 1 running, 0.5 at 64,
1.5 at 256).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import torch

from engine.batch import ForwardBatch, KVTensors
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.sampling_params import SamplingParams
from engine.wire import Submit, pack_tokens

BOUNDS_MS = {1: 0.25, 64: 0.5, 256: 1.5}
PROMPT = 64


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
        self._logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0))

    def forward(self, batch: ForwardBatch, kv: KVTensors) -> torch.Tensor:
        return self._logits[: batch.logit_rows.shape[0]]


def measure(running: int, vocab_size: int, steps: int, temperature: float = 0.0) -> dict[str, float]:
    """Milliseconds per decode step with `running` requests."""
    config = EngineConfig(max_running=running, step_tokens=max(running, running * PROMPT), kv_memory_mib=64)
    core = EngineCore(config, ScriptedModel(vocab_size, running))
    params = SamplingParams(max_tokens=8000, temperature=temperature, ignore_eos=True, seed=1)
    for i in range(running):
        prompt = pack_tokens((i + j) % vocab_size for j in range(PROMPT))
        assert core.submit(Submit(request_id=f"request-{i}", prompt=prompt, params=params)) is None
    for _ in range(20):
        core.step()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        progress = core.step()
        times.append((time.perf_counter() - start) * 1e3)
        assert len(progress) == running
    return {"median_ms": median(times), "p99_ms": quantiles(times, n=100)[98]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    failed = False
    print(f"{'running':>8} {'vocabulary':>11} {'sampling':>9} {'median ms':>10} {'p99 ms':>8} {'bound ms':>9}")
    cases = [(n, 64, 0.0) for n in BOUNDS_MS] + [(n, 49152, t) for t in (0.0, 1.0) for n in (1, 16, 64)]
    for running, vocab_size, temperature in cases:
        result = measure(running, vocab_size, options.steps if temperature == 0.0 else 40, temperature)
        bound = BOUNDS_MS.get(running) if vocab_size == 64 else None
        over = bound is not None and result["median_ms"] > bound
        failed = failed or over
        kind = "greedy" if temperature == 0.0 else "sampled"
        print(
            f"{running:>8} {vocab_size:>11} {kind:>9} {result['median_ms']:>10.3f} {result['p99_ms']:>8.3f}"
            f" {bound if bound is not None else '–':>9}{'  OVER' if over else ''}"
        )
        rows.append({"running": running, "vocab_size": vocab_size, "sampling": kind, "bound_ms": bound, **result})
    if options.out is not None:
        machine = {"machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
        options.out.write_text(json.dumps({"provenance": machine, "steps": rows}, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
