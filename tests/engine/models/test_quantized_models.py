"""Checkpoints of every quantised layout against transformers' own model with the values that their codes stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kernels
from engine.config import Quantize
from engine.layers.linear import LayerLoader
from engine.models.family import find_family
from engine.models.registry import CausalLM
from engine.weights.errors import WeightsError
from engine.weights.quantize import quantizer
from engine.weights.safetensors import SafetensorsCheckpoint
from kernels.blocks import dequantize
from kernels.interface import BlockQuantized, ScaledWeight
from tests.engine.weights.quantized_checkpoints import CASES, make

PROMPT = [1, *torch.randint(3, 97, (20,), generator=torch.Generator().manual_seed(4)).tolist()]


DAILY = ("fp8-blocks", "compressed-int4-zeros", "gptq-v2-order", "awq")
"""Those whose tests run every time; what is read of the others' headers does, too."""


@pytest.mark.parametrize(
    "name", [name if name in DAILY else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
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


@pytest.mark.parametrize("choice", ["cpu", pytest.param("reference", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "bound", "share"), [("int8", 0.1, 0.4), ("fp8", 0.3, 0.4), ("int4", 0.6, 0.4)])
def test_dense_weights_are_quantised_as_they_are_loaded(
    kind: str, bound: float, share: float, choice: str, tmp_path: Path, load: Callable[..., CausalLM], paged_loop: Any
) -> None:
    make("gptq", tmp_path / "codes").save_pretrained(tmp_path / "dense")
    dense = load(tmp_path / "dense", "cpu")
    wanted = paged_loop(dense).step([PROMPT])
    model = load(tmp_path / "dense", choice, quantize=kind)
    error = (paged_loop(model).step([PROMPT]) - wanted).norm() / wanted.norm()
    assert 1e-4 < error < bound
    assert model.packed and not dense.packed
    if choice == "cpu":
        assert model.weight_bytes < share * dense.weight_bytes


def test_what_is_quantised_already_is_quantised_again_only_from_dense(
    tmp_path: Path, load: Callable[..., CausalLM], paged_loop: Any
) -> None:
    make("gptq", tmp_path)
    with pytest.raises(WeightsError, match=r"quantize 'int8': the checkpoint is quantised already \(gptq int4\)"):
        load(tmp_path, quantize="int8")
    again = load(tmp_path, "cpu", quantize="int8", dtype="float32")
    wanted = paged_loop(load(tmp_path)).step([PROMPT])
    assert (paged_loop(again).step([PROMPT]) - wanted).norm() / wanted.norm() < 0.15


def test_routers_and_uneven_matrices_stay_dense() -> None:
    ops = kernels.table("cpu", "reference")
    assert quantizer("none", ops, "cpu") is None
    quantize = quantizer("int4", ops, "cpu")
    assert quantize is not None
    wide, uneven = torch.randn(4, 64), torch.randn(4, 40)
    assert quantize("model.layers.0.mlp.gate.weight", wide) is wide
    assert quantize("model.layers.0.mlp.up_proj.weight", uneven) is uneven
    kinds = {}
    for name in ("lm_head.weight", "model.layers.0.mlp.gate_proj.weight"):
        part = quantize(name, wide)
        assert isinstance(part, BlockQuantized)
        kinds[name] = part.format
    assert list(kinds.values()) == ["q8_0", "q4_1"]
    on_gpu = quantizer("int4", ops, "cuda")
    assert on_gpu is not None
    codes = on_gpu("model.layers.0.mlp.gate_proj.weight", wide)
    assert isinstance(codes, ScaledWeight) and (codes.format, codes.group) == ("int4", 64)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_codes_made_at_load_run_as_what_they_stand_for_on_the_gpu_s_kernels(
    kind: Quantize, tmp_path: Path, paged_loop: Any
) -> None:
    pytest.importorskip("triton")
    make("gptq", tmp_path / "codes").save_pretrained(tmp_path / "dense")
    ops = kernels.table("cpu", "triton", 1, activation_bits=16)
    checkpoint = SafetensorsCheckpoint(tmp_path / "dense")
    codes = quantizer(kind, ops, "cpu")
    assert codes is not None

    def made_dense(name: str, matrix: torch.Tensor) -> torch.Tensor:
        assert codes is not None
        return dequantize(codes(name, matrix))

    found = []
    for quantize in (codes, made_dense):
        loader = LayerLoader(checkpoint, ops, dtype=torch.float32, device="cpu", quantize=quantize)
        model = find_family(checkpoint.config.architecture, tmp_path).load(loader, checkpoint.config, 128)
        found.append((paged_loop(model).step([PROMPT[:7]]), loader.weight_bytes))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-3, atol=1e-3)
    assert found[0][1] < 0.35 * found[1][1]
