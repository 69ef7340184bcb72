"""Speed of the engine by itself, one stream: prefill of 256 tokens and decode, beside llama.cpp in the same run, or in
fewer bytes beside float32.

Each runs in a process without HTTP, from the same Q4_1 file on all cores, turn by turn; the prefix caches are off.
llama.cpp's figures are its own timings. Needs --peer-dir for the peer. --formats compares float32, which is the file
made dense, with that quantised again at load to 8 and 4 bits, and with the file's own blocks.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import orjson
import torch

from benchmarks.rig import results
from benchmarks.rig.machine import LoadMeter, wait_until_quiet
from benchmarks.rig.peers import GGUF, LLAMA_PEER
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.sampling_params import SamplingParams
from engine.wire import Progress, Refused, Submit, pack_tokens

OURS, LLAMA, DENSE = "headrace", "llama.cpp q4_1", "float32"
FORMATS: dict[str, dict[str, Any]] = {
    DENSE: {"dtype": "float32"},
    "int8": {"dtype": "float32", "quantize": "int8"},
    "int4": {"dtype": "float32", "quantize": "int4"},
    OURS: {},
}
"""What the engine is told for each format"""
DECODE_AFTER = 16
"""Prompt tokens before the measured decode."""


class Engine(Protocol):
    """Something that answers one prompt of token ids with exactly n tokens."""

    def run(self, prompt: Sequence[int], tokens: int) -> tuple[float, float]:
        """Return the seconds for the prompt up to its first token, and for the tokens after the first."""

    def close(self) -> None:
        """End it."""


class OurEngine:
    """EngineCore in this process."""

    def __init__(self, model: str, threads: int, **settings: Any) -> None:
        config = EngineConfig(model=model, threads=threads, prefix_cache=False, **settings)
        self._core = EngineCore.load(config)
        self._count = 0

    def run(self, prompt: Sequence[int], tokens: int) -> tuple[float, float]:
        """See Engine."""
        self._count += 1
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        submit = Submit(request_id=f"bench-{self._count}", prompt=pack_tokens(prompt), params=params)
        started = time.perf_counter()
        refused = self._core.submit(submit)
        if isinstance(refused, Refused):
            raise RuntimeError(refused.message)
        first = 0.0
        while True:
            for said in self._core.step():
                if said.tokens and not first:
                    first = time.perf_counter()
                if said.finish_reason is not None:
                    self._check(said, tokens)
                    return first - started, time.perf_counter() - first

    def close(self) -> None:
        """Nothing outlives the process."""

    def _check(self, said: Progress, tokens: int) -> None:
        if said.counters.completion != tokens:
            raise RuntimeError(f"{said.counters.completion} tokens instead of {tokens}: {said.error}")


class LlamaEngine:
    """llama.cpp in a process of its own, asked over pipes; its times are those that it reports."""

    def __init__(self, folder: Path, threads: int) -> None:
        argv = [str(folder / "llama/bin/python"), str(LLAMA_PEER), "measure", str(folder / GGUF), str(threads)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._read()

    def run(self, prompt: Sequence[int], tokens: int) -> tuple[float, float]:
        """See Engine. llama.cpp counts the first token to the prompt, as we do."""
        assert self._process.stdin is not None
        self._process.stdin.write(orjson.dumps({"prompt": list(prompt), "n_predict": tokens}) + b"\n")
        self._process.stdin.flush()
        timings = self._read()
        if timings["predicted_n"] != tokens or timings["prompt_n"] != len(prompt):
            raise RuntimeError(f"asked for {len(prompt)} + {tokens} tokens: {timings}")
        return timings["prompt_ms"] / 1000, timings["predicted_ms"] / 1000

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line: dict[str, float] = orjson.loads(self._process.stdout.readline())
        return line


def measure(
    engines: dict[str, Engine], prefill: int, decode: int, reps: int, quiet_s: float
) -> list[dict[str, object]]:
    """Run every engine in turn `reps` times after one round that is not counted; return one entry per run."""
    draw = random.Random(1)
    runs: list[dict[str, object]] = []
    for repetition in range(reps + 1):
        prompts = [[draw.randrange(100, 40_000) for _ in range(length)] for length in (prefill, DECODE_AFTER)]
        turn = list(engines.items())
        for label, engine in turn if repetition % 2 else reversed(turn):
            wait_until_quiet(quiet_s)
            meter = LoadMeter(None)
            prompt_s, _ = engine.run(prompts[0], 1)
            _, decode_s = engine.run(prompts[1], decode + 1)
            load = meter.stop()
            if repetition:
                runs.append(
                    {
                        "engine": label,
                        "repetition": repetition,
                        "prefill_tok_s": prefill / prompt_s,
                        "decode_tok_s": decode / decode_s,
                        "load": load,
                    }
                )
    return runs


def summary(runs: Sequence[dict[str, object]], prefill: int, decode: int) -> list[results.Row]:
    """Return one line per engine with medians and the spread, and ratios: ours to each, or each to float32."""
    rows: list[results.Row] = []
    labels = list(dict.fromkeys(str(run["engine"]) for run in runs))

    def median(label: str, key: str, share: float = 0.5) -> float:
        return results.percentile([float(str(run[key])) for run in runs if run["engine"] == label], share)

    for label in labels:
        row: results.Row = {
            "engine": label,
            f"prefill {prefill} tok/s": median(label, "prefill_tok_s"),
            f"decode {decode} tok/s": median(label, "decode_tok_s"),
            "worst decode": median(label, "decode_tok_s", 0),
            "best decode": median(label, "decode_tok_s", 1),
        }
        base, names = (DENSE, "this / float32") if DENSE in labels else (OURS, "ours / this")
        for part in ("prefill", "decode"):
            ratio = median(label, f"{part}_tok_s") / median(base, f"{part}_tok_s")
            row[f"{names}, {part}"] = ratio if base == DENSE else 1 / ratio
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.decode", description=__doc__)
    parser.add_argument("--peer-dir", type=Path, help="folder with the peers' environments")
    parser.add_argument("--formats", action="store_true", help="float32, int8, int4 and the file's own in one run")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--prefill", type=int, default=256)
    parser.add_argument("--decode", type=int, default=128)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--quiet", type=float, default=0, help="wait at most this many seconds for a quiet machine")
    options = parser.parse_args(argv)
    makers: dict[str, Callable[[], Engine]] = {}
    for label, settings in FORMATS.items() if options.formats else [(OURS, FORMATS[OURS])]:
        makers[label] = partial(OurEngine, options.model, options.threads, **settings)
    if options.peer_dir is not None:
        makers[LLAMA] = lambda: LlamaEngine(options.peer_dir, options.threads)
    engines = {label: make() for label, make in makers.items()}
    try:
        with torch.inference_mode():
            runs = measure(engines, options.prefill, options.decode, options.reps, options.quiet)
    finally:
        for engine in engines.values():
            engine.close()
    rows = summary(runs, options.prefill, options.decode)
    results.report(
        "formats_speed" if options.formats else "decode",
        rows,
        {"threads": options.threads, "summary": rows, "runs": runs},
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
