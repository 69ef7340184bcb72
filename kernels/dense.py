"""A weight that is a plain matrix: what the reference computes with, and the kernels where nothing is packed."""

from __future__ import annotations

from torch import Tensor


class DenseWeight:
    """A weight matrix [N, K] with its bias [N] of the same type, or None."""

    __slots__ = ("bias", "matrix")

    def __init__(self, matrix: Tensor, bias: Tensor | None) -> None:
        self.matrix = matrix
        self.bias = bias

    @property
    def in_features(self) -> int:
        """K."""
        return int(self.matrix.shape[1])

    @property
    def out_features(self) -> int:
        """N."""
        return int(self.matrix.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes held, the bias included."""
        return self.matrix.nbytes + (0 if self.bias is None else self.bias.nbytes)
