"""kill -9 of the gateway, the engine and both under load: nothing settled is lost, nothing is billed twice.

50 kills with the scripted engine and, unless --scripted-only, a smaller number with the real model.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rig import results
from benchmarks.rig.crash import Outcome, Plan, run
from benchmarks.rig.headrace import MODEL, House
from engine.script import Script

SCRIPT = Script(tokens=80, first_token_ms=20, interval_ms=10, reply=tuple(range(1000, 1040)))
"""Up to 0.8 s of answer, so that most requests are in the middle of theirs when something dies."""


def row(label: str, plan: Plan, outcome: Outcome) -> results.Row:
    """Return the line of the printed table."""
    books = outcome.books
    return {
        "engine": label,
        "kills": sum(outcome.killed.values()),
        "of gateway": outcome.killed["gateway"],
        "of engine": outcome.killed["engine"],
        "of both": outcome.killed["both"],
        "clients": plan.clients,
        "requests": outcome.sent,
        "answered in full": outcome.finished(),
        "on the books": len(books.records),
        "billed": sum(record.billable for record in books.records.values()),
        "open holds": len(books.open_holds),
        "ready again p50 s": results.percentile(outcome.down_s, 0.5),
        "ready again max s": max(outcome.down_s, default=float("nan")),
        "broken promises": len(outcome.findings),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="with the scripted engine")
    parser.add_argument("--model-kills", type=int, default=9, help="with the real model")
    parser.add_argument("--scripted-only", action="store_true")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    runs: list[tuple[str, Plan, Script | None]] = [
        ("scripted", Plan(options.kills, clients=24, seed=options.seed), SCRIPT)
    ]
    if not options.scripted_only:
        plan = Plan(options.model_kills, clients=6, most_tokens=48, pause_s=(0.5, 4.0), seed=options.seed)
        runs.append((options.model, plan, None))
    rows, details = [], []
    for label, plan, script in runs:
        with tempfile.TemporaryDirectory(prefix="headrace-faults-") as folder:
            house = House(Path(folder) / "data", options.model, script)
            outcome = asyncio.run(run(plan, house, lambda text: print(text, flush=True)))
        for finding in outcome.findings:
            print(f"BROKEN: {finding}", flush=True)
        rows.append(row(label, plan, outcome))
        details.append(
            {
                "engine": label,
                "plan": plan,
                "findings": outcome.findings,
                "outcomes": Counter(record.outcome for record in outcome.books.records.values()),
                "ready_again_s": outcome.down_s,
            }
        )
    results.report("faults", rows, {"rows": rows, "runs": details})
    return 0 if not any(line["broken promises"] for line in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
