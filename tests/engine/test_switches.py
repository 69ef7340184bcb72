"""The same tokens with every optimisation on and off, on a tiny model with torch's operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.device import CpuDevice, Device, ScriptedDevice
from engine.models.registry import CausalLM, load_model
from engine.padded import PaddedSteps
from engine.sampling_params import SamplingParams
from engine.weights.sources import ModelSource
from engine.wire import Submit, TokenLogprobs, pack_tokens, unpack_tokens
from kernels.fallback import TorchOps
from kernels.long_prefill import Library, Spans, definition

VOCAB = 61
BASE = EngineConfig(
    device="cpu", threads=1, kv_memory_mib=4, max_running=4, step_tokens=32, max_context=96, prefix_cache=False,
    graphs="off", overlap=False,
)  # fmt: skip
OPS = TorchOps()
JOBS: list[tuple[int, dict[str, Any]]] = [
    (3, {"temperature": 0.0}),
    (40, {"temperature": 0.0}),
    (21, {"temperature": 0.9, "top_p": 0.9, "seed": 4}),
    (40, {"temperature": 0.0, "logprobs": 3, "repetition_penalty": 1.2, "presence_penalty": 0.5}),
    (17, {"temperature": 1.0, "seed": 5, "logit_bias": {7: 3.0}, "min_tokens": 4}),
    (33, {"temperature": 0.0, "stop_token_ids": tuple(range(0, 60, 4))}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(11)
    tiny: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, max_position_embeddings=96, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, value in tiny.named_parameters():
            value.normal_(1.0 if "norm" in name else 0.0, 0.3)
    tiny.save_pretrained(folder)
    return load_model(ModelSource(Path(folder), "safetensors", "tiny"), BASE, OPS)


Said = dict[str, tuple[list[int], list[TokenLogprobs]]]


def serve(
    model: CausalLM, device: Device | None = None, pages: int = 0, tokens: int = 12, **settings: Any
) -> tuple[Said, EngineCore]:
    """All jobs at once, twice: the second time their prompts may be cached."""
    config = msgspec.structs.replace(BASE, **settings)
    # A clock that stands still: whether guesses pay does not depend on the machine
    more = {"free_bytes": pages} if pages else {}
    core = EngineCore(config, model, OPS, device=device, clock=lambda: 0.0, **more)
    said: Said = {}
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCAB, (length,), generator=draw) for length, _ in JOBS]
    # The longer ones say everything twice, which gives guesses
    prompts = [prompt[: len(prompt) // 2].repeat(2) if len(prompt) > 16 else prompt for prompt in prompts]
    for turn in range(2):
        for i, (prompt, (_, params)) in enumerate(zip(prompts, JOBS, strict=True)):
            said[f"{turn}.{i}"] = ([], [])
            wanted = SamplingParams(max_tokens=tokens, ignore_eos=True, **params)
            assert (
                core.submit(Submit(request_id=f"{turn}.{i}", prompt=pack_tokens(prompt.tolist()), params=wanted))
                is None
            )
        while core.has_work():
            for progress in core.step():
                assert progress.error is None
                said[progress.request_id][0].extend(unpack_tokens(progress.tokens))
                said[progress.request_id][1].extend(progress.logprobs or [])
        core.check()
        assert core.snapshot().kv_pages_used == 0
    return said, core


@pytest.fixture(scope="module")
def plain(model: CausalLM) -> Said:
    """Everything off, one device, one step at a time."""
    return serve(model)[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"prefix_cache": True},
        {"step_tokens": 16},
        {"step_tokens": 256},
        {"step_tokens": 2048},
        {"graphs": "on"},
        {"graphs": "on", "prefix_cache": True, "step_tokens": 16},
        {"speculate": "lookup", "prefix_cache": True},
        {"speculate": "lookup", "graphs": "on"},
    ],
    ids=lambda settings: " ".join(f"{name}={value}" for name, value in settings.items()),
)
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_the_tokens_are_the_same(model: CausalLM, plain: Said, settings: dict[str, Any], overlap: bool) -> None:
    said, core = serve(model, ScriptedDevice() if overlap else CpuDevice(), overlap=overlap, **settings)
    assert said == plain
    guessed = core.snapshot().accepted_tokens + core.snapshot().rejected_tokens
    assert (guessed > 0) == ("speculate" in settings)


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_the_tokens_are_the_same_after_a_preemption(model: CausalLM, graphs: str) -> None:
    page_bytes = 2 * 2 * 16 * 4 * 16
    small = {"pages": 4 * 8 * page_bytes, "kv_memory_mib": 0}
    said, core = serve(model, ScriptedDevice(), tokens=26, graphs=graphs, overlap=True, **small)
    assert core.snapshot().preemptions > 0
    assert said == serve(model, tokens=26)[0]


@pytest.mark.parametrize("settings", [{}, {"step_tokens": 16, "prefix_cache": True}, {"speculate": "lookup"}])
def test_the_tokens_are_the_same_where_a_library_attends_to_prompts(
    model: CausalLM, plain: Said, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []

    def counted(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, softcap: float) -> Tensor:
        steps.append(spans.longest_q)
        return definition(q, k, v, spans, scale, softcap)

    monkeypatch.setattr("engine.long_prefill.library", lambda device: Library("counted", counted, softcap=True))
    said, core = serve(model, ScriptedDevice(), overlap=True, graphs="on", flash_prefill="on", **settings)
    assert {name: tokens for name, (tokens, _) in said.items()} == {name: tokens for name, (tokens, _) in plain.items()}
    for name, (_, entries) in said.items():  # another order of sums
        assert [entry.logprob for entry in entries] == pytest.approx([e.logprob for e in plain[name][1]], abs=1e-4)
    assert len(steps) >= 8 and min(steps) > 1, "every step with a prompt, and no step without one"
    assert isinstance(core.steps, PaddedSteps) and core.steps.summary.endswith("prompts by counted")


def test_a_library_that_cannot_be_had_is_refused(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="flash_prefill on a CPU is for tests"):
        serve(model, flash_prefill="on")
    with pytest.raises(ValueError, match="flash_prefill must not be on in deterministic mode"):
        serve(model, graphs="on", flash_prefill="on", deterministic=True)
    with pytest.raises(
        ValueError, match=r"the definition takes no float32 queries with a float16 KV cache \(kv_dtype\)"
    ):
        serve(model, graphs="on", flash_prefill="on", kv_dtype="float16")
    monkeypatch.setattr("engine.long_prefill.library", lambda device: None)
    with pytest.raises(ValueError, match="flash_prefill is on, but no FlashAttention is installed"):
        serve(model, graphs="on", flash_prefill="on")


def test_steps_run_in_the_smallest_bucket_that_holds_them(model: CausalLM) -> None:
    core = EngineCore(msgspec.structs.replace(BASE, graphs="on"), model, OPS)
    steps = core.steps
    assert isinstance(steps, PaddedSteps)
    assert [(b.layout.max_tokens, b.layout.max_seqs) for b in steps.buckets.largest_first] == [
        (32, 4), (24, 4), (16, 4), (4, 4), (2, 2), (1, 1),
    ]  # fmt: skip
    assert steps.bucket(3, 3, 3).max_tokens == 4
    assert (steps.bucket(3, 3, 2).max_tokens, steps.bucket(17, 2, 1).max_tokens) == (16, 24)


def test_kernels_without_padding_are_refused_graphs(model: CausalLM) -> None:
    class Native(TorchOps):
        name = "cpu"

    with pytest.raises(ValueError, match="take padding"):
        EngineCore(msgspec.structs.replace(BASE, graphs="on"), model, Native())


def test_padding_writes_nowhere(model: CausalLM) -> None:
    core = EngineCore(msgspec.structs.replace(BASE, graphs="on"), model, OPS, device=ScriptedDevice())
    steps = core.steps
    assert isinstance(steps, PaddedSteps)
    canary = 7.0
    for tensor in (*steps.kv.keys, *steps.kv.values):
        tensor.fill_(canary)
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    assert core.submit(Submit(request_id="a", prompt=pack_tokens(range(3, 26)), params=params)) is None
    pages: set[int] = set()
    while core.has_work():
        core.step()
        pages.update(page for request in core._scheduler.running for page in request.pages)
    assert len(pages) == 2
    for tensor in (*steps.kv.keys, *steps.kv.values):
        others = [page for page in range(tensor.shape[0]) if page not in pages]
        assert bool((tensor[others] == canary).all())
        # 23 + 8 tokens fill the first page and all but one place of the second
        assert int((tensor[sorted(pages)] == canary).all(dim=-1).sum()) == 1
