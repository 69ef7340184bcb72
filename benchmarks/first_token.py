"""First tokens of short prompts while long ones are computed, with and without the fast lane and a longest step.

Long prompts come one after the other; beside them one answer is being generated and short prompts arrive at the same
random moments in every way of planning. The engine runs in this process, as its own process steps it: what has arrived
is read between two steps, so a first token is counted from the arrival on. The ways take turns.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.rig import results
from benchmarks.rig.machine import LoadMeter, wait_until_quiet
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.sampling_params import SamplingParams
from engine.wire import Submit, pack_tokens

WAYS: dict[str, dict[str, float]] = {
    "in order": {"fast_share": 0.0},
    "fast lane": {"fast_share": 0.5},
    "fast lane, 100 ms steps": {"fast_share": 0.5, "max_step_ms": 100.0},
}
BASE = "in order"
SHORT = (16, 64)
"""Tokens of a short prompt: from, to"""


@dataclass
class Seen:
    """What came of one way of planning, in seconds."""

    short: list[float] = field(default_factory=list)
    long: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """between two tokens of the running answer, while a long prompt is computed"""


class Bench:
    """One engine, planning one way."""

    def __init__(self, model: str, threads: int, way: dict[str, float]) -> None:
        config = EngineConfig(model=model, threads=threads, prefix_cache=False, **way)  # type: ignore[arg-type]
        self.seen = Seen()
        self._core = EngineCore.load(config)
        self._count = 0

    def round(self, draw: random.Random, long: int, shorts: int, spread_s: float) -> None:
        """A long prompt, and short ones that arrive within `spread_s` seconds after it, beside a running answer."""
        running = self._submit(draw, 16, 100_000)
        for _ in range(8):
            self._core.step()
        began = time.perf_counter()
        moments = sorted(draw.uniform(0, spread_s) for _ in range(shorts))
        arrivals = [(began, long)] + [(began + moment, draw.randint(*SHORT)) for moment in moments]
        arrived: dict[str, tuple[float, int]] = {}
        token_at = began
        done = False
        while arrivals or arrived:
            while arrivals and arrivals[0][0] <= time.perf_counter():
                moment, tokens = arrivals.pop(0)
                arrived[self._submit(draw, tokens, 1)] = (moment, tokens)
            for said in self._core.step():
                now = time.perf_counter()
                if said.request_id == running:
                    if not done:
                        self.seen.gaps.append(now - token_at)
                    token_at = now
                elif said.request_id in arrived:
                    moment, tokens = arrived.pop(said.request_id)
                    (self.seen.long if tokens == long else self.seen.short).append(now - moment)
                    done = done or tokens == long
        self._core.abort(running)
        while self._core.has_work():
            self._core.step()

    def _submit(self, draw: random.Random, tokens: int, answer: int) -> str:
        self._count += 1
        prompt = pack_tokens(draw.randrange(1000, 40_000) for _ in range(tokens))
        params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
        refused = self._core.submit(Submit(request_id=f"bench-{self._count}", prompt=prompt, params=params))
        if refused is not None:
            raise RuntimeError(refused.message)
        return f"bench-{self._count}"


def rows_of(benches: dict[str, Bench]) -> list[results.Row]:
    """A row for each way; ratios are to the first."""
    base = benches[BASE].seen

    def mean(values: Sequence[float]) -> float:
        return 1e3 * sum(values) / len(values)

    rows: list[results.Row] = []
    for way, bench in benches.items():
        seen = bench.seen
        rows.append(
            {
                "planning": way,
                "short ttft mean ms": mean(seen.short),
                "ratio": mean(seen.short) / mean(base.short),
                "short ttft p95 ms": 1e3 * results.percentile(seen.short, 0.95),
                "p95 ratio": results.percentile(seen.short, 0.95) / results.percentile(base.short, 0.95),
                "long ttft mean ms": mean(seen.long),
                "long ratio": mean(seen.long) / mean(base.long),
                "gap p95 ms": 1e3 * results.percentile(seen.gaps, 0.95),
                "gap max ms": 1e3 * max(seen.gaps),
                "shorts": len(seen.short),
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.first_token", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--long", type=int, default=1500, help="tokens of a long prompt")
    parser.add_argument("--shorts", type=int, default=6, help="short prompts beside each long one")
    parser.add_argument("--spread", type=float, default=1.5, help="seconds within which they arrive")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--quiet", type=float, default=0, help="wait at most this many seconds for a quiet machine")
    options = parser.parse_args(argv)
    benches = {way: Bench(options.model, options.threads, config) for way, config in WAYS.items()}
    for bench in benches.values():  # what steps cost is learned before anything is counted
        bench.round(random.Random(0), options.long, 2, options.spread)
        bench.seen = Seen()
    wait_until_quiet(options.quiet)
    meter = LoadMeter(None)
    for number in range(1, options.rounds + 1):
        for bench in benches.values():
            bench.round(random.Random(number), options.long, options.shorts, options.spread)
    load = meter.stop()
    rows = rows_of(benches)
    seen = {way: bench.seen for way, bench in benches.items()}
    results.report("first_token", rows, {"options": vars(options), "summary": rows, "seconds": seen, "load": load})
    return 0 if all(float(str(row["ratio"])) < 1 for row in rows[1:]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
