"""Adapters as PEFT writes them: a folder with adapter_config.json and adapter_model.safetensors.

A matrix W of the base becomes W + s · B A, with A [r, K], B [N, r] and s = alpha / r, or alpha / √r where scaling is
rank-stabilised (Hu et al., arXiv 2106.09685; Kalajdzievski, arXiv 2312.03732). Everything that would make an adapter
mean something else is refused, by the name of the field or tensor.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.weights.errors import WeightsError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<matrix>.+)\.lora_(?P<side>[AB])\.weight")
_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Delta:
    """What an adapter adds to one matrix: B A, the scale within B."""

    a: Tensor
    """float32 [r, K]"""
    b: Tensor
    """float32 [N, r]"""


def read_adapter(folder: Path, shapes: Mapping[str, tuple[int, int]], *, most_rank: int) -> dict[str, Delta]:
    """Read an adapter for a model whose matrices have these shapes [N, K], by name. Raises WeightsError, naming the
    file, and the field or tensor."""
    config = folder / CONFIG
    settings = _settings(config)
    pairs = _pairs(folder / WEIGHTS)
    deltas: dict[str, Delta] = {}
    for name, sides in pairs.items():
        file = folder / WEIGHTS
        if name not in shapes:
            raise WeightsError(f"{file}: {name}: the model has no such matrix that an adapter can change")
        for side in "AB":
            if side not in sides:
                raise WeightsError(f"{file}: {name}.lora_{side}.weight is missing")
        rank = _pattern(config, settings, "rank_pattern", name, settings["r"])
        if not isinstance(rank, int) or rank < 1:
            raise WeightsError(f"{config}: rank_pattern: {rank!r} is no rank, a whole number of at least 1")
        rows, columns = shapes[name]
        for side, wanted in (("A", (rank, columns)), ("B", (rows, rank))):
            if tuple(sides[side].shape) != wanted:
                raise WeightsError(
                    f"{file}: {name}.lora_{side}.weight is {list(sides[side].shape)}, not {list(wanted)}"
                )
        if rank > most_rank:
            raise WeightsError(f"{config}: r {rank} is over max_lora_rank {most_rank}")
        alpha = _pattern(config, settings, "alpha_pattern", name, settings.get("lora_alpha"))
        if not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise WeightsError(f"{config}: lora_alpha must be a number, in alpha_pattern, too, not {alpha!r}")
        scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        deltas[name] = Delta(sides["A"].float(), sides["B"].float() * scale)
    if not deltas:
        raise WeightsError(f"{folder / WEIGHTS}: no lora_A and lora_B of any matrix in it")
    return deltas


def _settings(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{file}: cannot be read: {error}") from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        raise WeightsError(f"{file}: peft_type is not LORA")
    if not isinstance(settings.get("r"), int) or settings["r"] < 1:
        raise WeightsError(f"{file}: r must be a whole number of at least 1")
    if settings.get("bias", "none") != "none":
        raise WeightsError(f"{file}: bias {settings['bias']!r} is not served, only 'none'")
    for field in ("use_dora", "fan_in_fan_out", "lora_bias", "modules_to_save"):
        if settings.get(field):
            raise WeightsError(f"{file}: {field} is not served")
    return settings


def _pattern(config: Path, settings: Mapping[str, Any], field: str, name: str, default: object) -> object:
    """The value that a field's patterns give to a matrix: of the first key that its name ends with."""
    pattern = settings.get(field) or {}
    if not isinstance(pattern, dict):
        raise WeightsError(f"{config}: {field} must be an object")
    for key, value in pattern.items():
        try:
            fits = re.fullmatch(rf"(.*\.)?({key})", name)
        except re.error as error:
            raise WeightsError(f"{config}: {field}: {key!r} is no pattern: {error}") from error
        if fits:
            return value
    return default


def _pairs(file: Path) -> dict[str, dict[str, Tensor]]:
    """Matrix → side → tensor."""
    pairs: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                found = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
                if found is None:
                    raise WeightsError(f"{file}: {name} is no lora_A or lora_B of a matrix")
                tensor: Tensor = opened.get_tensor(name)
                if tensor.dtype not in _TYPES or not bool(torch.isfinite(tensor).all()):
                    raise WeightsError(f"{file}: {name} holds {tensor.dtype}, or values that are not finite")
                pairs.setdefault(found["matrix"], {})[found["side"]] = tensor
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{file}: cannot be read: {error}") from error
    return pairs
