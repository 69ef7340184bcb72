"""Checkpoints of tiny random models, one of each family, for tests of the whole engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 61
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3")


def tiny_checkpoint(folder: Path, family: str, *, positions: int = 96) -> Path:
    """Two layers with heads of 64; the last one of qwen2, both of mistral and the first of gemma see a window of 20
    tokens."""
    shape: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": positions, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(7)
    model: Any
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape, head_dim=64))
    elif family == "qwen2":
        shape["hidden_size"] = 128  # its heads share it evenly
        model = Qwen2ForCausalLM(Qwen2Config(**shape, use_sliding_window=True, sliding_window=20, max_window_layers=1))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=64, tie_word_embeddings=True))
    elif family == "gemma2":
        capped = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 6.0, "query_pre_attn_scalar": 32}
        model = Gemma2ForCausalLM(Gemma2Config(**shape, head_dim=64, sliding_window=20, **capped))
    elif family == "gemma3":
        windowed = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
        model = Gemma3ForCausalLM(Gemma3TextConfig(**shape, head_dim=64, **windowed))
    else:
        model = MistralForCausalLM(MistralConfig(**shape, head_dim=64, sliding_window=20))
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(1.0 if "norm" in name and "gemma" not in family else 0.0, 0.3)
    model.save_pretrained(folder)
    return folder
