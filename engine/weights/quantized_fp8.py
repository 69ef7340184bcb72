"""FP8 checkpoints, `quant_method: fp8`: e4m3 codes in `X.weight` under scales in `X.weight_scale_inv` (DeepSeek's name
for blocks, which despite it are multiplied) or `X.weight_scale`, one for the tensor, one for each row, or one for each
block of `weight_block_size`.

Activations are rounded by the kernels, each token by its own largest value; scales that were calibrated in advance
(`activation_scheme: static`, `input_scale`) are not needed for that and not read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.weights.quantized import FLOATS, Settings, Stored, expect, listed, module_of
from kernels.interface import CodeFormat, ScaledWeight

Shape = tuple[int, ...]


class Fp8Scheme:
    """See the head of this file."""

    name = "fp8"

    def __init__(self, settings: Settings) -> None:
        """Raises WeightsError for a variation that is not supported."""
        settings.choice("activation_scheme", ("dynamic", "static"), "dynamic")
        settings.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        self._block = block_size(settings, "weight_block_size")
        self._dense = settings.names("modules_to_not_convert")

    def shape(self, stored: Stored, name: str) -> Shape | None:
        """See Scheme."""
        module = module_of(name)
        found = stored.header(name)
        if found is None or found[0] in FLOATS or listed(module, self._dense):
            return None
        if found[0] != "F8_E4M3" or len(found[1]) != 2:
            raise stored.wrong(name, f"is {found[0]} {list(found[1])}, should be a matrix of F8_E4M3 or floats")
        check_scale(stored, self._scale(stored, module), found[1], self._block)
        return found[1]

    def read(self, stored: Stored, name: str) -> ScaledWeight:
        """See Scheme."""
        scale = stored.tensor(self._scale(stored, module_of(name)))
        return scaled(stored.tensor(name), scale, "fp8", self._block)

    def _scale(self, stored: Stored, module: str) -> str:
        inverse = f"{module}.weight_scale_inv"
        return inverse if stored.header(inverse) is not None else f"{module}.weight_scale"


def block_size(settings: Settings, key: str) -> tuple[int, int] | None:
    """Rows and columns under one scale; None where scales are for rows or all. Raises WeightsError."""
    value = settings.data.get(key)
    if value is None:
        return None
    whole = isinstance(value, list) and len(value) == 2 and all(type(side) is int and side > 0 for side in value)
    if not whole or value[1] % 32:
        raise settings.wrong(key, f"is {value!r}, should be two numbers, the second a multiple of 32")
    return value[0], value[1]


def check_scale(stored: Stored, name: str, matrix: Shape, block: tuple[int, int] | None, group: int = 0) -> None:
    """Raise WeightsError unless scales fit a matrix [N, K]: of blocks, of groups along K, or of rows or all."""
    rows, inputs = matrix
    if block is not None:
        expect(stored, name, FLOATS, (-(-rows // block[0]), -(-inputs // block[1])))
    elif group:
        expect(stored, name, FLOATS, (rows, -(-inputs // group)))
    else:
        expect(stored, name, FLOATS, (), (1,), (1, 1), (rows,), (rows, 1))


def scaled(codes: Tensor, scale: Tensor, format: CodeFormat, block: tuple[int, int] | None) -> ScaledWeight:
    """Codes [N, K] with a scale for each row, spread from what `check_scale` lets pass without groups."""
    rows, inputs = codes.shape
    scale = scale.to(torch.float32)
    if block is None:
        return ScaledWeight(codes, scale.reshape(-1, 1).expand(rows, 1).contiguous(), format, inputs, inputs)
    spread = scale.repeat_interleave(block[0], dim=0)[:rows].contiguous()
    return ScaledWeight(codes, spread, format, inputs, min(block[1], inputs))
