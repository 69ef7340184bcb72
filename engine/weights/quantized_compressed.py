"""compressed-tensors checkpoints: float-quantized (e4m3), int-quantized (int8) and pack-quantized (4 or 8 bits in the
words of int32), each with scales for the tensor, rows, groups of inputs or blocks.

`config_groups` says for which modules: "Linear" for all, a module's name, or "re:" and a regular expression. Codes are
signed; packed ones are stored from 0 upwards, the lowest bits first along the inputs, zeros likewise along the outputs.
How activations were to be rounded is left to the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from engine.weights.quantized import FLOATS, Settings, Stored, expect, listed, module_of
from engine.weights.quantized_fp8 import block_size, check_scale, scaled
from engine.weights.quantized_packed import integers, order_of_groups, unpack_words
from kernels.interface import ScaledWeight

_FORMATS = ("float-quantized", "int-quantized", "pack-quantized", "naive-quantized", "dense")


@dataclass(frozen=True, slots=True)
class _Group:
    """What the modules of one group have in common."""

    targets: tuple[str, ...]
    kind: Literal["int", "float"]
    bits: int
    size: int
    """Inputs of a group; 0 for rows, the tensor or blocks"""
    block: tuple[int, int] | None
    symmetric: bool


class CompressedScheme:
    """See the head of this file."""

    def __init__(self, settings: Settings) -> None:
        """Raises WeightsError for a variation that is not supported."""
        format = settings.choice("format", _FORMATS)
        if settings.data.get("sparsity_config"):
            settings.inner("sparsity_config").choice("format", ("dense",), "dense")
        self._dense = settings.names("ignore")
        groups = settings.inner("config_groups")
        self._groups = [_group(groups.inner(name)) for name in groups.data]
        self.name = f"compressed-tensors {format}"

    def shape(self, stored: Stored, name: str) -> tuple[int, ...] | None:
        """See Scheme."""
        module = module_of(name)
        if module == name or listed(module, self._dense):
            return None
        packed = stored.header(f"{module}.weight_packed")
        found = packed or stored.header(name)
        if found is None or found[0] in FLOATS:
            return None
        group, at = self._of(stored, module, name), f"{module}.weight_packed" if packed else name
        wanted = "I32" if packed else "F8_E4M3" if group.kind == "float" else "I8"
        if found[0] != wanted or len(found[1]) != 2 or (packed and group.kind == "float"):
            raise stored.wrong(at, f"is {found[0]} {list(found[1])}, which is not {group.kind} of {group.bits} bits")
        matrix = (found[1][0], found[1][1])
        if packed:
            matrix = self._unpacked_shape(stored, module, matrix, 32 // group.bits)
        check_scale(stored, f"{module}.weight_scale", matrix, group.block, group.size)
        self._check_zeros(stored, module, matrix, group, packed is not None)
        return matrix

    def read(self, stored: Stored, name: str) -> ScaledWeight:
        """See Scheme."""
        module = module_of(name)
        group = self._of(stored, module, name)
        scale = stored.tensor(f"{module}.weight_scale")
        if stored.header(f"{module}.weight_packed") is None and (group.block or not group.size) and group.symmetric:
            return scaled(stored.tensor(name), scale, "fp8" if group.kind == "float" else "int8", group.block)
        if group.kind == "float":
            codes = stored.tensor(name)
            return ScaledWeight(codes, scale.contiguous(), "fp8", codes.shape[1], group.size)
        return self._integers(stored, module, group)

    def _integers(self, stored: Stored, module: str, group: _Group) -> ScaledWeight:
        """Signed integers, packed or not, from 0 upwards and on."""
        packed = stored.header(f"{module}.weight_packed") is not None
        if packed:
            rows, inputs = stored.tensor(f"{module}.weight_shape").tolist()
            codes = unpack_words(stored.tensor(f"{module}.weight_packed"), group.bits)[:, :inputs].contiguous()
        else:
            codes = stored.tensor(f"{module}.weight").view(torch.uint8) ^ 128
            rows, inputs = codes.shape
        zeros = None
        if not group.symmetric:
            zeros = stored.tensor(f"{module}.weight_zero_point")
            if packed:
                zeros = unpack_words(zeros.T.contiguous(), group.bits)[:, :rows].T
            else:
                zeros = zeros.reshape(-1, 1 if not group.size else zeros.shape[-1]).to(torch.int16) + 128
        scale = stored.tensor(f"{module}.weight_scale")
        scale = scale.reshape(-1, scale.shape[-1] if group.size else 1).expand(rows, -1).contiguous()
        if zeros is not None:
            zeros = zeros.expand(rows, -1)
        size, order, index = group.size or inputs, None, f"{module}.weight_g_idx"
        if packed and stored.header(index) is not None:
            order = order_of_groups(stored, index, size)
        bits = group.bits if packed else 8  # a byte for each, as few bits of it as there may be
        return integers(codes if order is None else codes[:, order], scale, zeros, bits, size, order)

    def _of(self, stored: Stored, module: str, name: str) -> _Group:
        """The module's group: one that names it before one for all."""
        for group in self._groups:
            if listed(module, [target for target in group.targets if target != "Linear"]):
                return group
        for group in self._groups:
            if "Linear" in group.targets:
                return group
        raise stored.wrong(name, "is quantised, but no group of 'quantization_config.config_groups' has it")

    def _unpacked_shape(self, stored: Stored, module: str, words: tuple[int, int], per_word: int) -> tuple[int, int]:
        expect(stored, f"{module}.weight_shape", ("I64", "I32"), (2,))
        rows, inputs = stored.tensor(f"{module}.weight_shape").tolist()
        if (rows, -(-inputs // per_word)) != words:
            raise stored.wrong(
                f"{module}.weight_packed", f"has shape {list(words)}, which does not hold {rows, inputs}"
            )
        if stored.header(f"{module}.weight_g_idx") is not None:
            expect(stored, f"{module}.weight_g_idx", ("I32",), (inputs,))
        return rows, inputs

    def _check_zeros(self, stored: Stored, module: str, matrix: tuple[int, int], group: _Group, packed: bool) -> None:
        if group.symmetric:
            return
        rows, groups = matrix[0], -(-matrix[1] // (group.size or matrix[1]))
        name = f"{module}.weight_zero_point"
        if packed:
            expect(stored, name, ("I32",), (-(-rows * group.bits // 32), groups))
        else:
            expect(stored, name, ("I8",), (1,), (rows, groups))


def _group(settings: Settings) -> _Group:
    weights = settings.inner("weights")
    kind = weights.choice("type", ("int", "float"))
    bits = weights.choice("num_bits", (4, 8) if kind == "int" else (8,))
    strategy = weights.choice("strategy", ("tensor", "channel", "group", "block"))
    weights.choice("dynamic", (False,), False)
    weights.choice("actorder", (None, "weight", "static", "group", "dynamic"))
    size = weights.data.get("group_size") if strategy == "group" else 0
    if type(size) is not int or size < 0 or size % 32 or (strategy == "group" and not size):
        raise weights.wrong("group_size", f"is {size!r}, should be a multiple of 32")
    block = block_size(weights, "block_structure") if strategy == "block" else None
    if strategy == "block" and block is None:
        raise weights.wrong("block_structure", "is missing")
    symmetric = weights.choice("symmetric", (True, False), True)
    targets = tuple(settings.names("targets")) or ("Linear",)
    return _Group(targets, kind, bits, size, block, symmetric)
