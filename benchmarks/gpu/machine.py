"""The device and what it reaches at best: its copy bandwidth and its rate of matrix products."""

from __future__ import annotations

import importlib.metadata
import sys

import torch

from benchmarks.gpu.supervise import Context
from benchmarks.gpu.timing import timer

PACKAGES = ("torch", "triton", "transformers", "safetensors", "flash_attn")


def run(context: Context) -> None:
    """Find out what this machine is; everything else is measured against it."""
    recorder = context.recorder
    found = {name: _version(name) for name in PACKAGES}
    recorder.fact("versions", {"python": sys.version.split()[0], **found})
    if context.device == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError("no CUDA device is here; --tiny runs on a CPU")
        facts = torch.cuda.get_device_properties(0)
        recorder.fact("gpu", facts.name)
        recorder.fact("capability", f"{facts.major}.{facts.minor}")
        recorder.fact("multiprocessors", facts.multi_processor_count)
        recorder.fact("gpu_memory_gb", round(facts.total_memory / 1e9, 1))
        recorder.fact("cuda", torch.version.cuda)
    side, cells = (1024, 32 << 20) if context.tiny else (8192, 2 << 30)
    dtype = torch.float32 if context.device == "cpu" else torch.bfloat16
    clock = timer(context.device)
    source = torch.ones(cells, dtype=torch.int8, device=context.device)
    target = torch.empty_like(source)
    copying = clock.seconds(lambda: target.copy_(source))
    recorder.fact("copy_gb_s", round(2 * cells / copying / 1e9, 1))
    left, right = (torch.randn(side, side, device=context.device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    multiplying = clock.seconds(lambda: torch.mm(left, right, out=product))
    recorder.fact("matrix_tflops", round(2 * side**3 / multiplying / 1e12, 3))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
