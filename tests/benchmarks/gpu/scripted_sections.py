"""A section that does what its options say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.supervise import Context


def run(context: Context) -> None:
    """Find something, start a process that outlives this one, then end as told."""
    context.recorder.figure("in process.tpot_1_ms", 4.0)
    fate = context.options["fate"]
    if fate == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
        (Path(context.work) / fate).write_text(str(child.pid))
    if fate == "hangs":
        context.recorder.check("it still holds what it found", True)
        input_end, _output_end = os.pipe()
        os.read(input_end, 1)
    if fate == "crashes":
        os._exit(11)
    if fate == "raises":
        raise RuntimeError("no such weights")
    if fate == "breaks":
        context.recorder.check("two are one", False, "2 ≠ 1")
    if fate == "finds":
        context.recorder.fact("fate", "ends")
