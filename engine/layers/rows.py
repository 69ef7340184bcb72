"""The order of a projection's rows: what lets one rotation kernel serve families that pair other elements of a head.

A score is a sum over the elements of q and k, so both may be put in any order, if it is the same one. Elements that a
family leaves as they are stand where the table holds the angle 0.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kernels.interface import BlockQuantized, WeightPart


def take_rows(part: WeightPart, order: Tensor) -> WeightPart:
    """Rows `order` int64 [N] of a matrix, in whatever format it is."""
    if isinstance(part, Tensor):
        return part[order.to(part.device)]
    if isinstance(part, BlockQuantized):
        return replace(part, data=part.data[order.to(part.data.device)])
    at = order.to(part.codes.device)
    # Torch indexes bytes, not 8-bit floats
    codes = part.codes.view(torch.uint8)[at].view(part.codes.dtype)
    return replace(part, codes=codes, scales=part.scales[at], zeros=None if part.zeros is None else part.zeros[at])


def half_split_order(head_dim: int, rotated: int) -> Tensor:
    """Order int64 [D] of a head whose first `rotated` elements turn, i with i + rotated/2, so that the pairs stand D/2
    apart: those that turn first in each half, then those that do not."""
    half, still = rotated // 2, (head_dim - rotated) // 2
    elements = torch.arange(head_dim)
    first, second = elements[:half], elements[half:rotated]
    return torch.cat([first, elements[rotated : rotated + still], second, elements[rotated + still :]])


def heads_order(head_order: Tensor, turned: int, heads: int) -> Tensor:
    """Order of the rows of `heads` heads, the first `turned` of them in head_order [D], the others as they are."""
    head_dim = head_order.shape[0]
    offsets = torch.arange(heads)[:, None] * head_dim
    return (
        torch.where(torch.arange(heads)[:, None] < turned, head_order, torch.arange(head_dim)).add(offsets).reshape(-1)
    )
