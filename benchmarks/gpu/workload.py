"""How much is measured: the full workload of a GPU, and one that a CPU finishes in seconds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.checkpoint import LLAMA_8B, TINY, Shape
from benchmarks.gpu.words import words


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of everything that is asked of an engine. Figures keep the names of the full sizes in the tiny one."""

    shape: Shape
    prompts: dict[int, tuple[int, int]]
    """Nominal length → tokens, repetitions: first tokens on an idle engine"""
    chat_prompt: int
    """Tokens of an ordinary prompt"""
    answer: int
    """Tokens of an answer that is timed"""
    answers: int
    """Such answers"""
    batches: dict[int, int]
    """Nominal number of streams → streams: saturated decoding"""
    context: int
    """Tokens of a stream, prompt and answer, in the middle of what is timed"""
    window: int
    """Tokens of each stream that are timed"""
    running: int
    """Streams that run when a long prompt arrives"""
    long_prompt: int
    long_prompts: int
    clients: int
    """Clients of the mixed case, each with a request at a time"""
    requests: int
    """Requests of the mixed case"""
    chat_lengths: tuple[int, int]
    """Least and most tokens of a mixed prompt; the logarithm is uniform, as lengths in chats about are"""
    settings: dict[str, Any]
    """EngineConfig fields, those left out that the engine does not know"""

    @property
    def names(self) -> int:
        """Token ids that are words."""
        return words(self.shape.vocab)

    def prompt(self, seed: str, count: int) -> list[int]:
        """Words drawn by the seed."""
        return random.Random(seed).choices(range(self.names), k=count)

    def chats(self, seed: str) -> list[tuple[list[int], int]]:
        """(prompt, tokens of the answer) of every mixed request."""
        draw = random.Random(seed)
        low, high = self.chat_lengths
        lengths = [round(low * (high / low) ** draw.random()) for _ in range(self.requests)]
        return [(self.prompt(f"{seed}/{i}", n), draw.randint(1, self.answer)) for i, n in enumerate(lengths)]


FULL = Workload(
    shape=LLAMA_8B,
    prompts={128: (128, 15), 512: (512, 10), 2048: (2048, 7), 8192: (8192, 4)},
    chat_prompt=128,
    answer=256,
    answers=3,
    batches={32: 32, 256: 256},
    context=1024,
    window=160,
    running=8,
    long_prompt=8192,
    long_prompts=2,
    clients=4,
    requests=32,
    chat_lengths=(16, 1024),
    # 48 GiB hold 256 streams of 1.5k tokens beside 15 GiB of weights on a GPU of 80 GB
    settings={
        "max_running": 256, "max_queued": 1024, "step_tokens": 2048, "max_step_ms": 12.0, "kv_memory_mib": 48 << 10,
    },
)  # fmt: skip
TINY_LOAD = Workload(
    shape=TINY,
    prompts={128: (16, 2), 512: (32, 1), 2048: (64, 1), 8192: (200, 1)},
    chat_prompt=16,
    answer=12,
    answers=1,
    batches={32: 2, 256: 6},
    context=64,
    window=8,
    running=2,
    long_prompt=200,
    long_prompts=1,
    clients=2,
    requests=4,
    chat_lengths=(4, 32),
    settings={"max_running": 8, "step_tokens": 64, "kv_memory_mib": 32, "threads": 1},
)


def workload(tiny: bool) -> Workload:
    """The one of the run."""
    return TINY_LOAD if tiny else FULL


def known_settings(known: Sequence[str], *given: dict[str, Any]) -> dict[str, Any]:
    """The given settings, later ones first, without those that are not known."""
    merged: dict[str, Any] = {}
    for settings in given:
        merged |= settings
    return {name: value for name, value in merged.items() if name in known}
