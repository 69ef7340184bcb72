"""Embedding models through the whole engine: vectors are transformers' own hidden states, pooled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3Model

import kernels
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.device import CpuDevice, Device, ScriptedDevice
from engine.embedding import Embedder
from engine.loading import load
from engine.models.registry import load_model
from engine.sampling_params import SamplingParams
from engine.weights.errors import WeightsError
from engine.weights.sources import ModelSource
from engine.wire import Progress, Submit, pack_tokens
from tests.engine.tiny_models import VOCAB, tiny_checkpoint

BASE = EngineConfig(device="cpu", kernels="cpu", threads=1, kv_memory_mib=2, max_running=3, step_tokens=16)
POOLING = {"last": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}
TEXTS = [[(5 * i + 7 * j) % VOCAB for j in range(length)] for i, length in enumerate((3, 40, 1, 17, 95, 40))]
TEXTS.append([*TEXTS[1][:33], 9, 9])


def checkpoint(folder: Path, pooling: str = "last", *, normalize: bool = True, modules: Sequence[str] = ()) -> Path:
    """A decoder without a head, as sentence-transformers saves it."""
    torch.manual_seed(5)
    model: Any = Qwen3Model(
        Qwen3Config(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                    num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=96)
    )  # fmt: skip
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(folder)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else []), *modules]
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.{kind}"}
                for i, kind in enumerate(kinds)
            ]
        )
    )
    (folder / "1_Pooling").mkdir()
    modes = {field: field == POOLING.get(pooling, pooling) for field in [*POOLING.values(), "pooling_mode_max_tokens"]}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **modes}))
    return folder


def expected(folder: Path, pooling: str, *, normalize: bool) -> np.ndarray:
    model: Any = Qwen3Model.from_pretrained(folder)
    rows = []
    with torch.inference_mode():
        for text in TEXTS:
            states = model(torch.tensor([text])).last_hidden_state[0]
            rows.append({"last": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling])
    vectors = torch.stack(rows)
    return (torch.nn.functional.normalize(vectors) if normalize else vectors).numpy()


def embed(core: EngineCore, turn: str = "") -> tuple[np.ndarray, list[Progress]]:
    """The vectors of all texts, submitted at once."""
    for i, text in enumerate(TEXTS):
        submit = Submit(request_id=f"{turn}{i}", prompt=pack_tokens(text), params=SamplingParams(max_tokens=1))
        assert core.submit(submit) is None
    said: dict[str, Progress] = {}
    while core.has_work():
        for progress in core.step():
            assert progress.finish_reason == "stop" and progress.request_id not in said
            said[progress.request_id] = progress
    core.check()
    ends = [said[f"{turn}{i}"] for i in range(len(TEXTS))]
    return np.stack([np.frombuffer(end.vector or b"", dtype="<f4") for end in ends]), ends


def engine(folder: Path, *, device: Device | None = None, **settings: Any) -> EngineCore:
    config = msgspec.structs.replace(BASE, **settings)
    ops = kernels.table("cpu", config.kernels, 1)
    model = load_model(ModelSource(folder, "safetensors", "tiny"), config, ops)
    return EngineCore(config, model, ops, device=device or CpuDevice())


@pytest.mark.parametrize(
    ("pooling", "normalize", "choice"),
    [("last", True, "cpu"), ("mean", False, "cpu"), ("cls", True, "cpu"), ("mean", True, "reference")],
)
def test_vectors_are_transformers_hidden_states(pooling: str, normalize: bool, choice: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, pooling, normalize=normalize)
    core = engine(folder, kernels=choice, prefix_cache=pooling == "last")
    assert core.dimensions == 32
    vectors, ends = embed(core)
    np.testing.assert_allclose(vectors, expected(folder, pooling, normalize=normalize), atol=2e-5)
    assert [(end.counters.prompt, end.counters.completion) for end in ends] == [(len(text), 0) for text in TEXTS]
    assert core.snapshot().completion_tokens == 0


def test_a_cached_prefix_changes_no_vector(tmp_path: Path) -> None:
    core = engine(checkpoint(tmp_path))
    first, _ = embed(core, "a")
    again, ends = embed(core, "b")
    np.testing.assert_allclose(again, first, atol=1e-6)
    assert [end.counters.cached for end in ends][:3] == [0, 32, 0]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_late_device_gives_the_same(pooling: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, pooling)
    core = engine(folder, device=ScriptedDevice(), prefix_cache=False)
    np.testing.assert_allclose(embed(core)[0], expected(folder, pooling, normalize=True), atol=2e-5)


def test_a_text_may_fill_the_context_and_no_more(tmp_path: Path) -> None:
    core = engine(checkpoint(tmp_path))
    full = Submit(request_id="full", prompt=pack_tokens([3] * 96), params=SamplingParams(max_tokens=1))
    assert core.submit(full) is None
    ends = [progress for _ in range(20) for progress in core.step()]
    assert [len(end.vector or b"") for end in ends] == [4 * 32]
    refused = core.submit(msgspec.structs.replace(full, request_id="over", prompt=pack_tokens([3] * 97)))
    assert refused is not None and refused.code == "too_long"


@pytest.mark.parametrize("device", [CpuDevice, ScriptedDevice])
def test_who_asks_for_tokens_is_refused_and_guesses_are_not_made(device: type[Device], tmp_path: Path) -> None:
    """A text that repeats itself, of which one token is left to compute: it looks like a decode."""
    core = engine(checkpoint(tmp_path), device=device(), speculate="lookup")
    text = pack_tokens(([3, 4, 5, 6] * 9)[:33])
    for turn in range(2):
        ask = Submit(request_id=f"tokens {turn}", prompt=text, params=SamplingParams(max_tokens=8))
        refused = core.submit(ask)
        assert refused is not None and (refused.code, refused.message) == (
            "invalid", "max_tokens must be 1 for a model that embeds, which generates nothing, not 8",
        )  # fmt: skip
        for name in "ab":
            one = Submit(request_id=f"{name} {turn}", prompt=text, params=SamplingParams(max_tokens=1))
            assert core.submit(one) is None
        ends = []
        while core.has_work():
            ends += core.step()
        assert [(end.finish_reason, len(end.vector or b"")) for end in ends] == [("stop", 4 * 32)] * 2
    core.check()


def test_a_vector_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    core = engine(checkpoint(tmp_path))
    assert isinstance(core.model, Embedder)
    core.model.encoder._norm.weight.fill_(float("nan"))  # type: ignore[attr-defined]
    assert core.submit(Submit(request_id="a", prompt=pack_tokens([3, 4]), params=SamplingParams(max_tokens=1))) is None
    (end,) = core.step()
    assert (end.finish_reason, end.error, end.vector) == ("error", "the model's vector is not finite", None)


def test_the_files_and_the_task_decide(tmp_path: Path) -> None:
    def model(folder: Path, **settings: Any) -> object:
        config, ops = msgspec.structs.replace(BASE, **settings), kernels.table("cpu", "reference", 1)
        return load_model(ModelSource(folder, "safetensors", "tiny"), config, ops)

    chat = tiny_checkpoint(tmp_path / "chat", "qwen3")
    assert not isinstance(model(chat), Embedder)
    by_wish = model(chat, task="embed")
    assert isinstance(by_wish, Embedder) and (by_wish.how.pooling, by_wish.how.normalize) == ("last", True)
    bare = checkpoint(tmp_path / "bare", "mean", normalize=False)
    by_files = model(bare)
    assert isinstance(by_files, Embedder) and (by_files.how.pooling, by_files.how.normalize) == ("mean", False)
    with pytest.raises(WeightsError, match="Qwen3Model has no head"):
        model(bare, task="generate")
    with pytest.raises(WeightsError, match="takes no adapters"):
        model(bare, max_loras=1)
    with pytest.raises(ValueError, match="prefix_cache must be off"):
        engine(bare)
    (bare / "modules.json").unlink()
    assert isinstance(model(bare), Embedder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modules": ["Dense"]}, "modules.json: module 'Dense' is not supported"),
        ({"pooling": "pooling_mode_max_tokens"}, "config.json: pooling by pooling_mode_max_tokens is not supported"),
        ({"pooling": "nothing"}, "config.json: pooling by nothing is not supported"),
    ],
)
def test_what_cannot_be_pooled_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=message):
        engine(checkpoint(tmp_path, **change))


def test_a_start_switches_the_prefix_cache_off_where_every_token_counts(tmp_path: Path) -> None:
    core = load(msgspec.structs.replace(BASE, model=str(checkpoint(tmp_path, "mean"))))
    assert not core.config.prefix_cache
    np.testing.assert_allclose(embed(core)[0], expected(tmp_path, "mean", normalize=True), atol=2e-5)
