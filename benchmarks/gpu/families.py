"""Families of models, tiny and of random weights, on the device's kernels: transformers' greedy tokens in float32, and
its hidden states as vectors."""

from __future__ import annotations

import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import kernels
from benchmarks.gpu.equality import TOP, Answer, compare, greedy, prompts_of
from benchmarks.gpu.supervise import Context
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.device import open_device
from engine.models.registry import load_model
from engine.sampling_params import SamplingParams
from engine.weights.sources import ModelSource
from engine.wire import Submit, pack_tokens, unpack_tokens

SHAPE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1
}  # fmt: skip
"""In the interpreter"""
FACTORS = {"short_factor": [1.0 + i / 8 for i in range(24)], "long_factor": [1.5 + i / 4 for i in range(24)]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 500.0, "original_max_position_embeddings": 16, **FACTORS}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Gemma 2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {"head_dim": 64, "sliding_window": 20, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 6.0},
    ),
    "Gemma 3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {"head_dim": 64, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Phi 4": ("Phi3ForCausalLM", "Phi3Config", {"rope_parameters": LONGROPE | {"partial_rotary_factor": 0.75}}),
    "Granite": ("GraniteForCausalLM", "GraniteConfig", {"residual_multiplier": 0.22, "attention_multiplier": 0.1}),
    "SmolLM 3": ("SmolLM3ForCausalLM", "SmolLM3Config", {"no_rope_layer_interval": 2}),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "Qwen 3 with experts": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {"head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 96},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {"head_dim": 64, "sliding_window": 20, "num_local_experts": 8, "num_experts_per_tok": 4,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    ),
    "DeepSeek V3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {"num_key_value_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32,
         "v_head_dim": 32, "q_lora_rank": 96, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4,
         "topk_group": 2, "moe_intermediate_size": 96, "first_k_dense_replace": 1},
    ),
}  # fmt: skip
"""Name → transformers' classes, and what of the configuration is not SHAPE."""
CLOSE = 1e-3
"""Largest difference of a vector's numbers in float32"""


def make(folder: Path, model: str, config: str, shape: dict[str, Any]) -> Any:
    """A model whose every parameter matters, saved to folder."""
    import transformers

    torch.manual_seed(7)
    made: Any = getattr(transformers, model)(getattr(transformers, config)(**shape)).eval()
    with torch.no_grad():
        for name, value in made.named_parameters():
            value.normal_(1.0 if "norm" in name and "Gemma" not in model else 0.0, 0.1)
    made.save_pretrained(folder)
    return made


def open_core(context: Context, folder: Path, **settings: Any) -> EngineCore:
    """An engine in this process."""
    config = EngineConfig(
        device="cpu" if context.tiny else "cuda", kernels="triton", dtype="float32", graphs="off", threads=1,
        kv_memory_mib=16, max_running=4, step_tokens=64, max_context=256, **settings,
    )  # fmt: skip
    ops = kernels.table(config.device, "triton", 1)
    model = load_model(ModelSource(folder, "safetensors", "tiny"), config, ops)
    return EngineCore(config, model, ops, device=open_device(config.device), free_bytes=1 << 28)


def serve(
    core: EngineCore, prompts: Sequence[Sequence[int]], tokens: int, adapters: Sequence[str] = ()
) -> tuple[list[Answer], list[bytes]]:
    """All prompts at once, greedily, each with its adapter: answers, and vectors where the model embeds. Raises
    RuntimeError."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=TOP)
    found, vectors = [Answer() for _ in prompts], [b""] * len(prompts)
    for index, prompt in enumerate(prompts):
        asked = Submit(
            request_id=str(index), prompt=pack_tokens(prompt), params=params,
            adapter=adapters[index] if adapters else "",
        )  # fmt: skip
        if refused := core.submit(asked):
            raise RuntimeError(refused.message)
    while core.has_work():
        for said in core.step():
            if said.error is not None:
                raise RuntimeError(said.error)
            answer = found[int(said.request_id)]
            answer.tokens += unpack_tokens(said.tokens)
            answer.logprobs += said.logprobs or []
            vectors[int(said.request_id)] = said.vector or b""
    return found, vectors


def run(context: Context) -> None:
    """Every family; in the interpreter one of them, and few tokens."""
    lengths, count = ((5, 21), 2) if context.tiny else ((1, 7, 33, 100), 48)
    shape = SHAPE | (TINY if context.tiny else {})
    prompts = prompts_of(shape["vocab_size"], lengths)
    with torch.inference_mode():
        for name, (model, config, more) in list(FAMILIES.items())[: 1 if context.tiny else None]:
            theirs = make(context.work / model, model, config, shape | more).to(context.device)
            answers, _ = serve(open_core(context, context.work / model), prompts, count)
            for prompt, mine in zip(prompts, answers, strict=True):
                wrong, _ = compare(mine, *greedy(theirs, prompt, count, context.device))
                context.recorder.check(f"{name}: {count} greedy tokens of a prompt of {len(prompt)}", not wrong, wrong)
        folder = context.work / "embedding"
        encoder = make(folder, "Qwen3Model", "Qwen3Config", shape | {"head_dim": 64}).to(context.device)
        _, vectors = serve(open_core(context, folder), prompts, 1)
        for prompt, vector in zip(prompts, vectors, strict=True):
            states = encoder(torch.tensor([list(prompt)], device=context.device)).last_hidden_state[0, -1]
            wanted = torch.nn.functional.normalize(states.float(), dim=0).cpu()
            apart = float((torch.tensor(array.array("f", vector)) - wanted).abs().max())
            context.recorder.check(f"embedding of {len(prompt)} tokens", apart <= CLOSE, f"{apart:.3g} apart")
