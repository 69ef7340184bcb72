"""The default model itself: its GGUF file through tokenizer, weights and forward pass, against transformers on the same
file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.models.registry import CausalLM
from engine.tokenizer import Tokenizer
from engine.weights.sources import ModelSource

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
PROMPTS = [
    "The headrace of a mill is the channel that",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "In 1969, the first humans landed on the Moon. Their names were",
    "Once upon a time, in a village by the sea, there lived",
]


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer.load(ModelSource(model_path, "gguf", "smollm2-135m"))


def ask(model: CausalLM, tokenizer: Tokenizer, greedy: Callable[..., list[int]]) -> str:
    prompt = tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
    tokens = greedy(model, prompt, 12, chunk=64)
    end = next(i for i, token in enumerate(tokens) if token in model.config.eos_token_ids)
    return tokenizer.decode(tokens[:end])


def test_it_knows_the_capital_of_france(
    model_path: Path, tokenizer: Tokenizer, load: Callable[..., CausalLM], greedy_tokens: Callable[..., list[int]]
) -> None:
    model = load(model_path, "cpu", dtype="float32")
    assert not model.packed
    assert ask(model, tokenizer, greedy_tokens) == ANSWER
    assert model.config.eos_token_ids == tokenizer.eos_token_ids


def test_packed_weights_know_it_too(
    model_path: Path, tokenizer: Tokenizer, load: Callable[..., CausalLM], greedy_tokens: Callable[..., list[int]]
) -> None:
    model = load(model_path, "cpu")
    assert model.packed
    # 4.5 to 8.5 bits a weight, nothing kept twice
    assert model.weight_bytes < 1.01 * model_path.stat().st_size
    prompt = tokenizer.render_chat([{"role": "user", "content": QUESTION}]) + "The capital of France is"
    assert tokenizer.decode(greedy_tokens(model, tokenizer.encode(prompt), 2)) == " Paris."


def test_packed_steps_as_one_operation_give_the_same_bits(
    model_path: Path, tokenizer: Tokenizer, load: Callable[..., CausalLM], paged_loop: Any
) -> None:
    ids = tokenizer.encode(PROMPTS[2])
    loops = [paged_loop(load(model_path, "cpu", fused_steps=fused)) for fused in (True, False)]
    for piece in (ids[:-1], ids[-1:]):
        first, second = (loop.step([piece]) for loop in loops)
        assert torch.equal(first, second)


def test_packed_weights_stay_near_the_reference(
    model_path: Path, tokenizer: Tokenizer, load: Callable[..., CausalLM], paged_loop: Any
) -> None:
    """Integer products round activations to 8 bits: other logits, but nearly the same distribution."""
    packed, exact = load(model_path, "cpu"), load(model_path, "cpu", dtype="float32")
    ids = tokenizer.encode(PROMPTS[2])
    ours, theirs = (paged_loop(model).step([ids]).log_softmax(-1) for model in (packed, exact))
    divergence = (theirs.exp() * (theirs - ours)).sum(-1)
    assert float(divergence.mean()) < 0.02


def transformers_model(file: Path) -> Any:
    """transformers' Llama with the file's weights, read and dequantised by the gguf package."""
    reader = gguf.GGUFReader(file)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49_152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
            tie_word_embeddings=True,
        )
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    by_gguf_name = {}
    for name in model.state_dict():
        stem, _, suffix = name.rpartition(".")
        by_gguf_name[f"{names.get_name(stem)}.{suffix}"] = name
    state = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            # The converter wrote reshape(heads, 2, half, …).swapaxes(1, 2)
            heads = values.shape[0] // 64
            values = values.reshape(heads, 32, 2, -1).swapaxes(1, 2).reshape(values.shape)
        state[by_gguf_name[tensor.name]] = values
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.eval()
    return model


@pytest.mark.slow
def test_it_is_what_transformers_makes_of_the_file(
    model_path: Path,
    tokenizer: Tokenizer,
    load: Callable[..., CausalLM],
    paged_loop: Any,
    greedy_tokens: Callable[..., list[int]],
) -> None:
    theirs = transformers_model(model_path)
    dense = load(model_path, "cpu", dtype="float32")
    for text in PROMPTS:
        ids = tokenizer.encode(text)
        logits = paged_loop(dense).step([ids])
        with torch.inference_mode():
            torch.testing.assert_close(logits, theirs(torch.tensor([ids])).logits[0], atol=2e-3, rtol=1e-3)
    for text in PROMPTS[:2]:
        ids = tokenizer.encode(text)
        with torch.inference_mode():
            out = theirs.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                max_new_tokens=64,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=2,
            )
        assert greedy_tokens(dense, ids, 64) == out[0, len(ids) :].tolist()


@pytest.mark.slow
def test_reference_operations_on_packed_weights_are_exact(
    model_path: Path, tokenizer: Tokenizer, load: Callable[..., CausalLM], paged_loop: Any
) -> None:
    ids = tokenizer.encode(PROMPTS[0])
    packed, dense = load(model_path, "reference"), load(model_path, "reference", dtype="float32")
    assert packed.packed and not dense.packed
    assert torch.equal(paged_loop(packed).step([ids]), paged_loop(dense).step([ids]))
