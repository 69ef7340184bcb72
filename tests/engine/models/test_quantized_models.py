"""Checkpoints of every quantised layout against transformers' own model with the values that their codes stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.registry import CausalLM
from tests.engine.weights.quantized_checkpoints import CASES, make

PROMPT = [1, *torch.randint(3, 97, (20,), generator=torch.Generator().manual_seed(4)).tolist()]


@pytest.mark.parametrize("name", CASES)
def test_logits_and_tokens_are_those_of_the_dense_model(
    name: str,
    tmp_path: Path,
    load: Callable[..., CausalLM],
    paged_loop: Any,
    greedy_tokens: Callable[..., list[int]],
) -> None:
    theirs = make(name, tmp_path / "codes")
    with torch.inference_mode():
        wanted = theirs(torch.tensor([PROMPT])).logits[0]
    codes = load(tmp_path / "codes")
    torch.testing.assert_close(paged_loop(codes).step([PROMPT]), wanted, atol=1e-4, rtol=1e-4)
    assert codes.packed
    theirs.save_pretrained(tmp_path / "dense")
    tokens = greedy_tokens(load(tmp_path / "dense", "cpu"), PROMPT, 64)
    dense = load(tmp_path / "codes", "cpu", dtype="float32")
    assert not dense.packed
    assert greedy_tokens(dense, PROMPT, 64) == tokens
    assert greedy_tokens(codes, PROMPT, 64) == tokens
    # On a CPU codes run as blocks of 32, their scales in float16, activations in 8 bits
    packed = load(tmp_path / "codes", "cpu")
    assert packed.packed and packed.weight_bytes < 0.6 * dense.weight_bytes
    error = (paged_loop(packed).step([PROMPT]) - wanted).norm() / wanted.norm()
    assert error < 0.1
