"""One model over two processes gives the tokens of one, and ends as a whole when one of them does."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.device import DeviceLostError
from engine.distributed import LeadingModel, Shard, Team
from engine.generation import EngineError, GenerateRequest
from engine.sampling_params import SamplingParams
from engine.weights.errors import WeightsError
from engine.wire import Progress, Submit, pack_tokens, unpack_tokens
from gateway.fleet.replicas import Replica, State
from tests.engine.byte_tokenizer import ByteTokenizer

VOCAB = 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def save(folder: Path, kind: str = "qwen2", **shape: Any) -> Path:
    """A tiny model: qwen2 has biases of its projections, llama has none."""
    torch.manual_seed(11)
    chosen = {**SHAPE, **shape}
    model: Any = Qwen2ForCausalLM(Qwen2Config(**chosen)) if kind == "qwen2" else LlamaForCausalLM(LlamaConfig(**chosen))
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "qwen2")


def config(folder: Path, ranks: int, **options: Any) -> EngineConfig:
    chosen = {"kernels": "reference", "device": "cpu", "threads": 1, "kv_memory_mib": 1, **options}
    return EngineConfig(model=str(folder), tensor_parallel=ranks, **chosen)


@contextmanager
def engine(folder: Path, ranks: int, **options: Any) -> Iterator[EngineCore]:
    core = EngineCore.load(config(folder, ranks, **options))
    try:
        yield core
    finally:
        if isinstance(core.model, LeadingModel):
            core.model.team.stop()


def ask(core: EngineCore, request_id: str, prompt: list[int], tokens: int = 24, **params: Any) -> None:
    chosen = SamplingParams(**{"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, **params})
    assert core.submit(Submit(request_id=request_id, prompt=pack_tokens(prompt), params=chosen)) is None


def finish(core: EngineCore) -> dict[str, list[int]]:
    said: dict[str, list[int]] = {}
    while core.has_work():
        for progress in core.step():
            assert progress.error is None
            said.setdefault(progress.request_id, []).extend(unpack_tokens(progress.tokens))
    return said


def answers(core: EngineCore) -> dict[str, list[int]]:
    """Prompts of several lengths in one batch, one of them sampled, one with a prefix of another; in chunks."""
    ask(core, "a", list(range(3, 40)))
    ask(core, "b", [5])
    ask(core, "c", list(range(40, 3, -1)), temperature=0.9, seed=4, logprobs=2)
    first = finish(core)
    ask(core, "d", [*range(3, 38), 60, 61])
    return first | finish(core)


@pytest.mark.parametrize(
    ("kind", "shape", "options"),
    [
        ("qwen2", {}, {}),
        pytest.param("llama", {"tie_word_embeddings": True}, {"quantize": "int8"}, marks=pytest.mark.slow),
        pytest.param("llama", {}, {"graphs": "on"}, marks=pytest.mark.slow),
        pytest.param("llama", {}, {"kernels": "auto"}, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_give_the_tokens_of_one_and_end_together(
    tmp_path: Path, kind: str, shape: dict[str, Any], options: dict[str, Any]
) -> None:
    folder = save(tmp_path / "model", kind, **shape)
    with engine(folder, 1, step_tokens=24, **options) as whole:
        expected = answers(whole)
        weights, token_bytes = whole.model.weight_bytes, whole.plan.token_bytes
    with engine(folder, 2, step_tokens=24, **options) as core:
        assert answers(core) == expected
        assert {len(tokens) for tokens in expected.values()} == {24}
        assert core.plan.token_bytes == token_bytes // 2, "each has half of the heads"
        assert core.model.weight_bytes < 0.8 * weights
        core.check()
        loses_a_rank(core)


def loses_a_rank(core: EngineCore) -> None:
    """A rank that ends in mid-answer takes the engine with it, which says so."""
    assert isinstance(core.model, LeadingModel)
    team = core.model.team
    ask(core, "lost", [5, 6, 7], tokens=64)
    said = [progress for _ in range(4) for progress in core.step()]
    assert said and not any(progress.error for progress in said)
    os.kill(team.pids[0], signal.SIGKILL)
    team.news.wait(20)
    last: list[Progress] = []
    with pytest.raises(DeviceLostError, match="rank 1 of 2 has ended with status -9"):
        while True:
            last += core.step()
    (end,) = (progress for progress in last if progress.finish_reason)
    assert end.finish_reason == "error"
    assert end.error is not None and "rank 1 of 2 has ended with status -9; the engine starts again" in end.error


@pytest.mark.parametrize(
    ("field", "shape", "ranks"),
    [
        ("num_attention_heads 4", {}, 3),
        ("num_key_value_heads 2", {}, 4),
        ("intermediate_size 49", {"intermediate_size": 49}, 2),
    ],
)
def test_what_cannot_be_shared_out_is_named(tmp_path: Path, field: str, shape: dict[str, Any], ranks: int) -> None:
    from engine.models.family import config_from_json

    described = {**SHAPE, **shape, "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 1e4}
    model = config_from_json(tmp_path / "config.json", described, (2,))
    with pytest.raises(WeightsError, match=f"tensor_parallel {ranks} does not divide {field}"):
        Shard(0, ranks).config_of(model, tmp_path / "config.json")


@pytest.mark.parametrize("options", [{"task": "embed"}, {"max_loras": 2}])
def test_settings_that_do_not_go_together_are_named(checkpoint: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"tensor_parallel 2 does not go with this setting: .*{next(iter(options))}"):
        Team(config(checkpoint, 2, **options), "cpu")


def child_of(pid: int) -> int:
    """The only process that this one has started."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


@pytest.mark.slow
def test_the_supervisor_starts_both_again(checkpoint: Path, tmp_path: Path) -> None:
    """A whole engine process with two ranks: the second is killed in mid-answer."""

    async def main() -> None:
        replica = Replica(
            config(checkpoint, 2),
            socket_path=tmp_path / "engine.sock",
            log_path=tmp_path / "engine.log",
            tokenizer=ByteTokenizer(),
        )
        params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)

        def generate(name: str) -> Any:
            return replica.client.generate(GenerateRequest(request_id=name, prompt_ids=[5, 6, 7], params=params))

        back = asyncio.Event()
        replica.on_state(lambda changed: back.set() if changed.restarts and changed.state is State.READY else None)
        try:
            async with asyncio.timeout(120):
                await replica.start()
                expected = await generate("a").final()
                assert expected.completion == 100
                running = generate("b")
                await running.next()
                os.kill(child_of(replica.pid or 0), signal.SIGKILL)
                with pytest.raises(EngineError, match=r"rank 1 of 2 has ended|the engine has gone"):
                    await running.final()
                await back.wait()
                assert "rank 1 of 2 has ended" in (replica.last_error or "")
                assert (await generate("c").final()).completion == 100
        finally:
            await replica.stop(0)

    asyncio.run(main())
    assert (tmp_path / "engine.log").read_text().count("ready in") == 2
