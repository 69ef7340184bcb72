"""Two replicas and a load of shared prefixes: the router's choice against the least work and against each in turn.

Several callers' requests begin with one of a few long prefixes each; the caches of the replicas hold about half of them
each. The ways take turns on the same two engine processes; each round of a way is a tenant of its own, so that it finds
nothing that another left. A first token is counted from the moment at which its request is placed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.rig import results
from benchmarks.rig.machine import LoadMeter, wait_until_quiet
from engine.config import EngineConfig
from engine.generation import GenerateRequest
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from engine.weights.sources import default_cache_dir, resolve
from gateway.fleet.pool import Pool
from gateway.fleet.replicas import Replica
from gateway.fleet.router import Router, Routing

WAYS: tuple[Routing, ...] = ("round-robin", "least-work", "prefix")


@dataclass
class Seen:
    """What came of one way."""

    ttft_s: list[float] = field(default_factory=list)
    prompt: int = 0
    cached: int = 0
    seconds: float = 0.0
    requests: int = 0


@dataclass(frozen=True)
class Plan:
    """One round of load."""

    prefixes: int
    prefix_tokens: int
    own_tokens: int
    questions: int
    callers: int
    answer: int

    def prompts(self, draw: random.Random) -> list[list[int]]:
        """Every prefix with every question, in random order."""
        prefixes = [[draw.randrange(1000, 40_000) for _ in range(self.prefix_tokens)] for _ in range(self.prefixes)]
        prompts = [
            prefix + [draw.randrange(1000, 40_000) for _ in range(self.own_tokens)]
            for prefix in prefixes
            for _ in range(self.questions)
        ]
        draw.shuffle(prompts)
        return prompts


async def one_round(pool: Pool, way: Routing, plan: Plan, number: int, seen: Seen) -> None:
    """Send one round's requests, `callers` at a time."""
    config = pool.replicas[0].config
    pool.router = Router(len(pool.replicas), config.max_running, page_size=config.page_size, routing=way)
    for index, replica in enumerate(pool.replicas):
        assert replica.client.welcome is not None, "it is ready"
        pool.router.joined(index, replica.client.welcome.kv_tokens)
    waiting = list(enumerate(plan.prompts(random.Random(number))))
    params = SamplingParams(max_tokens=plan.answer, temperature=0.0, ignore_eos=True)

    async def caller() -> None:
        while waiting:
            index, prompt = waiting.pop()
            salt = f"{way} {number}"
            request = GenerateRequest(request_id=f"{salt} {index}", prompt_ids=prompt, params=params, salt=salt)
            began = time.perf_counter()
            seat = pool.place(request)
            generation = seat.client.generate(request)
            await generation.next()
            seen.ttft_s.append(time.perf_counter() - began)
            seat.began(generation.counters.cached)
            counters = await generation.final()
            seat.leave()
            seen.prompt += counters.prompt
            seen.cached += counters.cached
            seen.requests += 1

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(plan.callers)))
    seen.seconds += time.perf_counter() - began


async def measure(options: argparse.Namespace, folder: Path) -> dict[Routing, Seen]:
    """Start the replicas, and let the ways take turns."""
    plan = Plan(options.prefixes, options.prefix, options.own, options.questions, options.callers, options.answer)
    source = resolve(options.model, default_cache_dir())
    tokenizer = Tokenizer.load(source)
    threads = max(1, len(os.sched_getaffinity(0)) // options.replicas)
    config = EngineConfig(
        model=str(source.path), threads=threads, kv_memory_mib=options.kv_mib, max_context=options.prefix * 2
    )
    pool = Pool(
        [
            Replica(
                config,
                socket_path=folder / f"engine-{index}.sock",
                log_path=folder / f"engine-{index}.log",
                tokenizer=tokenizer,
            )
            for index in range(options.replicas)
        ],
        places=config.max_running,
    )
    seen: dict[Routing, Seen] = {way: Seen() for way in WAYS}
    pool.launch()
    try:
        await pool.ready()
        warm = Plan(options.replicas, options.prefix, options.own, 1, options.replicas, options.answer)
        await one_round(pool, "round-robin", warm, 0, Seen())
        for number in range(1, options.rounds + 1):
            for way in random.Random(number).sample(WAYS, len(WAYS)):
                await one_round(pool, way, plan, number, seen[way])
    finally:
        await pool.stop(0)
    return seen


def rows_of(seen: dict[Routing, Seen]) -> list[results.Row]:
    """A row for each way; ratios are to each in turn."""
    base = seen[WAYS[0]]

    def mean(one: Seen) -> float:
        return sum(one.ttft_s) / len(one.ttft_s)

    return [
        {
            "routing": way,
            "hit rate": one.cached / one.prompt,
            "ttft mean ms": 1e3 * mean(one),
            "ratio": mean(one) / mean(base),
            "ttft p50 ms": 1e3 * results.percentile(one.ttft_s, 0.5),
            "ttft p95 ms": 1e3 * results.percentile(one.ttft_s, 0.95),
            "p95 ratio": results.percentile(one.ttft_s, 0.95) / results.percentile(base.ttft_s, 0.95),
            "requests/s ratio": (one.requests / one.seconds) / (base.requests / base.seconds),
            "requests": one.requests,
        }
        for way, one in seen.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.routing", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--prefixes", type=int, default=8, help="shared beginnings")
    parser.add_argument("--prefix", type=int, default=384, help="tokens of each")
    parser.add_argument("--own", type=int, default=24, help="tokens that a request adds to it")
    parser.add_argument("--questions", type=int, default=4, help="requests with each beginning, in a round")
    parser.add_argument("--callers", type=int, default=4, help="requests at a time")
    parser.add_argument("--answer", type=int, default=4, help="tokens of an answer")
    parser.add_argument("--kv-mib", type=int, default=48, help="KV cache of each replica")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quiet", type=float, default=0, help="wait at most this many seconds for a quiet machine")
    options = parser.parse_args(argv)
    wait_until_quiet(options.quiet)
    meter = LoadMeter(None)
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        seen = asyncio.run(measure(options, Path(folder)))
    load = meter.stop()
    rows = rows_of(seen)
    results.report("routing", rows, {"options": vars(options), "summary": rows, "seen": seen, "load": load})
    by_way = {str(row["routing"]): row for row in rows}
    return 0 if float(str(by_way["prefix"]["ratio"])) < 1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
