"""Makes the checkpoints that the other sections serve."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.gpu.checkpoint import LLAMA_8B, SMALL, TINY, make
from benchmarks.gpu.supervise import Context


def run(context: Context) -> None:
    """Write the large and the small checkpoint; their folders are facts."""
    shape, small = (TINY, TINY) if context.tiny else (LLAMA_8B, SMALL)
    folder = Path(context.options["weights"])
    began = time.monotonic()
    make(folder / "model", shape, device=context.device, alike=True)
    took = time.monotonic() - began
    context.recorder.fact("model", str(folder / "model"))
    context.recorder.figure("making.checkpoint_s", took)
    context.recorder.figure("making.checkpoint_gb", shape.parameters * shape.item_bytes / 1e9)
    make(folder / "small", small, device=context.device, seed=1)
    context.recorder.fact("small", str(folder / "small"))
