"""Where a decode step spends its time: the kernels of a few steps by torch's profiler, in an engine in this process."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.in_process import engine_settings
from benchmarks.gpu.supervise import Context
from benchmarks.gpu.workload import workload
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.sampling_params import SamplingParams
from engine.wire import Submit, pack_tokens

STEPS = 8
MOST = 20
"""Kernels that are named"""


def run(context: Context) -> None:
    """One stream, then many."""
    load = workload(context.tiny)
    settings = engine_settings(context, context.fact("model"))
    core = EngineCore.load(EngineConfig(**settings))
    for streams in (1, next(iter(load.batches.values()))):
        params = SamplingParams(max_tokens=4 * STEPS + 64, temperature=0.0, ignore_eos=True)
        for n in range(streams):
            prompt = pack_tokens(load.prompt(f"profile/{streams}/{n}", load.chat_prompt))
            core.submit(Submit(request_id=f"{streams}-{n}", prompt=prompt, params=params))
        begun: set[str] = set()
        while len(begun) < streams:
            begun |= {progress.request_id for progress in core.step() if progress.tokens}
        _run_steps(core)
        for row in profiled(core, context.device == "cuda"):
            context.recorder.row(f"Kernels of a decode step, {streams} streams", row)
        for n in range(streams):
            core.abort(f"{streams}-{n}")
        while core.has_work():
            core.step()


def _run_steps(core: EngineCore) -> None:
    """Until STEPS more are launched; between two of them the engine may come back with nothing."""
    end = core.metrics.steps + STEPS
    while core.metrics.steps < end:
        core.step()


def profiled(core: EngineCore, cuda: bool) -> list[dict[str, Any]]:
    """The kernels (on a CPU: operations) that steps spend most of their time in, per step."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        _run_steps(core)
        if cuda:
            torch.cuda.synchronize()

    def own_us(event: Any) -> float:
        return float(event.self_device_time_total if cuda else event.self_cpu_time_total)

    events = sorted(profiler.key_averages(), key=own_us, reverse=True)
    total = sum(own_us(event) for event in events)
    return [
        {
            "kernel": event.key[:70],
            "a step": event.count / STEPS,
            "us a step": own_us(event) / STEPS,
            "%": 100 * own_us(event) / max(total, 1e-9),
        }
        for event in events[:MOST]
        if own_us(event) > 0
    ]
