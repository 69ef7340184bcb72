"""Time from `headrace serve` to ready with the model in the cache: the first start, and the second."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rig import results
from benchmarks.rig.headrace import MODEL, House
from benchmarks.rig.machine import LoadMeter, wait_until_quiet
from engine.weights.sources import default_cache_dir, resolve

TARGET_S = 15.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.startup", description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--quiet", type=float, default=0, help="wait at most this many seconds for a quiet machine")
    options = parser.parse_args(argv)
    resolve(options.model, default_cache_dir())
    rows: list[results.Row] = []
    with tempfile.TemporaryDirectory(prefix="headrace-startup-") as folder:
        for repetition in range(1, options.reps + 1):
            house = House(Path(folder) / f"data-{repetition}", options.model)
            for start in ("first", "second"):
                wait_until_quiet(options.quiet)
                meter, begun = LoadMeter(None), time.perf_counter()
                server, _ = house.start(limit_s=300)
                ready = time.perf_counter() - begun
                load = meter.stop()
                begun = time.perf_counter()
                code = server.stop()
                rows.append(
                    {
                        "start": start,
                        "repetition": repetition,
                        "ready s": ready,
                        "target s": TARGET_S,
                        "stopped s": time.perf_counter() - begun,
                        "exit code": code,
                        "machine busy %": 100 * (load.others_share),
                    }
                )
    results.report("startup", rows, {"rows": rows})
    return 0 if all(float(str(row["ready s"])) <= TARGET_S and row["exit code"] == 0 for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
