"""EngineCore over real models: what is scheduled together, cached or recomputed changes no token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kernels
from engine.batch import ForwardBatch, KVTensors
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.models.registry import CausalLM, load_model
from engine.sampling_params import SamplingParams
from engine.weights.sources import ModelSource
from engine.wire import Submit, TokenLogprobs, pack_tokens, unpack_tokens

BASE = EngineConfig(
    device="cpu", threads=1, kv_memory_mib=8, max_running=8, step_tokens=256, prefix_cache=False, max_context=256
)
VOCAB = 157


class Answer:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.cached = 0


Jobs = dict[str, tuple[Sequence[int], SamplingParams]]


def serve(core: EngineCore, jobs: Jobs) -> dict[str, Answer]:
    """Run the jobs together to their ends."""
    answers = {name: Answer() for name in jobs}
    for name, (prompt, params) in jobs.items():
        assert core.submit(Submit(request_id=name, prompt=pack_tokens(prompt), params=params)) is None
    while core.has_work():
        for progress in core.step():
            answer = answers[progress.request_id]
            assert progress.error is None
            answer.tokens += unpack_tokens(progress.tokens)
            answer.logprobs += progress.logprobs or []
            answer.cached = progress.counters.cached
    core.check()
    assert core.snapshot().kv_pages_used == 0
    return answers


def one_by_one(make: Callable[[], EngineCore], jobs: Jobs) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    for name, job in jobs.items():
        answers |= serve(make(), {name: job})
    return answers


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", params=["reference", "cpu"])
def small(request: pytest.FixtureRequest, llama: Path) -> CausalLM:
    ops = kernels.table("cpu", request.param, 1)
    return load_model(ModelSource(llama, "safetensors", "small"), BASE, ops)


@pytest.fixture(scope="session")
def smollm(model_path: Path) -> CausalLM:
    return load_model(ModelSource(model_path, "gguf", "smollm2"), BASE, kernels.table("cpu", "auto", 1))


def core(model: CausalLM, free_bytes: int | None = None, **settings: Any) -> EngineCore:
    return EngineCore(msgspec.structs.replace(BASE, **settings), model, free_bytes=free_bytes)


def jobs(vocab: int, count: int, output: int, **params: Any) -> Jobs:
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(3, vocab, (40,), generator=generator).tolist()
    made: Jobs = {}
    for i in range(count):
        own = torch.randint(3, vocab, (5 + 9 * i,), generator=generator).tolist()
        settings = {"temperature": 0.0, "ignore_eos": True, **params}
        made[str(i)] = (shared[: 40 if i % 2 else 17] + own, SamplingParams(max_tokens=output, **settings))
    return made


def page_bytes(model: CausalLM) -> int:
    config = model.config
    item = 2 if model.packed else 4
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * 16 * item


VARIATIONS: list[Any] = [
    pytest.param({}, marks=pytest.mark.slow),
    pytest.param({"prefix_cache": True}, marks=pytest.mark.slow),
    {"step_tokens": 16},
    {"step_tokens": 64, "prefix_cache": True},
    {"max_running": 3},
    {"page_size": 32},
]


@pytest.mark.parametrize("settings", VARIATIONS, ids=str)
def test_small_llama_gives_the_same_bits_however_it_is_scheduled(small: CausalLM, settings: dict[str, Any]) -> None:
    work = jobs(VOCAB, 8, 20, logprobs=2)
    alone = one_by_one(lambda: core(small), work)
    engine = core(small, **settings)
    for _ in range(2 if settings.get("prefix_cache") else 1):
        together = serve(engine, work)
        for name, answer in alone.items():
            assert together[name].tokens == answer.tokens
            assert together[name].logprobs == answer.logprobs
        work = {"again" + name: job for name, job in work.items()}
        alone = {"again" + name: answer for name, answer in alone.items()}
    assert (engine.metrics.cached_tokens > 0) == bool(settings.get("prefix_cache"))


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preemption_changes_nothing(small: CausalLM, prefix_cache: bool) -> None:
    work = jobs(VOCAB, 8, 40, logprobs=0)
    alone = one_by_one(lambda: core(small), work)
    tight = core(
        small, free_bytes=4 * 16 * page_bytes(small), kv_memory_mib=0, max_context=0, prefix_cache=prefix_cache
    )
    together = serve(tight, work)
    assert tight.metrics.preemptions > 0
    for name, answer in alone.items():
        assert (together[name].tokens, together[name].logprobs) == (answer.tokens, answer.logprobs)


def test_seeds_give_the_same_tokens_in_any_company(small: CausalLM) -> None:
    work = {
        name: (prompt, msgspec.structs.replace(params, temperature=t, seed=11, top_p=p, top_k=k))
        for (name, (prompt, params)), t, p, k in zip(
            jobs(VOCAB, 6, 20).items(),
            (0.5, 1.0, 2.0, 1.0, 0.7, 0.0),
            (1.0, 1.0, 0.8, 0.9, 1.0, 1.0),
            (0, 0, 0, 20, 5, 0),
            strict=True,
        )
    }
    alone = one_by_one(lambda: core(small), work)
    together = serve(core(small, step_tokens=32), work)
    assert {n: a.tokens for n, a in together.items()} == {n: a.tokens for n, a in alone.items()}
    other = {n: (p, msgspec.structs.replace(s, seed=12)) for n, (p, s) in work.items()}
    different = serve(core(small), other)
    assert [n for n in work if different[n].tokens == alone[n].tokens] == ["5"]


def test_requests_without_a_seed_differ(small: CausalLM) -> None:
    prompt = list(range(3, 20))
    params = SamplingParams(max_tokens=16, temperature=1.5, ignore_eos=True)
    answers = serve(core(small), {str(i): (prompt, params) for i in range(4)})
    assert len({tuple(a.tokens) for a in answers.values()}) == 4


class Recorder:
    """A model that keeps the logits it returned."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self.config = model.config
        self.packed = model.packed
        self.seen: list[torch.Tensor] = []

    def forward(self, batch: ForwardBatch, kv: KVTensors) -> torch.Tensor:
        logits = self._model.forward(batch, kv)
        self.seen += [row.clone() for row in logits]
        return logits


