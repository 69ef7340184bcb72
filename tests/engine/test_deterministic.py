"""On a CPU a request's logits are the same bits whatever else is in its steps and however its prompt is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import kernels
from engine.batch import ForwardBatch, KVTensors
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.models.registry import CausalLM, load_model
from engine.sampling_params import SamplingParams
from engine.weights.sources import ModelSource
from engine.wire import Submit, pack_tokens

VOCAB = 61
BASE = EngineConfig(
    device="cpu", threads=1, kv_memory_mib=4, max_running=8, step_tokens=64, max_context=96, deterministic=True
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=96, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(folder)
    return folder


class Spy:
    """Keeps the logits of the sequence that stands at each position of a known prompt."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self.config = model.config
        self.packed = model.packed
        self.rows: dict[int, list[Tensor]] = {}

    def forward(self, batch: ForwardBatch, kv: KVTensors) -> Tensor:
        logits = self._model.forward(batch, kv)
        lens = batch.kv_lens.tolist()
        ends = (batch.q_starts[1:] - 1).tolist()
        for row, at in zip(logits, batch.logit_rows.tolist(), strict=True):
            self.rows.setdefault(lens[ends.index(at)], []).append(row.clone())
        return logits


def logits_of(model: CausalLM, others: int, **settings: Any) -> dict[int, list[Tensor]]:
    """Logits by sequence length of all that run: the watched prompt of 30 tokens and `others`, whose lengths differ."""
    spy = Spy(model)
    core = EngineCore(msgspec.structs.replace(BASE, **settings), spy)
    lengths = [30, *[48 + 6 * i for i in range(others)]]
    for i, length in enumerate(lengths):
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        prompt = pack_tokens((3 + i + 7 * j) % VOCAB for j in range(length))
        assert core.submit(Submit(request_id=str(i), prompt=prompt, params=params)) is None
    while core.has_work():
        core.step()
    return spy.rows


@pytest.mark.parametrize("choice", ["cpu", "reference"])
def test_logits_are_bit_equal_in_any_company(checkpoint: Path, choice: str) -> None:
    config = msgspec.structs.replace(BASE, kernels=choice)
    model = load_model(ModelSource(checkpoint, "safetensors", "tiny"), config, kernels.table("cpu", choice, 1))
    alone = logits_of(model, 0)
    assert sorted(alone) == [30, 31, 32, 33]
    for others, settings in ((1, {}), (6, {}), (6, {"step_tokens": 16})):
        company = logits_of(model, others, **settings)
        for length, rows in alone.items():
            assert any(torch.equal(row, rows[0]) for row in company[length])
