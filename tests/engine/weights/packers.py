"""Writes quantised checkpoints from the layouts that their formats publish, element by element where that says most.

Each packer takes a matrix [N, K] and returns the tensors that stand for it, by the ends of their names, with the exact
values that they stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]
Packer = Callable[[Tensor], Packed]
FP8 = torch.float8_e4m3fn


def fp8_blocks(rows: int, columns: int, end: str, kind: torch.dtype = torch.float32) -> Packer:
    """A scale for each block of rows × columns."""

    def pack(matrix: Tensor) -> Packed:
        values, codes = torch.empty_like(matrix), torch.empty(matrix.shape, dtype=FP8)
        scales = torch.empty(-(-matrix.shape[0] // rows), -(-matrix.shape[1] // columns), dtype=kind)
        for r in range(scales.shape[0]):
            for c in range(scales.shape[1]):
                place = slice(r * rows, (r + 1) * rows), slice(c * columns, (c + 1) * columns)
                scales[r, c] = matrix[place].abs().max() / 448
                codes.view(torch.uint8)[place] = (matrix[place] / scales[r, c].float()).to(FP8).view(torch.uint8)
                values[place] = codes[place].float() * scales[r, c].float()
        return {"weight": codes, end: scales}, values

    return pack


def fp8_rows(shape: Callable[[int], tuple[int, ...]], each: bool, kind: torch.dtype = torch.float32) -> Packer:
    """A scale for each row or one for all, stored in the shape that a number of rows has."""

    def pack(matrix: Tensor) -> Packed:
        largest = matrix.abs().amax(1, keepdim=True) if each else matrix.abs().max().reshape(1, 1)
        scale = (largest / 448).to(kind)
        codes = (matrix / scale.float()).to(FP8)
        return {"weight": codes, "weight_scale": scale.reshape(shape(len(matrix)))}, codes.float() * scale.float()

    return pack


def rounded(matrix: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes from 0 upwards int [N, K], scales float16 and zeros int [N, groups], and the values."""
    x = matrix.reshape(len(matrix), -1, group)
    most = 2**bits - 1
    if symmetric:
        scale = (x.abs().amax(2, keepdim=True) * 2 / most).half().float()
        zero = torch.full_like(scale, 2 ** (bits - 1))
    else:
        low, high = x.amin(2, keepdim=True).clamp(max=0), x.amax(2, keepdim=True).clamp(min=0)
        scale = ((high - low) / most).half().float()
        zero = (-low / scale).round().clamp(1, most)
    codes = ((x / scale).round() + zero).clamp(0, most)
    values = ((codes - zero) * scale).reshape(matrix.shape)
    return codes.reshape(matrix.shape).int(), scale[..., 0].half(), zero[..., 0].int(), values


def words(codes: Tensor, bits: int) -> Tensor:
    """int [R, C] → int32 [R, C·bits/32], the first code in the lowest bits."""
    per = 32 // bits
    out = torch.zeros(codes.shape[0], -(-codes.shape[1] // per), dtype=torch.int64)
    for at in range(codes.shape[1]):
        out[:, at // per] |= codes[:, at].long() << (at % per * bits)
    return torch.where(out >= 2**31, out - 2**32, out).to(torch.int32)


def gptq(bits: int, group: int, *, symmetric: bool, less: int, shuffled: bool = False) -> Packer:
    """less: what is taken from a zero before it is stored. shuffled: inputs belong to groups in no order."""

    def pack(matrix: Tensor) -> Packed:
        inputs = matrix.shape[1]
        size = inputs if group < 0 else group
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        order = order if shuffled else torch.arange(inputs)
        codes, scale, zero, values = rounded(matrix[:, order], bits, size, symmetric)
        back = torch.argsort(order)
        tensors = {
            "qweight": words(codes[:, back], bits).T,
            "qzeros": words((zero - less).T, bits),
            "scales": scale.T,
            "g_idx": (back // size).int(),
        }
        return {name: tensor.contiguous() for name, tensor in tensors.items()}, values[:, back]

    return pack


def awq(group: int) -> Packer:
    """Outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight, the first in the lowest bits."""

    def columns(codes: Tensor) -> Tensor:
        eights = codes.reshape(codes.shape[0], -1, 8)
        return words(eights[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(codes.shape), 4)

    def pack(matrix: Tensor) -> Packed:
        codes, scale, zero, values = rounded(matrix, 4, group, symmetric=False)
        return {
            "qweight": columns(codes.T), "qzeros": columns(zero.T), "scales": scale.T.contiguous(),
        }, values  # fmt: skip

    return pack


def int8(group: int, *, symmetric: bool) -> Packer:
    """Signed bytes as they are, zeros likewise. group 0: rows."""

    def pack(matrix: Tensor) -> Packed:
        codes, scale, zero, values = rounded(matrix, 8, group or matrix.shape[1], symmetric)
        tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scale}
        if not symmetric:
            tensors["weight_zero_point"] = (zero - 128).to(torch.int8)
        return tensors, values

    return pack


def packed(bits: int, group: int, *, symmetric: bool, shuffled: bool = False) -> Packer:
    """compressed-tensors' words: codes along the inputs, zeros along the outputs."""

    def pack(matrix: Tensor) -> Packed:
        inputs = matrix.shape[1]
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(3))
        order = order if shuffled else torch.arange(inputs)
        back = torch.argsort(order)
        codes, scale, zero, values = rounded(matrix[:, order], bits, group, symmetric)
        tensors = {
            "weight_packed": words(codes[:, back], bits),
            "weight_scale": scale.to(torch.bfloat16),
            "weight_shape": torch.tensor(matrix.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zero.T, bits).T.contiguous()
        if shuffled:
            tensors["weight_g_idx"] = (back // group).int()
        factor = (scale.to(torch.bfloat16).float() / scale.float()).repeat_interleave(group, 1)
        return tensors, (values * factor)[:, back]

    return pack


def compressed(format: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    """quantization_config of compressed-tensors with one group for all."""
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, **more,
    }  # fmt: skip
