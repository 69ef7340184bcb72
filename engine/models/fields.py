"""Typed access to a parsed config.json, and the readers that families share. Every error names the file and the
field."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.weights.errors import WeightsError

_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh"}
"""Hugging Face's names where they are not ours."""


class Fields:
    """The fields of one object of a config.json."""

    def __init__(self, file: Path, data: dict[str, Any], eos_token_ids: tuple[int, ...] = ()) -> None:
        """eos_token_ids: what the folder's files together say ends an answer."""
        self.file = file
        self.data = data
        self.eos_token_ids = eos_token_ids

    def number(self, key: str, default: float | None = None) -> float:
        """A number, or the default where the field is absent or null. Raises WeightsError without either."""
        value = self.data.get(key)
        if value is None:
            value = default
        if value is None:
            raise WeightsError(f"{self.file}: field {key!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise WeightsError(f"{self.file}: field {key!r} should be a number, not {value!r}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number."""
        value = self.number(key, default)
        if value != int(value):
            raise WeightsError(f"{self.file}: field {key!r} should be a whole number, not {value!r}")
        return int(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.data.get(key, default)
        if not isinstance(value, bool):
            raise WeightsError(f"{self.file}: field {key!r} should be true or false, not {value!r}")
        return value

    def over(self, defaults: dict[str, Any]) -> Fields:
        """The same fields, with defaults for those that are absent."""
        return Fields(self.file, defaults | self.data, self.eos_token_ids)

    def under(self, values: dict[str, Any]) -> Fields:
        """The same fields, with these values in their place."""
        return Fields(self.file, self.data | values, self.eos_token_ids)

    def nested(self, key: str) -> Fields:
        """The object in a field, empty where it is absent or null."""
        value = self.data.get(key) or {}
        if not isinstance(value, dict):
            raise WeightsError(f"{self.file}: field {key!r} should be an object, not {value!r}")
        return Fields(self.file, value, self.eos_token_ids)


def shared(fields: Fields) -> dict[str, Any]:
    """What ModelConfig takes of every family, by its own field names; `|` a family's own over it."""
    data = fields.data
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", hidden // max(heads, 1))
    share = fields.number("partial_rotary_factor", rotation(fields).number("partial_rotary_factor", 1.0))
    activation, bos = str(data.get("hidden_act") or "silu"), data.get("bos_token_id")
    return {
        "architecture": data["architectures"][0],
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": head_dim,
        "rotary_dim": int(head_dim * share) if share != 1.0 else None,
        "rms_eps": fields.number("rms_norm_eps", 1e-6),
        "max_position": fields.integer("max_position_embeddings"),
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
        "qkv_bias": fields.flag("attention_bias", False),
        "activation": _ACTIVATIONS.get(activation, activation),
        "eos_token_ids": fields.eos_token_ids,
        "bos_token_id": bos if isinstance(bos, int) else None,
        "torch_dtype": str(data.get("dtype") or data.get("torch_dtype") or "float32"),
        **rope(fields),
    }


def rotation(fields: Fields) -> Fields:
    """The object with the rotary parameters, in both spellings of the file: rope_scaling, and rope_parameters
    (transformers 5), which has rope_theta, too."""
    return fields.nested("rope_parameters" if fields.data.get("rope_parameters") else "rope_scaling")


def rope(fields: Fields) -> dict[str, Any]:
    """rope_theta and rope_scaling."""
    nested = rotation(fields)
    parameters = nested.data
    theta = nested.number("rope_theta", fields.number("rope_theta", 10_000.0))
    # "type" is the older spelling of "rope_type"
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind in ("default", None):
        return {"rope_theta": theta, "rope_scaling": None}
    longest = fields.integer("max_position_embeddings")
    original = nested.integer("original_max_position_embeddings", longest)
    scaling = {**parameters, "rope_type": kind, "original_max_position_embeddings": original}
    if kind == "longrope" and original > 0:
        scaling["factor"] = nested.number("factor", longest / original)
    return {"rope_theta": theta, "rope_scaling": scaling}


def windows(fields: Fields, layers: Iterable[int], size: int | None = None) -> dict[str, Any]:
    """sliding_window and windowed_layers: as layer_types says, else `layers`. size: the family's own window where the
    file has none."""
    if fields.data.get("sliding_window", size) is None:
        return {"sliding_window": None, "windowed_layers": ()}
    types = fields.data.get("layer_types")
    if isinstance(types, list):
        layers = [index for index, kind in enumerate(types) if kind == "sliding_attention"]
    return {"sliding_window": fields.integer("sliding_window", size), "windowed_layers": tuple(layers)}