def test_logprobs_are_the_log_softmax_of_the_models_own_logits(small: CausalLM) -> None:
    recorder = Recorder(small)
    engine = EngineCore(BASE, recorder)
    params = SamplingParams(
        max_tokens=12,
        temperature=0.8,
        seed=4,
        logprobs=5,
        ignore_eos=True,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        logit_bias={7: 3.0},
    )
    answer = serve(engine, {"a": (list(range(3, 30)), params)})["a"]
    assert len(recorder.seen) == len(answer.logprobs) == 12
    for logits, token, said in zip(recorder.seen, answer.tokens, answer.logprobs, strict=True):
        expected = torch.log_softmax(logits.double(), dim=-1)
        assert said.logprob == pytest.approx(float(expected[token]), abs=1e-5)
        top = torch.topk(expected, 5)
        assert [token for token, _ in said.top] == top.indices.tolist()
        assert [value for _, value in said.top] == pytest.approx(top.values.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    "settings", [{"prefix_cache": True, "step_tokens": 64}, {"step_tokens": 16, "max_running": 5}], ids=str
)
def test_smollm2_gives_the_same_tokens_together_and_alone(smollm: CausalLM, settings: dict[str, Any]) -> None:
    work = jobs(49152, 8, 8, logprobs=0)
    alone = one_by_one(lambda: core(smollm, kv_memory_mib=16), work)
    together = serve(core(smollm, kv_memory_mib=16, **settings), work)
    for name, answer in alone.items():
        assert (together[name].tokens, together[name].logprobs) == (answer.tokens, answer.logprobs)


def test_smollm2_survives_preemption(smollm: CausalLM) -> None:
    work = jobs(49152, 4, 40)
    alone = one_by_one(lambda: core(smollm, kv_memory_mib=16), work)
    tight = core(smollm, free_bytes=4 * 14 * page_bytes(smollm), kv_memory_mib=0, max_context=0)
    together = serve(tight, work)
    assert tight.metrics.preemptions > 0
    assert {n: a.tokens for n, a in together.items()} == {n: a.tokens for n, a in alone.items()}
