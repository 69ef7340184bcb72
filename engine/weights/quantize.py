"""Quantisation of dense matrices as they are loaded."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engine.config import Quantize
from kernels.interface import Ops, WeightPart
from kernels.quantize import BLOCK, quantize_blocks, quantize_codes

Quantizer = Callable[[str, Tensor], WeightPart]
"""(name, matrix [N, K]) → the matrix in fewer bytes, or as it is."""

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
"""The matrices that take 8 bits where others take 4."""
_ROUTERS = (".gate.weight", ".router.weight")


def quantizer(kind: Quantize, ops: Ops, device: str) -> Quantizer | None:
    """What `EngineConfig.quantize` asks for, in the layout that the operations of the device multiply; None for "none".

    Kept as they are: the routers of experts, which are small and decide much, and matrices whose inputs do not divide
    into blocks. The vocabulary's two matrices take 8 bits where the others take 4.
    """
    if kind == "none":
        return None
    blocks = device == "cpu" and ops.name != "triton"

    def quantized(name: str, matrix: Tensor) -> WeightPart:
        if name.endswith(_ROUTERS) or matrix.dim() != 2:
            return matrix
        four = kind == "int4" and name not in VOCABULARY
        if (blocks or four) and matrix.shape[1] % BLOCK:
            return matrix
        if blocks:
            return quantize_blocks(matrix, "q4_1" if four else "q8_0")
        return quantize_codes(matrix, "int4" if four else "fp8" if kind == "fp8" else "int8")

    return quantized
