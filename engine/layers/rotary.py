"""Rotary embedding tables: frequencies with every supported context extension, and their cosines and sines by position.

Formulas: RoPE (arXiv 2104.09864), linear interpolation (arXiv 2306.15595), YaRN (arXiv 2309.00071), and Llama 3.1's
scaling, as transformers' modeling_rope_utils computes them; computed in float32 like there, so that the tables agree to
the last bits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from engine.models.config import ModelConfig


def rotary_table(config: ModelConfig, positions: int, device: str = "cpu") -> Tensor:
    """Table float32 [positions, D]: row p holds cos(p·f) of the D/2 frequencies f, then sin(p·f)."""
    frequencies, magnitude = rotary_frequencies(config)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return (table * magnitude if magnitude != 1.0 else table).to(device)


def rotary_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Frequencies float32 [D/2] in radians per position, and the factor on cosines and sines.

    Dynamic NTK scaling changes nothing within the trained length, which is max_position there: longer sequences are
    refused, because its frequencies depend on the sequence's length and cached keys would have been rotated with other
    ones.
    """
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / (config.rope_theta**half)
    scaling = config.rope_scaling
    if scaling is None or scaling["rope_type"] == "dynamic":
        return plain, 1.0
    kind = scaling["rope_type"]
    if kind == "linear":
        return plain / scaling["factor"], 1.0
    if kind == "factors":
        return plain / torch.tensor(scaling["factors"], dtype=torch.float32), 1.0
    if kind == "llama3":
        return _llama3(plain, scaling), 1.0
    return _yarn(config, plain, scaling)


def _llama3(plain: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Keep high frequencies, divide low ones by the factor, and blend between."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    scaled = torch.where(wavelength > original / low, plain / factor, plain)
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, blended, scaled)


def _yarn(config: ModelConfig, plain: Tensor, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Interpolate the frequencies that turn less than beta_slow times within the trained length, keep those over
    beta_fast."""
    factor, original, dim = scaling["factor"], scaling["original_max_position_embeddings"], config.head_dim

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = dimension_of(scaling.get("beta_fast") or 32), dimension_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    frequencies = plain / factor * ramp + plain * (1 - ramp)
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        scale, scale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        both = bool(scale and scale_all)
        magnitude = _magnitude(factor, scale) / _magnitude(factor, scale_all) if both else _magnitude(factor, 1.0)
    return frequencies, float(magnitude)


def _magnitude(factor: float, weight: float | None) -> float:
    return 1.0 if factor <= 1 or weight is None else 0.1 * weight * math.log(factor) + 1.0
