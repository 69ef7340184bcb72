"""ModelConfig: the shape of a decoder-only transformer, read from a Hugging Face config.json or built from GGUF
metadata."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.weights.errors import WeightsError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Model families that can be run, by their Hugging Face class names."""

_POSITIVE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "max_position",
)  # fmt: skip

_MAX_LAYERS = 10_000

_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "factors": (),
}
"""Rope types that can be run and the numbers that each needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Dimensions and switches of one model. Sizes are in elements."""

    architecture: str
    """One of ARCHITECTURES"""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    """Hugging Face's rope parameters with "rope_type" linear, dynamic, llama3 or yarn, or {"rope_type": "factors",
    "factors": [D/2]}"""
    max_position: int
    """Most tokens of a sequence"""
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool = False
    """The attention's output projection has a bias (Llama's attention_bias)"""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k before the rotation"""
    sliding_window: int | None = None
    """A token sees this many of the latest keys, itself included, in the layers of `windowed_layers`"""
    windowed_layers: tuple[int, ...] = ()
    activation: str = "silu"
    eos_token_ids: tuple[int, ...] = ()
    """Every token that ends an answer"""
    bos_token_id: int | None = None
    torch_dtype: str = "float32"
    """Type that the checkpoint was made in: float32, bfloat16 or float16"""

    def window(self, layer: int) -> int:
        """Sliding window of a layer, 0 for full attention."""
        return self.sliding_window or 0 if layer in self.windowed_layers else 0

    def check(self, file: Path) -> ModelConfig:
        """Return self if a model can have these dimensions. Raises WeightsError naming the file and the field."""
        if self.architecture not in ARCHITECTURES:
            raise WeightsError(
                f"{file}: architecture {self.architecture!r} is not supported (supported: {', '.join(ARCHITECTURES)})"
            )
        for field in _POSITIVE:
            if getattr(self, field) <= 0:
                raise WeightsError(f"{file}: {field} is {getattr(self, field)}, should be positive")
        if self.num_layers > _MAX_LAYERS:
            raise WeightsError(f"{file}: num_layers is {self.num_layers}: the file is corrupt")
        if self.num_heads % self.num_kv_heads:
            raise WeightsError(
                f"{file}: {self.num_heads} heads are not a multiple of {self.num_kv_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise WeightsError(f"{file}: head_dim {self.head_dim} is odd; rotary embedding needs pairs")
        if not (self.rms_eps >= 0 and self.rope_theta > 0):
            raise WeightsError(f"{file}: rms_eps {self.rms_eps} or rope_theta {self.rope_theta} is out of range")
        if self.activation not in ("silu", "gelu_tanh"):
            raise WeightsError(f"{file}: activation {self.activation!r} is not supported (supported: silu, gelu_tanh)")
        if self.rope_scaling is not None:
            self._check_rope(file, self.rope_scaling)
        return self

    def _check_rope(self, file: Path, scaling: dict[str, Any]) -> None:
        kind = scaling.get("rope_type")
        if kind not in _ROPE_FIELDS:
            raise WeightsError(
                f"{file}: rope type {kind!r} is not supported (supported: default, {', '.join(_ROPE_FIELDS)})"
            )
        for field in _ROPE_FIELDS[kind]:
            value = scaling.get(field)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise WeightsError(f"{file}: rope type {kind!r} needs a positive {field!r}, not {value!r}")
        factors = scaling.get("factors", [1.0] * (self.head_dim // 2))
        if len(factors) != self.head_dim // 2 or min(factors) <= 0:
            raise WeightsError(
                f"{file}: rope needs {self.head_dim // 2} positive frequency factors, not {len(factors)}"
            )
        if scaling.get("partial_rotary_factor", 1.0) != 1.0:
            raise WeightsError(f"{file}: partial rotary embedding is not supported")

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that a checkpoint of this model must have, under Hugging Face names, with its shape."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            attention, mlp = prefix + "self_attn.", prefix + "mlp."
            shapes[prefix + "input_layernorm.weight"] = (hidden,)
            for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
                shapes[f"{attention}{name}.weight"] = (rows, hidden)
                if self.qkv_bias:
                    shapes[f"{attention}{name}.bias"] = (rows,)
            if self.qk_norm:
                shapes[attention + "q_norm.weight"] = shapes[attention + "k_norm.weight"] = (self.head_dim,)
            shapes[attention + "o_proj.weight"] = (hidden, q)
            if self.output_bias:
                shapes[attention + "o_proj.bias"] = (hidden,)
            shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
            for name, rows, columns in (
                ("gate_proj", inner, hidden),
                ("up_proj", inner, hidden),
                ("down_proj", hidden, inner),
            ):
                shapes[f"{mlp}{name}.weight"] = (rows, columns)
                if self.mlp_bias:
                    shapes[f"{mlp}{name}.bias"] = (rows,)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


class _Fields:
    """Typed access to a parsed config.json; every error names the file and the field."""

    def __init__(self, file: Path, data: dict[str, Any]) -> None:
        self.file = file
        self.data = data

    def number(self, key: str, default: float | None = None) -> float:
        value = self.data.get(key)
        if value is None:
            value = default
        if value is None:
            raise WeightsError(f"{self.file}: field {key!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise WeightsError(f"{self.file}: field {key!r} should be a number, not {value!r}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value):
            raise WeightsError(f"{self.file}: field {key!r} should be a whole number, not {value!r}")
        return int(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key, default)
        if not isinstance(value, bool):
            raise WeightsError(f"{self.file}: field {key!r} should be true or false, not {value!r}")
        return value


def config_from_json(file: Path, data: dict[str, Any], eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Build a ModelConfig from a parsed config.json of a supported family. Raises WeightsError naming the field.

    Both spellings of the rotary parameters are read: rope_theta with rope_scaling, and rope_parameters (transformers
    5).
    """
    fields = _Fields(file, data)
    names = data.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else None
    if architecture not in ARCHITECTURES:
        raise WeightsError(
            f"{file}: architecture {architecture!r} is not supported (supported: {', '.join(ARCHITECTURES)})"
        )
    if data.get("quantization_config"):
        method = data["quantization_config"].get("quant_method", "unknown")
        raise WeightsError(f"{file}: checkpoints quantised with {method!r} are not supported")
    heads, hidden, layers = (
        fields.integer("num_attention_heads"),
        fields.integer("hidden_size"),
        fields.integer("num_hidden_layers"),
    )
    theta, scaling = _rope(fields)
    window, windowed = _windows(fields, architecture, layers)
    is_llama = architecture == "LlamaForCausalLM"
    bos = data.get("bos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", hidden // max(heads, 1)),
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position=fields.integer("max_position_embeddings"),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=architecture == "Qwen2ForCausalLM" or fields.flag("attention_bias", False),
        output_bias=architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and fields.flag("attention_bias", False),
        mlp_bias=is_llama and fields.flag("mlp_bias", False),
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=window,
        windowed_layers=windowed,
        activation={"gelu_pytorch_tanh": "gelu_tanh"}.get(
            str(data.get("hidden_act", "silu")), str(data.get("hidden_act", "silu"))
        ),
        eos_token_ids=eos_token_ids,
        bos_token_id=bos if isinstance(bos, int) else None,
        torch_dtype=str(data.get("dtype") or data.get("torch_dtype") or "float32"),
    ).check(file)


