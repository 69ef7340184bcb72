"""Families with a mixture of experts against transformers' own implementation, on small random checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from engine.models.registry import CausalLM
from engine.weights.errors import WeightsError
from kernels.mxfp4 import dequantize_mxfp4
from tests.engine.models.test_families import PROMPT, SMALL, YARN, expected_logits, expected_tokens

LATENT: dict[str, int] = {
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "moe_intermediate_size": 24,
}
CASES: dict[str, tuple[Any, Any]] = {
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SMALL, num_local_experts=5, num_experts_per_tok=2)),
    "mixtral-window": (
        MixtralForCausalLM,
        MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=3, sliding_window=9),
    ),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **SMALL, head_dim=32, moe_intermediate_size=40, num_experts=12, num_experts_per_tok=4, norm_topk_prob=True
        ),
    ),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig(
            **SMALL,
            head_dim=32,
            sliding_window=9,
            num_local_experts=6,
            num_experts_per_tok=3,
            rope_parameters=YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        ),
    ),
    "deepseek": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(
            **{**SMALL, "num_key_value_heads": 4},
            **LATENT,
            q_lora_rank=20,
            n_routed_experts=12,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        ),
    ),
    "deepseek-plain": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(
            **{**SMALL, "num_key_value_heads": 4},
            **LATENT,
            q_lora_rank=None,
            n_routed_experts=6,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            n_shared_experts=2,
            first_k_dense_replace=0,
            norm_topk_prob=False,
            rope_interleave=False,
            attention_bias=False,
        ),
    ),
    "qwen3-moe-some-layers": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **{**SMALL, "num_hidden_layers": 4},
            head_dim=16,
            moe_intermediate_size=24,
            num_experts=6,
            num_experts_per_tok=2,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
        ),
    ),
}


SLOW = ("mixtral-window", "qwen3-moe-some-layers")
INTERPRETED = ["qwen3-moe", "gpt-oss", "deepseek"]
"""One of each kind: the interpreter is slow."""


def make(name: str, folder: Path) -> Any:
    """A model whose every parameter matters, saved to folder."""
    kind, config = CASES[name]
    torch.manual_seed(sum(name.encode()))
    model: Any = kind(config)
    model.eval()
    with torch.no_grad():
        for key, value in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" not in key:
                value.normal_(1.0 if "norm" in key else 0.0, 0.2)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]
)
def test_family_is_transformers_own(
    name: str,
    tmp_path: Path,
    load: Callable[..., CausalLM],
    paged_loop: Any,
    greedy_tokens: Callable[..., list[int]],
) -> None:
    theirs = make(name, tmp_path)
    wanted = expected_logits(theirs)
    defined, ours = load(tmp_path, "reference"), load(tmp_path, "cpu")
    for model in (defined, ours):
        torch.testing.assert_close(paged_loop(model).step([PROMPT]), wanted, atol=1e-4, rtol=1e-4)
    assert greedy_tokens(ours, PROMPT, 64) == expected_tokens(theirs)
    assert defined.weight_bytes == 4 * sum(value.numel() for value in theirs.state_dict().values())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted_kernels_give_the_same_logits(
    name: str, tmp_path: Path, load: Callable[..., CausalLM], paged_loop: Any
) -> None:
    """A prompt's first tokens and one more, through every kernel that a GPU runs."""
    make(name, tmp_path)
    mine, wanted = (paged_loop(load(tmp_path, choice)) for choice in ("triton", "reference"))
    for piece in (PROMPT[:3], PROMPT[3:4]):
        torch.testing.assert_close(mine.step([piece]), wanted.step([piece]), atol=1e-4, rtol=1e-4)


def test_sequences_of_one_step_do_not_touch_each_other(
    tmp_path: Path, load: Callable[..., CausalLM], paged_loop: Any
) -> None:
    """A decode, a chunk of a prompt and a fresh prompt together, bit for bit as alone."""
    make("qwen3-moe", tmp_path)
    ours = load(tmp_path, "cpu")
    pieces = [PROMPT[:30], PROMPT[5:25], PROMPT[10:15]]
    together = paged_loop(ours, sequences=3)
    together.step([pieces[0][:-1], pieces[1][:8], []])
    logits = together.step([pieces[0][-1:], pieces[1][8:], pieces[2]], rows=[0, 12, 17])
    for row, piece in enumerate(pieces):
        assert torch.equal(paged_loop(ours).step([piece], rows=[len(piece) - 1])[0], logits[row])


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("mixtral", "num_experts_per_tok", 6, "6 of 5 experts"),
        ("mixtral", "num_local_experts", "many", "num_local_experts"),
        ("qwen3-moe-some-layers", "moe_intermediate_size", None, "moe_intermediate_size"),
        ("qwen3-moe-some-layers", "decoder_sparse_step", 0, "decoder_sparse_step"),
        ("mixtral", "intermediate_size", 95, r"experts\.0\.w1\.weight"),
    ],
    ids=str,
)
def test_a_configuration_that_does_not_fit_is_refused_by_name(
    name: str, field: str, value: object, message: str, tmp_path: Path, load: Callable[..., CausalLM]
) -> None:
    make(name, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(WeightsError, match=message):
        load(tmp_path)


def test_mxfp4_experts_are_the_numbers_that_they_stand_for(
    tmp_path: Path, load: Callable[..., CausalLM], paged_loop: Any
) -> None:
    theirs = make("gpt-oss", tmp_path)
    draw = torch.Generator().manual_seed(3)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        codes = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(120, 126, (experts, outputs, inputs // 32), generator=draw, dtype=torch.uint8)
        stored |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        with torch.no_grad():
            theirs.get_parameter(name).copy_(dequantize_mxfp4(codes, scales).transpose(1, 2))
    save_file(stored, file)
    config = json.loads((tmp_path / "config.json").read_text())
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    ours = load(tmp_path)
    torch.testing.assert_close(paged_loop(ours).step([PROMPT]), expected_logits(theirs), atol=1e-4, rtol=1e-4)
    native = load(tmp_path, "cpu")
    assert native.packed and native.weight_bytes < ours.weight_bytes
    best = paged_loop(native).step([PROMPT]).argmax(dim=-1) == expected_logits(theirs).argmax(dim=-1)
    assert float(best.float().mean()) > 0.9


def test_an_activation_of_another_shape_is_refused(tmp_path: Path, load: Callable[..., CausalLM]) -> None:
    make("gpt-oss", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"swiglu_limit": 5.0}))
    with pytest.raises(WeightsError, match=r"swiglu_limit.*is 5\.0; only 7\.0"):
        load(tmp_path)
