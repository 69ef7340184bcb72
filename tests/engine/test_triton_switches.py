"""The whole engine on the Triton kernels, interpreted on a CPU: every family gives the tokens of torch's operations,
whatever is switched on or off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import kernels
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.device import CpuDevice, ScriptedDevice
from engine.models.registry import load_model
from engine.padded import PaddedSteps
from engine.sampling_params import SamplingParams
from engine.weights.sources import ModelSource
from engine.wire import Submit, pack_tokens, unpack_tokens
from kernels.interface import Ops
from tests.engine.tiny_models import FAMILIES, VOCAB, tiny_checkpoint

BASE = EngineConfig(
    device="cpu", threads=1, kv_memory_mib=4, max_running=3, step_tokens=32, max_context=96, prefix_cache=False,
    graphs="off", overlap=False,
)  # fmt: skip
TOKENS = 5
JOBS: list[tuple[int, dict[str, Any]]] = [
    (40, {"temperature": 0.0}),
    (21, {"temperature": 0.9, "top_p": 0.9, "seed": 4}),
    (9, {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.5}),
    (33, {"temperature": 1.0, "seed": 5, "logit_bias": {7: 3.0}}),
]
PAGE_BYTES = 2 * 2 * 64 * 4 * 16
"""Keys and values of 16 tokens in two layers with one head of 64 in float32"""
LAYERS_OF_A_GPU = {"graphs": "on", "overlap": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "exact steps": {},
    "chunks of 16": {"step_tokens": 16},
    "chunks of 256": {"step_tokens": 256},
    "chunks of 2048": {"step_tokens": 2048},
    "graphs": {"graphs": "on"},
    "graphs, overlap": LAYERS_OF_A_GPU,
    "graphs, overlap, prefix cache": {**LAYERS_OF_A_GPU, "prefix_cache": True},
    "graphs, chunks of 16": {**LAYERS_OF_A_GPU, "step_tokens": 16},
    "tokens chosen on the host": {**LAYERS_OF_A_GPU, "device_sampling": False},
    "keys not split": {**LAYERS_OF_A_GPU, "split_keys": False},
    "deterministic": {**LAYERS_OF_A_GPU, "deterministic": True},
    "preempted": {**LAYERS_OF_A_GPU, "kv_memory_mib": 0},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: tiny_checkpoint(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


def serve(folder: Path, ops: Ops, config: EngineConfig, *, late: bool, pages: int = 0) -> tuple[Any, EngineCore]:
    """All jobs at once, twice; the second time their prompts may be cached."""
    model = load_model(ModelSource(folder, "safetensors", "tiny"), config, ops)
    device = ScriptedDevice() if late else CpuDevice()
    core = EngineCore(config, model, ops, device=device, **({"free_bytes": pages} if pages else {}))
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCAB, (length,), generator=draw).tolist() for length, _ in JOBS]
    said: dict[str, list[int]] = {}
    for turn in range(2):
        for i, (prompt, (_, params)) in enumerate(zip(prompts, JOBS, strict=True)):
            said[f"{turn}.{i}"] = []
            wanted = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **params)
            assert core.submit(Submit(request_id=f"{turn}.{i}", prompt=pack_tokens(prompt), params=wanted)) is None
        while core.has_work():
            for progress in core.step():
                assert progress.error is None
                said[progress.request_id] += unpack_tokens(progress.tokens)
        core.check()
    return said, core


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> tuple[Path, dict[str, list[int]]]:
    """A checkpoint, and its tokens by torch's operations, one step after the other."""
    folder = checkpoints[request.param]
    return folder, serve(folder, kernels.table("cpu", "reference", 1), BASE, late=False)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_the_tokens_are_those_of_torch_s_operations(family: tuple[Path, dict[str, list[int]]], name: str) -> None:
    folder, wanted = family
    config = msgspec.structs.replace(BASE, **SETTINGS[name])
    ops = kernels.table("cpu", "triton", 1, split=config.split_keys, deterministic=config.deterministic)
    pages = 4 * 7 * PAGE_BYTES if name == "preempted" else 0
    said, core = serve(folder, ops, config, late=config.overlap, pages=pages)
    assert said == wanted
    assert len({tuple(tokens) for tokens in wanted.values()}) == len(JOBS)
    snapshot = core.snapshot()
    assert (snapshot.preemptions > 0) == (name == "preempted")
    assert (snapshot.cached_tokens > 0) == config.prefix_cache
    assert isinstance(core.steps, PaddedSteps) == (config.graphs == "on")
