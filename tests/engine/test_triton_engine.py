"""The whole engine on the Triton kernels, interpreted on a CPU: the tokens are those of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import kernels
from engine.batch import ForwardBatch, KVTensors
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.device import CpuDevice, Device, ScriptedDevice
from engine.models.registry import load_model
from engine.sampling_params import SamplingParams
from engine.weights.sources import ModelSource
from engine.wire import Submit, TokenLogprobs, pack_tokens, unpack_tokens
from kernels.triton import table
from kernels.triton.attention_split import SplitPlan, plan_splits
from tests.engine.tiny_models import VOCAB, tiny_checkpoint

BASE = EngineConfig(
    device="cpu", threads=1, kv_memory_mib=2, max_running=4, step_tokens=24, prefix_cache=True, max_context=64
)
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    {"temperature": 0.0, "logprobs": 2, "presence_penalty": 0.7, "repetition_penalty": 1.3},
    {"temperature": 1.0, "seed": 9, "logit_bias": {5: 4.0}},
]


@pytest.fixture(
    scope="module", params=["qwen3", *(pytest.param(family, marks=pytest.mark.slow) for family in ("llama", "gemma2"))]
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    return tiny_checkpoint(tmp_path_factory.mktemp(request.param), request.param, positions=64)


def answers(checkpoint: Path, choice: str, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, list[int]]:
    """Every prompt's greedy tokens, all submitted at once: prefill in chunks, mixed with decodes."""
    ops = kernels.table("cpu", choice, 1)
    config = msgspec.structs.replace(BASE, kernels=choice)
    model = load_model(ModelSource(checkpoint, "safetensors", "tiny"), config, ops)
    core = EngineCore(config, model, ops)
    made: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        made[str(i)] = []
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        assert core.submit(Submit(request_id=str(i), prompt=pack_tokens(prompt), params=params)) is None
    while core.has_work():
        for progress in core.step():
            assert progress.error is None
            made[progress.request_id] += unpack_tokens(progress.tokens)
    core.check()
    return made


def test_the_engine_gives_the_reference_tokens(checkpoint: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (3, 19)]
    prompts.append(prompts[1][:17])
    mine = answers(checkpoint, "triton", prompts, 3)
    assert mine == answers(checkpoint, "reference", prompts, 3)
    assert len({tuple(tokens) for tokens in mine.values()}) > 1


def sampled(
    checkpoint: Path, device: Device | None, **settings: Any
) -> dict[str, tuple[list[int], list[TokenLogprobs]]]:
    """Draws, penalties, bias and log-probabilities in one batch."""
    config = msgspec.structs.replace(BASE, kernels="triton", step_tokens=16, **settings)
    ops = kernels.table("cpu", "triton", 1, split=config.split_keys, deterministic=config.deterministic)
    core = EngineCore(
        config, load_model(ModelSource(checkpoint, "safetensors", "tiny"), config, ops), ops, device=device
    )
    made: dict[str, tuple[list[int], list[TokenLogprobs]]] = {}
    for i, params in enumerate(SAMPLED):
        made[str(i)] = ([], [])
        wanted = SamplingParams(max_tokens=4, ignore_eos=True, **params)
        prompt = pack_tokens((3 + i + 5 * j) % VOCAB for j in range(4 + 6 * i))
        assert core.submit(Submit(request_id=str(i), prompt=prompt, params=wanted)) is None
    while core.has_work():
        for progress in core.step():
            assert progress.error is None
            made[progress.request_id][0].extend(unpack_tokens(progress.tokens))
            made[progress.request_id][1].extend(progress.logprobs or [])
    core.check()
    return made


@pytest.mark.slow
def test_the_step_that_a_gpu_records_gives_the_same_tokens(checkpoint: Path) -> None:
    """Inputs gathered, tokens chosen and tables written by kernels, in buckets, one step ahead: as on the host."""
    host = sampled(checkpoint, CpuDevice(), graphs="off")
    device = sampled(checkpoint, ScriptedDevice(), graphs="on")
    assert {name: tokens for name, (tokens, _) in device.items()} == {
        name: tokens for name, (tokens, _) in host.items()
    }
    for name, (_, entries) in host.items():
        for mine, wanted in zip(device[name][1], entries, strict=True):
            assert mine.logprob == pytest.approx(wanted.logprob, abs=1e-5)
            assert [token for token, _ in mine.top] == [token for token, _ in wanted.top]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"device_sampling": False}, {"split_keys": False}, {"deterministic": True}],
    ids=lambda s: next(iter(s)),
)
def test_switches_of_the_kernels_change_no_token(checkpoint: Path, settings: dict[str, Any]) -> None:
    host = sampled(checkpoint, CpuDevice(), graphs="off")
    other = sampled(checkpoint, ScriptedDevice(), graphs="on", **settings)
    assert {name: tokens for name, (tokens, _) in other.items()} == {name: tokens for name, (tokens, _) in host.items()}


def test_attention_is_planned_once_for_all_layers_with_the_same_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[tuple[int, bool]] = []

    def plan(*args: Any, window: int, decode: bool) -> SplitPlan:
        planned.append((window, decode))
        return plan_splits(*args, window=window, decode=decode)

    monkeypatch.setattr(table, "plan_splits", plan)
    ops = kernels.table("cpu", "triton", 1)
    for family, windows in (("qwen2", [0, 20]), ("mistral", [20])):
        checkpoint = tiny_checkpoint(tmp_path / family, family)
        model = load_model(ModelSource(checkpoint, "safetensors", "tiny"), BASE, ops)
        kv = KVTensors.allocate(
            layers=2, num_pages=2, kv_heads=1, page_size=16, head_dim=64, dtype=torch.float32, device="cpu"
        )
        batch = ForwardBatch(
            token_ids=torch.tensor([3], dtype=torch.int32), positions=torch.zeros(1, dtype=torch.int32),
            slots=torch.zeros(1, dtype=torch.int32), q_starts=torch.tensor([0, 1], dtype=torch.int32),
            kv_lens=torch.ones(1, dtype=torch.int32), page_table=torch.zeros(1, 1, dtype=torch.int32),
            logit_rows=torch.zeros(1, dtype=torch.int64), decode=True,
        )  # fmt: skip
        planned.clear()
        model.hidden(batch, kv, every=True)
        assert planned == [(window, True) for window in windows]
