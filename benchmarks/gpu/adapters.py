"""Adapters on the device's kernels: a step in which requests with and without one are mixed gives each the tokens of
the model into which its adapter was merged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.equality import Answer, compare, greedy, prompts_of
from benchmarks.gpu.families import SHAPE, TINY, make, open_core, serve
from benchmarks.gpu.supervise import Context

MODULES = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
RANK, ALPHA = 8, 16


def run(context: Context) -> None:
    """Two adapters over one base, each prompt with the first, the second and none."""
    from safetensors.torch import save_file

    lengths, tokens = ((5, 21), 2) if context.tiny else ((1, 33, 100), 32)
    shape = SHAPE | (TINY if context.tiny else {})
    prompts = prompts_of(shape["vocab_size"], lengths)
    base = make(context.work / "base", "LlamaForCausalLM", "LlamaConfig", shape)
    names = ("", "one", "two")
    merged = {"": {name: value.clone() for name, value in base.state_dict().items()}}
    for seed, name in enumerate(names[1:]):
        tensors, merged[name] = drawn(merged[""], seed)
        folder = context.work / name
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        said = {"peft_type": "LORA", "bias": "none", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(MODULES)}
        (folder / "adapter_config.json").write_text(json.dumps(said), "utf-8")
    named = tuple(f"{name}={context.work / name}" for name in names[1:])
    core = open_core(context, context.work / "base", lora=named, max_lora_rank=RANK)
    asked = [(prompt, name) for prompt in prompts for name in names]
    with torch.inference_mode():
        answers, _ = serve(core, [prompt for prompt, _ in asked], tokens, [name for _, name in asked])
    theirs: Any = base.to(context.device)
    for name in names:
        theirs.load_state_dict(merged[name])
        with torch.inference_mode():
            wrong = _wrong(context, theirs, name, asked, answers, tokens)
        title = f"adapter {name}" if name else "no adapter beside two"
        context.recorder.check(
            f"{title}: {tokens} greedy tokens of {len(prompts)} prompts", not wrong, "; ".join(wrong)
        )


def drawn(base: dict[str, Tensor], seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A random adapter's tensors as PEFT names them, and the weights with it merged in."""
    generator = torch.Generator().manual_seed(seed)
    tensors, merged = {}, dict(base)
    for key, weight in base.items():
        name = key.removesuffix(".weight")
        if name.endswith(MODULES):
            a = torch.randn(RANK, weight.shape[1], generator=generator) * 0.1
            b = torch.randn(weight.shape[0], RANK, generator=generator) * 0.1
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
            merged[key] = weight + ALPHA / RANK * (b @ a).to(weight.device)
    return tensors, merged


def _wrong(
    context: Context, theirs: Any, name: str, asked: Sequence[tuple[Sequence[int], str]], answers: Sequence[Answer],
    tokens: int,
) -> list[str]:  # fmt: skip
    found = []
    for (prompt, used), mine in zip(asked, answers, strict=True):
        if used == name:
            wrong, _ = compare(mine, *greedy(theirs, prompt, tokens, context.device))
            found += [wrong] if wrong else []
    return found
