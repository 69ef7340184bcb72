"""Codes with scales in plain torch: what a ScaledWeight stands for, exactly, and whether one is well formed."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.interface import FLOAT_TYPES, ScaledWeight
from kernels.mxfp4 import MX_BLOCK, e2m1_values, e8m0_values

_CODES = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn, "mxfp4": torch.uint8}
PACKED = ("int4", "mxfp4")
"""Formats with two codes in a byte."""
MIDDLE = 8
"""The zero of int4 codes that come without zeros."""


def check_scaled(part: ScaledWeight) -> None:
    """Raise ValueError when codes, scales, zeros or order do not fit the format."""
    if part.format not in _CODES:
        raise ValueError(f"unknown code format {part.format!r}; known: {', '.join(_CODES)}")
    packed, inputs = part.format in PACKED, part.in_features
    if inputs < 1 or part.group < 1 or (packed and (inputs % 2 or part.group % 2)):
        raise ValueError(
            f"{part.format} needs positive, even inputs and groups, not {inputs} in groups of {part.group}"
        )
    wanted = (part.out_features, inputs // 2 if packed else inputs)
    if part.codes.dtype != _CODES[part.format] or tuple(part.codes.shape) != wanted:
        raise ValueError(
            f"{part.format} codes of {inputs} inputs are {_CODES[part.format]} {list(wanted)}, not {part.codes.dtype}"
            f" {list(part.codes.shape)}"
        )
    groups = (part.out_features, -(-inputs // part.group))
    types = (torch.uint8,) if part.format == "mxfp4" else FLOAT_TYPES
    if part.scales.dtype not in types or tuple(part.scales.shape) != groups:
        raise ValueError(f"scales are {list(groups)}, not {part.scales.dtype} {list(part.scales.shape)}")
    if part.format == "mxfp4" and part.group != MX_BLOCK:
        raise ValueError(f"mxfp4 has groups of {MX_BLOCK}, not {part.group}")
    if part.zeros is not None and (
        part.format not in ("int8", "int4") or part.zeros.dtype != torch.int8 or tuple(part.zeros.shape) != groups
    ):
        raise ValueError(f"zeros of int8 or int4 codes are int8 {list(groups)}, not {list(part.zeros.shape)}")
    if part.order is not None and (part.order.dtype != torch.int64 or tuple(part.order.shape) != (inputs,)):
        raise ValueError(f"the order of inputs is int64 [{inputs}], not {part.order.dtype} {list(part.order.shape)}")


def nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., P] → uint8 [..., 2·P]: low half first."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).reshape(*packed.shape[:-1], -1)


def pack_nibbles(codes: Tensor) -> Tensor:
    """The inverse of `nibbles`: codes 0 to 15 of any integer type."""
    pairs = codes.to(torch.uint8).reshape(*codes.shape[:-1], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def centred(part: ScaledWeight) -> Tensor:
    """Codes less zeros, float32 [N, K], in the order in which the codes lie: exact."""
    if part.format == "mxfp4":
        return e2m1_values(part.codes)
    codes = (nibbles(part.codes) if part.format == "int4" else part.codes).to(torch.float32)
    if part.zeros is not None:
        return codes - per_element(part.zeros.to(torch.float32), part)
    return codes - MIDDLE if part.format == "int4" else codes


def scales_of(part: ScaledWeight) -> Tensor:
    """float32 [N, groups]."""
    return e8m0_values(part.scales) if part.format == "mxfp4" else part.scales.to(torch.float32)


def per_element(groups: Tensor, part: ScaledWeight) -> Tensor:
    """[N, groups] → [N, K]."""
    return groups.repeat_interleave(part.group, dim=1)[:, : part.in_features]


def dequantize_scaled(part: ScaledWeight) -> Tensor:
    """float32 [N, K], columns in the order of the inputs: (code − zero) · scale, rounded once."""
    values = centred(part) * per_element(scales_of(part), part)
    if part.order is None:
        return values
    out = torch.empty_like(values)
    out[:, part.order] = values
    return out
