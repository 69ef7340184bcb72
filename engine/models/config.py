"""ModelConfig: the shape of a decoder-only transformer, read from a Hugging Face config.json or built from GGUF
metadata."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.weights.errors import WeightsError

Shapes = dict[str, tuple[int, ...]]
"""Tensor name → shape."""

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
    "longrope": ("factor", "original_max_position_embeddings"),
    "factors": (),
}
"""Rope types that can be run and the numbers that each needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Dimensions and switches of one model. Sizes are in elements. A family with numbers of its own extends it."""

    architecture: str
    """The Hugging Face class name that a family is found by (`engine.models.family`)"""
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
    """Hugging Face's rope parameters with "rope_type" linear, dynamic, llama3, yarn or longrope, or {"rope_type":
    "factors", "factors": [D/2]}"""
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
    shared_kv: bool = False
    """Cached keys are the values, too: a layer has one tensor of them"""
    activation: str = "silu"
    attention_scale: float | None = None
    """Of the scores, where it is not D^-1/2"""
    attention_softcap: float = 0.0
    """A score x counts as cap · tanh(x / cap); 0 for as it is"""
    logit_softcap: float = 0.0
    """The same for the logits"""
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    """What counts as a norm's weight is this plus what the checkpoint has"""
    rotary_dim: int | None = None
    """The first elements of a head of q and k, which turn, where it is not all of them"""
    unrotated_layers: tuple[int, ...] = ()
    """Layers whose q and k do not turn at all"""
    local_rope_theta: float | None = None
    """Base of the rotation in windowed layers, unscaled, where it is not that of the others"""
    eos_token_ids: tuple[int, ...] = ()
    """Every token that ends an answer"""
    bos_token_id: int | None = None
    torch_dtype: str = "float32"
    """Type that the checkpoint was made in: float32, bfloat16 or float16"""

    def window(self, layer: int) -> int:
        """Sliding window of a layer, 0 for full attention."""
        return self.sliding_window or 0 if layer in self.windowed_layers else 0

    @property
    def turning(self) -> int:
        """Elements of a head that the rotation turns."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def check(self, file: Path) -> ModelConfig:
        """Return self if a model can have these dimensions. Raises WeightsError naming the file and the field."""
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
        if self.turning % 2 or not 0 < self.turning <= self.head_dim:
            raise WeightsError(f"{file}: the rotation turns {self.turning} of {self.head_dim} elements, needs pairs")
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
        for field in {"longrope": ("short_factor", "long_factor"), "factors": ("factors",)}.get(kind, ()):
            factors = scaling.get(field)
            if not isinstance(factors, list) or not all(isinstance(x, int | float) and x > 0 for x in factors):
                raise WeightsError(f"{file}: rope type {kind!r} needs a list of positive numbers {field!r}")
            if len(factors) != self.turning // 2:
                raise WeightsError(
                    f"{file}: rope needs {self.turning // 2} positive frequency factors {field!r}, not {len(factors)}"
                )
