"""A paged loop for tests: drives a model through ForwardBatch by hand, without scheduler or runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from engine.batch import ForwardBatch, KVTensors
from engine.config import EngineConfig
from engine.models.registry import CausalLM, load_model
from engine.weights.sources import ModelSource

PAGE = 16


class PagedLoop:
    """One or more sequences over their own pages, each fed in whatever pieces the test likes."""

    def __init__(self, model: CausalLM, sequences: int = 1, pages: int = 12) -> None:
        config = model.config
        self.model = model
        self.lengths = [0] * sequences
        # Interleaved page numbers, so that no sequence lies in one run of memory
        self.tables = [[s + sequences * p for p in range(pages)] for s in range(sequences)]
        self.kv = KVTensors.allocate(
            layers=config.num_layers,
            num_pages=sequences * pages,
            kv_heads=config.num_kv_heads,
            page_size=PAGE,
            head_dim=config.head_dim,
            dtype=torch.float32,
            device="cpu",
            shared=config.shared_kv,
        )

    def step(self, pieces: Sequence[Sequence[int]], rows: Sequence[int] | None = None) -> Tensor:
        """Feed a piece to every sequence; logits of `rows`, or of every token."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for s, piece in enumerate(pieces):
            at = range(self.lengths[s], self.lengths[s] + len(piece))
            tokens += piece
            positions += at
            slots += [self.tables[s][p // PAGE] * PAGE + p % PAGE for p in at]
            starts.append(len(tokens))
            self.lengths[s] += len(piece)
        wanted = list(range(len(tokens))) if rows is None else list(rows)
        batch = ForwardBatch(
            token_ids=torch.tensor(tokens, dtype=torch.int32),
            positions=torch.tensor(positions, dtype=torch.int32),
            slots=torch.tensor(slots, dtype=torch.int32),
            q_starts=torch.tensor(starts, dtype=torch.int32),
            kv_lens=torch.tensor(self.lengths, dtype=torch.int32),
            page_table=torch.tensor(self.tables, dtype=torch.int32),
            logit_rows=torch.tensor(wanted, dtype=torch.int64),
        )
        with torch.inference_mode():
            return self.model.forward(batch, self.kv).clone()


def greedy(model: CausalLM, prompt: Sequence[int], count: int, chunk: int = 7) -> list[int]:
    """Prefill in chunks, then the most probable token `count` times."""
    loop = PagedLoop(model)
    logits = torch.empty(0)
    for start in range(0, len(prompt), chunk):
        piece = prompt[start : start + chunk]
        logits = loop.step([piece], rows=[len(piece) - 1])
    out = [int(logits[0].argmax())]
    while len(out) < count:
        out.append(int(loop.step([out[-1:]])[0].argmax()))
    return out


@pytest.fixture(scope="session")
def paged_loop() -> type[PagedLoop]:
    return PagedLoop


@pytest.fixture(scope="session")
def greedy_tokens() -> Callable[..., list[int]]:
    return greedy


@pytest.fixture(scope="session")
def load() -> Callable[..., CausalLM]:
    """load(path, choice="reference", **engine settings) → model on the CPU."""

    def loaded(path: Path, choice: str = "reference", **settings: Any) -> CausalLM:
        source = ModelSource(path, "gguf" if path.suffix == ".gguf" else "safetensors", path.stem)
        ops = kernels.table("cpu", choice, 1)
        return load_model(source, EngineConfig(device="cpu", threads=1, **settings), ops)

    return loaded
