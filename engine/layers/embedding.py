"""Token embedding and the language-model head, one weight for both where the model ties them."""

from __future__ import annotations

from torch import Tensor

from engine.layers.linear import MergedLinear
from kernels.interface import Ops


class TokenEmbedding:
    """Rows of the (possibly packed) vocabulary matrix; `table` also serves as the head of a model with tied
    embeddings."""

    __slots__ = ("_embed", "table")

    def __init__(self, ops: Ops, table: MergedLinear) -> None:
        """table: the matrix [vocab, H]."""
        self.table = table
        self._embed = ops.embed

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int32 [T] → [T, H], memory of its own: the residual stream grows in it."""
        return self._embed(token_ids, self.table.weight)
