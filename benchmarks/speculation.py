"""Tokens a second with and without guesses, of answers that copy from their prompt and of answers that do not: by
prompt lookup and, where one is named, by a draft model.

The engine runs in this process, once in each way, and the ways take turns with the same questions; both must give the
same tokens. Time is counted from the first token of all streams on, as prompts are computed alike. Exits with 1 where
tokens differ or free text is more than a tenth slower.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.rig import results
from benchmarks.rig.machine import LoadMeter, wait_until_quiet
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from engine.weights.sources import default_cache_dir, resolve
from engine.wire import Submit, pack_tokens, unpack_tokens

TEXT = Path(__file__).parent / "text" / "the-mill.txt"
WAYS = ("off", "lookup")
PARAGRAPH = 600
"""Characters of a text that is to be repeated"""
FREE = (
    "Write a long story about a lighthouse keeper who finds a letter.",
    "Explain how bread is made, step by step, and why each step matters.",
    "Describe the four seasons in a mountain village, one after the other.",
    "What should somebody know who wants to keep bees? Tell everything.",
)


@dataclass
class Seen:
    """What one way did with one kind of question."""

    tokens: int = 0
    seconds: float = 0.0
    accepted: int = 0
    rejected: int = 0
    steps: int = 0
    answers: list[list[int]] = field(default_factory=list)


class Bench:
    """One engine."""

    def __init__(self, model: str, draft: str, threads: int, way: str, guesses: int) -> None:
        config = EngineConfig(
            model=model, draft_model=draft, threads=threads, prefix_cache=False, speculate=way, speculate_tokens=guesses  # type: ignore[arg-type]
        )  # fmt: skip
        self._core = EngineCore.load(config)
        self._count = 0

    def answer(self, prompts: Sequence[list[int]], tokens: int, seen: Seen) -> None:
        """Answer these together."""
        core, answers = self._core, {}
        for prompt in prompts:
            self._count += 1
            params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            name = f"bench-{self._count}"
            refused = core.submit(Submit(request_id=name, prompt=pack_tokens(prompt), params=params))
            if refused is not None:
                raise RuntimeError(refused.message)
            answers[name] = list[int]()
        began, before, steps = 0.0, 0, core.metrics.steps
        while core.has_work():
            for said in core.step():
                answers[said.request_id] += unpack_tokens(said.tokens)
                if said.finish_reason is not None:
                    seen.accepted += said.counters.accepted
                    seen.rejected += said.counters.rejected
            if not began and all(answers.values()):
                began, before, steps = time.perf_counter(), sum(map(len, answers.values())), core.metrics.steps
        seen.seconds += time.perf_counter() - began
        seen.tokens += sum(map(len, answers.values())) - before
        seen.steps += core.metrics.steps - steps
        seen.answers += answers.values()


def questions(tokenizer: Tokenizer) -> dict[str, list[list[int]]]:
    """Prompts by kind."""
    text = TEXT.read_text("utf-8")
    asked = {
        "copy": [
            f"Repeat this text word for word:\n\n{text[i * PARAGRAPH : (i + 1) * PARAGRAPH]}" for i in range(len(FREE))
        ],
        "free": list(FREE),
    }
    return {
        kind: [tokenizer.encode_chat([{"role": "user", "content": one}]) for one in texts]
        for kind, texts in asked.items()
    }


def rows_of(seen: dict[tuple[str, int], dict[str, Seen]]) -> list[results.Row]:
    """A row for each kind, number of streams and way of guessing."""
    rows: list[results.Row] = []
    for (kind, streams), ways in seen.items():
        speed = {way: one.tokens / one.seconds for way, one in ways.items()}
        for way in [way for way in ways if way != "off"]:
            guessed = ways[way].accepted + ways[way].rejected
            rows.append(
                {
                    "guesses by": way,
                    "answers": kind,
                    "streams": streams,
                    "off tok/s": speed["off"],
                    "tok/s": speed[way],
                    "ratio": speed[way] / speed["off"],
                    "steps ratio": ways[way].steps / ways["off"].steps,
                    "guesses": guessed,
                    "right %": 100 * ways[way].accepted / max(1, guessed),
                    "same tokens": "yes" if ways["off"].answers == ways[way].answers else "NO",
                }
            )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.speculation", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft-model", default="", help="smaller model of the same vocabulary that guesses, too")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--guesses", type=int, default=8, help="most guesses of a request in a step")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--quiet", type=float, default=0, help="wait at most this many seconds for a quiet machine")
    options = parser.parse_args(argv)
    asked = questions(Tokenizer.load(resolve(options.model, default_cache_dir())))
    names = (*WAYS, "draft") if options.draft_model else WAYS
    benches = {way: Bench(options.model, options.draft_model, options.threads, way, options.guesses) for way in names}
    for bench in benches.values():  # what steps cost is learned before anything is counted
        for prompts in asked.values():
            bench.answer(prompts[:1], 32, Seen())
            bench.answer(prompts, 16, Seen())
    wait_until_quiet(options.quiet)
    meter = LoadMeter(None)
    seen = {(kind, streams): {way: Seen() for way in names} for kind in asked for streams in options.streams}
    for number in range(options.rounds):
        for (kind, streams), ways in seen.items():
            prompts = [asked[kind][(number + i) % len(FREE)] for i in range(streams)]
            for way, bench in benches.items():
                bench.answer(prompts, options.tokens, ways[way])
    load = meter.stop()
    rows = rows_of(seen)
    results.report("speculation", rows, {"options": vars(options), "summary": rows, "load": load})
    slower = any(row["answers"] == "free" and float(str(row["ratio"])) < 0.9 for row in rows)
    return int(slower or any(row["same tokens"] != "yes" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