def _rope(fields: _Fields) -> tuple[float, dict[str, Any] | None]:
    parameters = fields.data.get("rope_parameters") or fields.data.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise WeightsError(f"{fields.file}: the rotary parameters should be an object, not {parameters!r}")
    nested = _Fields(fields.file, parameters)
    theta = nested.number("rope_theta", fields.number("rope_theta", 10_000.0))
    # "type" is the older spelling of "rope_type"
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind in ("default", None):
        return theta, None
    original = parameters.get("original_max_position_embeddings") or fields.integer("max_position_embeddings")
    return theta, {**parameters, "rope_type": kind, "original_max_position_embeddings": original}


def _windows(fields: _Fields, architecture: str, layers: int) -> tuple[int | None, tuple[int, ...]]:
    """Sliding window and the layers that use it: all (Mistral), or as layer_types or max_window_layers say (Qwen)."""
    is_mistral = architecture == "MistralForCausalLM"
    # A Mistral configuration that leaves the field out means the family's own 4,096
    size = fields.data.get("sliding_window", 4096 if is_mistral else None)
    if size is None or (architecture.startswith("Qwen") and not fields.flag("use_sliding_window", False)):
        return None, ()
    window = fields.integer("sliding_window", 4096)
    types = fields.data.get("layer_types")
    if isinstance(types, list):
        return window, tuple(index for index, kind in enumerate(types) if kind == "sliding_attention")
    if architecture.startswith("Qwen"):
        return window, tuple(range(fields.integer("max_window_layers", 28), layers))
    return (window, tuple(range(layers))) if is_mistral else (None, ())
