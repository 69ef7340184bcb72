"""A deterministic fake model at the runner's interface, and an engine around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.batch import ForwardBatch, KVTensors
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.device import Device
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.speculative import Guesser
from engine.wire import Counters, Progress, Refused, Submit, TokenLogprobs, pack_tokens, unpack_tokens

VOCAB = 61
EOS = 60


def fake_next(context: Sequence[int]) -> int:
    """The fake model's most probable next token: depends on every token of the context and on its order. Never EOS."""
    return sum((token + 1) * (i % 97 * 31 + 7) for i, token in enumerate(context)) % EOS


@dataclass(frozen=True)
class FakeShape:
    vocab_size: int = VOCAB
    num_layers: int = 1
    num_kv_heads: int = 1
    shared_kv: bool = False
    head_dim: int = 2
    max_position: int = 4096
    eos_token_ids: tuple[int, ...] = (EOS,)
    torch_dtype: str = "float32"


class FakeModel:
    """Writes token ids into the KV pages and computes the next token from what it reads back through the page table.

    So a wrong slot, table or length, a page owned twice or reused too early, changes the output. `before` is called at
    the start of each pass.
    """

    packed = False

    def __init__(self, shape: FakeShape) -> None:
        self.config = shape
        self.before: Callable[[ForwardBatch], None] = lambda batch: None
        self.sizes: list[int] = []

    def forward(self, batch: ForwardBatch, kv: KVTensors) -> Tensor:
        self.before(batch)
        self.sizes.append(batch.num_tokens)
        slots = batch.slots.long()
        assert slots.unique().numel() == batch.num_tokens, "two tokens written to one slot"
        size = kv.page_size
        kv.keys[0][slots // size, 0, slots % size, 0] = batch.token_ids.float()
        kv.values[0][slots // size, 0, slots % size, 0] = batch.positions.float()
        starts, lens = batch.q_starts.tolist(), batch.kv_lens.tolist()
        assert starts[0] == 0 and starts[-1] == batch.num_tokens
        logits = torch.empty(len(batch.logit_rows), VOCAB)
        wanted = dict(zip(batch.logit_rows.tolist(), range(len(batch.logit_rows)), strict=True))
        assert list(wanted) == sorted(wanted)
        for s, length in enumerate(lens):
            rows = range(starts[s], starts[s + 1])
            assert batch.positions[rows.start : rows.stop].tolist() == list(range(length - len(rows), length))
            if rows[-1] not in wanted:
                continue
            table = batch.page_table[s, : -(-length // size)].long()
            tokens = kv.keys[0][table, 0, :, 0].reshape(-1)[:length]
            positions = kv.values[0][table, 0, :, 0].reshape(-1)[:length]
            assert positions.tolist() == list(range(length)), "a page holds somebody else's tokens"
            best = fake_next([int(t) for t in tokens.tolist()])
            logits[wanted[rows[-1]]] = -((torch.arange(VOCAB) - best) % VOCAB).float() / 3
        return logits


@dataclass
class Transcript:
    """Everything an engine said about one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    ends: list[str] = field(default_factory=list)
    stop_token: int | None = None
    error: str | None = None


class Bench:
    """An engine on the fake model, and what it said so far."""

    def __init__(self, core: EngineCore, model: FakeModel) -> None:
        self.core = core
        self.model = model
        self.said: dict[str, Transcript] = {}

    def submit(
        self, name: str, prompt: Iterable[int], *, priority: int = 0, salt: str = "", **params: Any
    ) -> Refused | None:
        settings = {"temperature": 0.0, **params}
        return self.core.submit(
            Submit(
                request_id=name,
                prompt=pack_tokens(prompt),
                params=SamplingParams(**settings),
                priority=priority,
                salt=salt,
            )
        )

    def step(self) -> list[Progress]:
        progress = self.core.step()
        for item in progress:
            said = self.said.setdefault(item.request_id, Transcript())
            tokens = unpack_tokens(item.tokens)
            said.tokens += tokens
            said.logprobs += item.logprobs or []
            if not said.ends:
                # gap-free: each Progress carries exactly the tokens that its counters add
                assert item.counters.completion == len(said.tokens)
            said.counters = item.counters
            said.stop_token = item.stop_token
            said.error = item.error
            if item.finish_reason is not None:
                said.ends.append(item.finish_reason)
        return progress

    def drain(self, steps: int = 10_000) -> dict[str, Transcript]:
        for _ in range(steps):
            if not self.core.has_work():
                break
            self.step()
        assert not self.core.has_work()
        self.core.check()
        assert self.core.snapshot().kv_pages_used == 0
        return self.said


MakeBench = Callable[..., Bench]


@pytest.fixture(scope="session")
def make_bench() -> MakeBench:
    """make_bench(pages=64, clock=…, sleep=…, device=…, guesser=…, **engine settings) → Bench."""

    def make(
        pages: int = 64,
        clock: Callable[[], float] = lambda: 0.0,
        sleep: Callable[[float], None] = time.sleep,
        device: Device | None = None,
        guesser: Callable[[Request], Guesser] | None = None,
        **settings: Any,
    ) -> Bench:
        config = EngineConfig(**{"step_tokens": 64, "max_running": 8, **settings})
        shape = FakeShape()
        model = FakeModel(shape)
        page_bytes = 2 * shape.head_dim * 4 * config.page_size
        core = EngineCore(
            config,
            model,
            clock=clock,
            sleep=sleep,
            draw_seed=lambda: 7,
            device=device,
            free_bytes=4 * pages * page_bytes,
            guesser=guesser,
        )
        assert core.snapshot().kv_pages_total == pages
        return Bench(core, model)

    return make


@pytest.fixture(scope="session")
def alone() -> Callable[[Sequence[int], int], list[int]]:
    """alone(prompt, n) → the n greedy tokens of the fake model run by itself."""

    def run(prompt: Sequence[int], count: int) -> list[int]:
        context = list(prompt)
        while len(context) < len(prompt) + count:
            context.append(fake_next(context))
        return context[len(prompt) :]

    return run
