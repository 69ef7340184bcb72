"""Sleep against a new start: how long a model takes to answer again, and what memory it gives back meanwhile.

An engine process fills its KV cache, sleeps, and is asked again; then it is ended and started again. A first token is
counted from the moment at which the model is wanted: the waking, or the start of the process.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rig import results
from benchmarks.rig.machine import LoadMeter, wait_until_quiet
from engine.config import EngineConfig
from engine.generation import GenerateRequest
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from engine.weights.sources import default_cache_dir, resolve
from gateway.fleet.replicas import Replica

MIB = 1 << 20


def resident(pid: int | None) -> float:
    """Memory of a process in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / MIB


class Bench:
    """One engine process."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        source = resolve(options.model, default_cache_dir())
        self._options = options
        self._count = 0
        self.replica = Replica(
            EngineConfig(model=str(source.path), kv_memory_mib=options.kv_mib),
            socket_path=folder / "engine.sock",
            log_path=folder / "engine.log",
            tokenizer=Tokenizer.load(source),
        )

    async def ask(self, tokens: int) -> None:
        """A prompt of random tokens, and its first token."""
        self._count += 1
        prompt = [random.Random(self._count).randrange(1000, 40_000) for _ in range(tokens)]
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(request_id=f"bench-{self._count}", prompt_ids=prompt, params=params)
        await self.replica.client.generate(request).final()

    async def round(self) -> dict[str, float]:
        """Start, fill, sleep, wake; times in seconds, memory in MiB."""
        began = time.perf_counter()
        await self.replica.start()
        await self.ask(16)
        seen = {"start s": time.perf_counter() - began}
        for _ in range(self._options.prompts):
            await self.ask(self._options.prompt)
        seen["awake MiB"] = resident(self.replica.pid)
        began = time.perf_counter()
        await self.replica.client.rest(asleep=True)
        seen["to sleep s"] = time.perf_counter() - began
        seen["asleep MiB"] = resident(self.replica.pid)
        began = time.perf_counter()
        await self.replica.client.rest(asleep=False)
        seen["to wake s"] = time.perf_counter() - began
        await self.ask(16)
        seen["wake and first token s"] = time.perf_counter() - began
        await self.replica.stop(0)
        return seen


async def measure(options: argparse.Namespace) -> list[dict[str, float]]:
    """All rounds."""
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        bench = Bench(options, Path(folder))
        try:
            return [await bench.round() for _ in range(options.rounds)]
        finally:
            await bench.replica.stop(0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.resting", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kv-mib", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of a prompt that fills the cache")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quiet", type=float, default=0, help="wait at most this many seconds for a quiet machine")
    options = parser.parse_args(argv)
    wait_until_quiet(options.quiet)
    meter = LoadMeter(None)
    rounds = asyncio.run(measure(options))
    load = meter.stop()
    rows: list[results.Row] = [
        {**one, "wake over start": one["wake and first token s"] / one["start s"]} for one in rounds
    ]
    results.report("resting", rows, {"options": vars(options), "rounds": rows, "load": load})
    return 0 if all(one["wake and first token s"] < 1 for one in rounds) else 1


if __name__ == "__main__":
    raise SystemExit(main())
