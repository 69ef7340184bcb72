"""Token embedding: rows of the vocabulary matrix, by the kernel of gather.py.

token_ids int32 [T]; matrix [V, H] in bfloat16, float16 or float32; returns [T, H] of the same type. An id outside
[0, V), such as the −1 that pads a step's tokens to its bucket, gives zeros.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kernels.triton.configuration import Configuration
from kernels.triton.gather import gather_rows


def embed(token_ids: Tensor, matrix: Tensor) -> Tensor:
    """Rows of the matrix, zeros for ids outside it. Raises ValueError for shapes that do not fit."""
    return gather_rows(matrix, token_ids)


def configurations() -> Iterator[Configuration]:
    """None of its own: those of gather.py serve."""
    yield from ()
