"""Family: what one kind of checkpoint owns of its way into the engine, and the table that finds it.

A new family is a module with a FAMILY and a line in MODULES. What it does not say it has from the shared decoder
(`engine.models.blocks`): most families read a few fields of their own and are done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.models.config import ModelConfig, Shapes
from engine.models.fields import Fields
from engine.models.shapes import decoder_shapes
from engine.weights.errors import WeightsError

if TYPE_CHECKING:
    from engine.layers.linear import LayerLoader
    from engine.models.blocks import DecoderModel

MODULES = {
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "GptOssForCausalLM": "gpt_oss",
    "LlamaForCausalLM": "llama",
    "LlamaModel": "llama",
    "MistralForCausalLM": "mistral",
    "MistralModel": "mistral",
    "MinistralForCausalLM": "mistral",
    "Phi3ForCausalLM": "phi3",
    "GraniteForCausalLM": "granite",
    "SmolLM3ForCausalLM": "smollm3",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2Model": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3Model": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""Hugging Face class name → the module here whose FAMILY runs it. Modules are imported when they are needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How checkpoints of one family are read, checked and built."""

    read: Callable[[Fields], ModelConfig]
    """The configuration out of a config.json: `engine.models.fields.shared` and what is the family's own. Raises
    WeightsError."""
    load: Callable[[LayerLoader, ModelConfig, int], DecoderModel]
    """(loader, configuration, length of the rotary table) → the model, mostly `engine.models.blocks.load_decoder`.
    Raises WeightsError."""
    shapes: Callable[[ModelConfig], Shapes] = decoder_shapes
    """Every tensor that a checkpoint must have, under Hugging Face names"""


def find_family(architecture: object, file: Path) -> Family:
    """The family of a Hugging Face class name. Raises WeightsError naming the file for one that cannot be run."""
    if not isinstance(architecture, str) or architecture not in MODULES:
        raise WeightsError(f"{file}: architecture {architecture!r} is not supported (supported: {', '.join(MODULES)})")
    family: Family = import_module(f"engine.models.{MODULES[architecture]}").FAMILY
    return family


def is_headless(architecture: object) -> bool:
    """True for a decoder alone, which has no head: it can embed."""
    return isinstance(architecture, str) and architecture.endswith("Model")


def config_from_json(file: Path, data: dict[str, Any], eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Build a ModelConfig from a parsed config.json of a supported family. Raises WeightsError naming the field."""
    names = data.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    family = find_family(name, file)
    if is_headless(name):
        data = data | {"tie_word_embeddings": True}
    return family.read(Fields(file, data, eos_token_ids)).check(file)


def tensor_shapes(config: ModelConfig, file: Path) -> Shapes:
    """Every tensor that the checkpoint of this model must have, under Hugging Face names, with its shape."""
    return find_family(config.architecture, file).shapes(config)
