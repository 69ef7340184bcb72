"""Small Llama checkpoints in every quantised layout, and transformers' model of the values that codes stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.weights import packers

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [40, 32]}

CASES: dict[str, tuple[packers.Packer, dict[str, Any]]] = {
    "fp8-blocks": (
        packers.fp8_blocks(40, 32, "weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [40, 32]},
    ),
    "fp8-tensor": (
        packers.fp8_rows(lambda rows: (), each=False),
        {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": ["lm_head"]},
    ),
    "fp8-channel": (packers.fp8_rows(lambda rows: (rows,), each=True), {"quant_method": "fp8"}),
    "compressed-fp8-channel": (
        packers.fp8_rows(lambda rows: (rows, 1), True, torch.bfloat16),
        packers.compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ),
    "compressed-fp8-tensor": (
        packers.fp8_rows(lambda rows: (1,), each=False),
        packers.compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    ),
    "compressed-fp8-blocks": (
        packers.fp8_blocks(40, 32, "weight_scale", torch.bfloat16),
        packers.compressed("float-quantized", BLOCKS),
    ),
    "compressed-int8": (
        packers.int8(0, symmetric=True),
        packers.compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    ),
    "compressed-int8-zeros": (
        packers.int8(32, symmetric=False),
        packers.compressed(
            "int-quantized",
            {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
        ),
    ),
    "compressed-int4": (packers.packed(4, 32, symmetric=True), packers.compressed("pack-quantized", INT4)),
    "compressed-int4-zeros": (
        packers.packed(4, 32, symmetric=False),
        packers.compressed("pack-quantized", {**INT4, "symmetric": False}),
    ),
    "compressed-int4-order": (
        packers.packed(4, 32, symmetric=True, shuffled=True),
        packers.compressed("pack-quantized", {**INT4, "actorder": "group"}),
    ),
    "compressed-packed-int8": (
        packers.packed(8, 32, symmetric=True),
        packers.compressed("pack-quantized", {**INT4, "num_bits": 8}),
    ),
    "gptq": (
        packers.gptq(4, 32, symmetric=True, less=1),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    ),
    "gptq-zeros": (
        packers.gptq(4, 32, symmetric=False, less=1),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
    ),
    "gptq-v2-order": (
        packers.gptq(4, 32, symmetric=False, less=0, shuffled=True),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "checkpoint_format": "gptq_v2"},
    ),
    "gptq-8-rows": (
        packers.gptq(8, -1, symmetric=True, less=1),
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": False},
    ),
    "gptq-8-zeros": (
        packers.gptq(8, 32, symmetric=False, less=1),
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": False},
    ),
    "awq": (
        packers.awq(32),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    ),
}  # fmt: skip


def make(name: str, folder: Path) -> Any:
    """Write the quantised checkpoint to folder; returns transformers' model of the values that its codes stand for."""
    pack, config = CASES[name]
    torch.manual_seed(sum(name.encode()))
    model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    tensors: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for key, value in model.named_parameters():
            value.normal_(1.0 if "norm" in key else 0.0, 0.2)
            if value.dim() == 2 and key.startswith("model.layers"):
                stored, values = pack(value.detach().clone())
                value.copy_(values)
                tensors |= {f"{key.removesuffix('weight')}{end}": tensor for end, tensor in stored.items()}
            else:
                tensors[key] = value.detach().clone()
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    data = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "quantization_config": config}
    (folder / "config.json").write_text(json.dumps(data))
    return model
