"""Load client: streamed chat completions against any OpenAI-compatible servers on this machine, in alternation.

Example: python -m benchmarks.load --server headrace,http://127.0.0.1:8000,smollm2-135m,KEY c1 c4 c16
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from urllib.parse import urlsplit

from benchmarks.rig import results
from benchmarks.rig.cases import CASES
from benchmarks.rig.closed_loop import alternate, as_json, ratios
from benchmarks.rig.http import Endpoint
from benchmarks.rig.listener import listener_pid


def parse_server(text: str) -> Endpoint:
    """Read LABEL,URL,MODEL[,KEY]. Raises ArgumentTypeError for anything else and for addresses of other machines."""
    parts = text.split(",")
    if not 3 <= len(parts) <= 4:
        raise argparse.ArgumentTypeError("expected LABEL,URL,MODEL[,KEY]")
    url = urlsplit(parts[1])
    if url.scheme != "http" or url.hostname not in ("127.0.0.1", "localhost"):
        raise argparse.ArgumentTypeError(f"loopback addresses over http only, not {parts[1]}")
    port = url.port or 80
    key = parts[3] if len(parts) == 4 else ""
    return Endpoint(parts[0], url.hostname, port, parts[2], key, listener_pid(port))


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every command which runs load cases takes."""
    parser.add_argument("--reps", type=int, default=1, help="repetitions, each with its own prompts")
    parser.add_argument("--quiet", type=float, default=0, help="wait at most this many seconds for a quiet machine")
    parser.add_argument("--limit", type=float, default=600, help="most seconds per case and server")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.load", description=__doc__)
    parser.add_argument("--server", type=parse_server, action="append", required=True, metavar="LABEL,URL,MODEL[,KEY]")
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="default: all")
    add_load_options(parser)
    options = parser.parse_args(argv)
    cases = [CASES[name] for name in options.cases or CASES]
    measured = alternate(options.server, cases, options.reps, options.quiet, options.limit)
    if len(options.server) > 1:
        print(results.table(ratios(measured, options.server[0].label)))
    results.report("load", [result.row() for result in measured], {"results": as_json(measured)})
    return 0 if all(result.completed == result.requests for result in measured) else 1


if __name__ == "__main__":
    raise SystemExit(main())
