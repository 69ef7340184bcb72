"""The whole engine on the Triton kernels, interpreted on a CPU: every family gives the tokens of torch's operations,
whatever is switched on or off."""

from __future__ import annotations

from array import array
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
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.weights.sources import ModelSource
from engine.wire import Submit, pack_tokens, unpack_tokens
from kernels.interface import Ops
from tests.engine.tiny_models import FAMILIES, VOCAB, tiny_checkpoint

BASE = EngineConfig(
    device="cpu", threads=1, kv_memory_mib=4, max_running=2, step_tokens=32, max_context=48, prefix_cache=False,
    graphs="off", overlap=False,
)  # fmt: skip
TOKENS = 4
JOBS: list[tuple[int, dict[str, Any]]] = [
    (30, {"temperature": 0.0}),
    (15, {"temperature": 0.9, "top_p": 0.9, "seed": 4, "logit_bias": {7: 3.0}}),
    (9, {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.5}),
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
    "speculation": {**LAYERS_OF_A_GPU, "speculate": "lookup", "speculate_tokens": 2, "prefix_cache": True},
    "preempted": {**LAYERS_OF_A_GPU, "kv_memory_mib": 0, "fast_share": 0.0},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: tiny_checkpoint(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


class Prophet:
    """Guesses one token of an answer rightly, and the next one wrongly."""

    probability = 1.0

    def __init__(self, request: Request, answers: dict[int, list[int]]) -> None:
        self._request, self._answer = request, answers[request.prompt_len]
        self._said = 0

    def follow(self, tokens: array[int], known: int) -> None:
        self._said = known - self._request.prompt_len

    def guess(self, most: int) -> list[int]:
        right = self._answer[self._said : self._said + 1]
        return [*right, (right[0] + 1) % VOCAB][:most]


def serve(
    folder: Path,
    ops: Ops,
    config: EngineConfig,
    *,
    late: bool,
    pages: int = 0,
    foreseen: list[list[int]] | None = None,
) -> tuple[list[list[int]], EngineCore]:
    """All jobs at once; where there is a prefix cache twice, so that their prompts are in it."""
    model = load_model(ModelSource(folder, "safetensors", "tiny"), config, ops)
    device = ScriptedDevice() if late else CpuDevice()
    answers = dict(zip((length for length, _ in JOBS), foreseen or [], strict=False))
    more: dict[str, Any] = {"free_bytes": pages} if pages else {}
    # A clock that stands still: whether guesses pay does not depend on the machine
    core = EngineCore(
        config, model, ops, device=device, clock=lambda: 0.0, guesser=lambda r: Prophet(r, answers), **more
    )
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCAB, (length,), generator=draw).tolist() for length, _ in JOBS]
    turns: list[list[list[int]]] = []
    for turn in range(2 if config.prefix_cache else 1):
        said: list[list[int]] = [[] for _ in JOBS]
        turns.append(said)
        for i, (prompt, (_, params)) in enumerate(zip(prompts, JOBS, strict=True)):
            wanted = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **params)
            submit = Submit(request_id=f"{turn}.{i}", prompt=pack_tokens(prompt), params=wanted)
            assert core.submit(submit) is None
        while core.has_work():
            for progress in core.step():
                assert progress.error is None
                said[int(progress.request_id.partition(".")[2])] += unpack_tokens(progress.tokens)
        core.check()
    assert turns[0] == turns[-1]
    return turns[0], core


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> tuple[Path, list[list[int]]]:
    """A checkpoint, and its tokens by torch's operations, one step after the other."""
    folder = checkpoints[request.param]
    return folder, serve(folder, kernels.table("cpu", "reference", 1), BASE, late=False)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_the_tokens_are_those_of_torch_s_operations(family: tuple[Path, list[list[int]]], name: str) -> None:
    folder, wanted = family
    config = msgspec.structs.replace(BASE, **SETTINGS[name])
    ops = kernels.table("cpu", "triton", 1, split=config.split_keys, deterministic=config.deterministic)
    pages = 4 * 4 * PAGE_BYTES if name == "preempted" else 0
    said, core = serve(folder, ops, config, late=config.overlap, pages=pages, foreseen=wanted)
    assert said == wanted
    assert len({tuple(tokens) for tokens in wanted}) == len(JOBS)
    snapshot = core.snapshot()
    assert (snapshot.preemptions > 0) == (name == "preempted")
    assert (snapshot.cached_tokens > 0) == config.prefix_cache
    assert (snapshot.accepted_tokens > 0) == (config.speculate != "off")
    assert isinstance(core.steps, PaddedSteps) == (config.graphs == "on")
