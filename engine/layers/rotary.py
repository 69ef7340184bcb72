"""Rotary embedding tables: frequencies with every supported context extension, and their cosines and sines by position.

Formulas: RoPE (arXiv 2104.09864), linear interpolation (arXiv 2306.15595), YaRN (arXiv 2309.00071), LongRoPE (arXiv
2402.13753) and Llama 3.1's scaling, as transformers' modeling_rope_utils computes them; computed in float32 like there,
so that the tables agree to the last bits.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.models.config import ModelConfig


def rotary_table(config: ModelConfig, positions: int, device: str = "cpu") -> Tensor:
    """Table float32 [positions, D]: row p holds cos(p·f) of the D/2 frequencies f, then sin(p·f). Where not all of a
    head turns, the rest of both halves has the angle 0."""
    frequencies, magnitude = rotary_frequencies(config)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    if magnitude != 1.0:
        cos, sin = cos * magnitude, sin * magnitude
    still = config.head_dim // 2 - frequencies.shape[0]
    cos, sin = functional.pad(cos, (0, still), value=1.0), functional.pad(sin, (0, still))
    return torch.cat([cos, sin], dim=-1).to(device)


def rotary_tables(config: ModelConfig, positions: int, device: str = "cpu") -> list[Tensor]:
    """The table of every layer; layers that rotate alike share one."""
    tables = [rotary_table(config, positions, device)] * config.num_layers
    if config.local_rope_theta is not None:
        near = dataclasses.replace(config, rope_theta=config.local_rope_theta, rope_scaling=None)
        local = rotary_table(near, positions, device)
        tables = [local if layer in config.windowed_layers else table for layer, table in enumerate(tables)]
    if config.unrotated_layers:
        still = torch.zeros_like(tables[0])
        still[:, : config.head_dim // 2] = 1.0
        tables = [still if layer in config.unrotated_layers else table for layer, table in enumerate(tables)]
    return tables


def rotary_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Frequencies float32 in radians per position, one for two elements of a head that turn, and the factor on cosines
    and sines.

    Dynamic NTK scaling changes nothing within the trained length, which is max_position there: longer sequences are
    refused, because its frequencies depend on the sequence's length and cached keys would have been rotated with other
    ones.
    """
    half = torch.arange(0, config.turning, 2, dtype=torch.float32) / config.turning
    plain = 1.0 / (config.rope_theta**half)
    scaling = config.rope_scaling
    if scaling is None or scaling["rope_type"] == "dynamic":
        return plain, 1.0
    kind = scaling["rope_type"]
    if kind == "linear":
        return plain / scaling["factor"], 1.0
    if kind == "factors":
        return plain / torch.tensor(scaling["factors"], dtype=torch.float32), 1.0
    if kind == "longrope":
        return _longrope(config, plain, scaling)
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


def _longrope(config: ModelConfig, plain: Tensor, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """One list of divisors where no sequence gets longer than the trained length, another where they may: keys in the
    cache must have been turned by one of them."""
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    divisors = scaling["long_factor" if config.max_position > original else "short_factor"]
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return plain / torch.tensor(divisors, dtype=torch.float32), float(magnitude)


def _yarn(config: ModelConfig, plain: Tensor, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Interpolate the frequencies that turn less than beta_slow times within the trained length, keep those over
    beta_fast."""
    factor, original, dim = scaling["factor"], scaling["original_max_position_embeddings"], config.turning

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
