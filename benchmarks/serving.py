"""Headrace against its peers under load: TTFT, time per token and throughput, case by case in alternation, in one run.

Starts `headrace serve` with data of its own and, given --peer-dir, vLLM's CPU build in float32 and llama.cpp's server
on the Q4_1 file. --sweep measures 256 in / 64 out at 1 to 32 streams instead, for benchmarks.plot.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.load import add_load_options
from benchmarks.rig import results
from benchmarks.rig.cases import CASES, Case, sweep_case
from benchmarks.rig.closed_loop import alternate, as_json, ratios
from benchmarks.rig.headrace import House
from benchmarks.rig.http import Endpoint
from benchmarks.rig.peers import PEERS

SWEEP = (1, 2, 4, 8, 16, 32)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.serving", description=__doc__)
    parser.add_argument("--peer-dir", type=Path, help="folder with the peers' environments; without it, ours alone")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--sweep", action="store_true", help=f"256 in / 64 out at {', '.join(map(str, SWEEP))} streams")
    add_load_options(parser)
    options = parser.parse_args(argv)
    cases: list[Case] = [sweep_case(n) for n in SWEEP] if options.sweep else [CASES[name] for name in options.cases]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-serving-")))
        endpoints: list[Endpoint] = []
        server, ours = House(folder / "data", options.model).start()
        stack.enter_context(server)
        endpoints.append(ours)
        for name in options.peers if options.peer_dir is not None else ():
            peer, endpoint = PEERS[name](options.peer_dir, folder)
            stack.enter_context(peer)
            endpoints.append(endpoint)
        measured = alternate(endpoints, cases, options.reps, options.quiet, options.limit)
    compared = ratios(measured, ours.label)
    if compared:
        print(results.table(compared), flush=True)
    results.report(
        "sweep" if options.sweep else "serving",
        [result.row() for result in measured],
        {"ours": ours.label, "ratios": compared, "results": as_json(measured)},
    )
    return 0 if all(result.completed == result.requests for result in measured) else 1


if __name__ == "__main__":
    raise SystemExit(main())
