"""Checkpoints made on the spot: transformers and the engine load them and agree; text of n words is n tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from benchmarks.gpu import words
from benchmarks.gpu.checkpoint import LLAMA_8B, TINY, make
from benchmarks.gpu.folders import working_folder
from benchmarks.gpu_suite import WEIGHTS_BYTES
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from engine.weights.sources import resolve
from engine.wire import Submit, pack_tokens, unpack_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("weights") / "model", TINY)


def test_transformers_and_the_engine_give_the_same_logits(folder: Path) -> None:
    from transformers import LlamaForCausalLM

    prompt = [7, 300, 41, 41, 9, 111]
    with torch.inference_mode():
        theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        logits = theirs(torch.tensor([prompt])).logits[0, -1]
    core = EngineCore.load(EngineConfig(model=str(folder), device="cpu", threads=1, kv_memory_mib=8))
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=20)
    assert core.submit(Submit(request_id="one", prompt=pack_tokens(prompt), params=params)) is None
    said = [progress for _ in range(20) for progress in core.step()]
    (entry,) = said[0].logprobs or []
    wanted = torch.log_softmax(logits.double(), 0).topk(20)
    assert [token for token, _ in entry.top] == wanted.indices.tolist()
    torch.testing.assert_close(torch.tensor([p for _, p in entry.top]).double(), wanted.values, atol=1e-4, rtol=0)
    assert unpack_tokens(said[0].tokens) == [int(logits.argmax())]
    assert float(logits.std()) > 1, "the most probable token has to stand out"


def test_layers_alike_have_one_layers_bytes(tmp_path: Path) -> None:
    alike = make(tmp_path / "alike", TINY, alike=True)
    with safe_open(alike / "model-00001-of-00003.safetensors", "pt") as one:
        first = {name.removeprefix("model.layers.0."): one.get_tensor(name) for name in one.keys()}  # noqa: SIM118
    with safe_open(alike / "model-00002-of-00003.safetensors", "pt") as two:
        second = {name.removeprefix("model.layers.1."): two.get_tensor(name) for name in two.keys()}  # noqa: SIM118
    assert first.keys() == second.keys() and len(first) == 9
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert sum(file.stat().st_size for file in alike.glob("*.safetensors")) >= TINY.parameters * TINY.item_bytes


def test_the_large_shape_is_llama_3_8b() -> None:
    assert LLAMA_8B.parameters == 8_030_261_248
    assert LLAMA_8B.swept_bytes == pytest.approx(15.01e9, rel=1e-3)
    assert LLAMA_8B.kv_token_bytes == 128 * 1024
    assert LLAMA_8B.parameters * LLAMA_8B.item_bytes < WEIGHTS_BYTES


def test_a_word_is_a_token_in_prompts_and_answers(folder: Path) -> None:
    tokenizer = Tokenizer.load(resolve(str(folder)))
    ids = [0, 1, 63, 64, 200, words.words(TINY.vocab) - 1, 0]
    text = words.text_of(ids)
    assert tokenizer.encode_chat([{"role": "user", "content": text}]) == ids
    assert tokenizer.decode(ids) == text and words.count_words(text) == len(ids)
    assert tokenizer.eos_token_ids == (words.end_id(TINY.vocab),)
    assert tokenizer.decode([words.end_id(TINY.vocab)]) == ""


def test_every_id_of_the_large_vocabulary_has_its_own_word() -> None:
    count = words.words(LLAMA_8B.vocab)
    assert len({words.word(index) for index in range(count)}) == count
    assert all(words.word(index).isalpha() for index in (0, 63, 64, 4095, 4096, count - 1))


def test_a_folder_without_room_is_refused() -> None:
    with pytest.raises(OSError, match="has room for"):
        working_folder(1 << 60)
