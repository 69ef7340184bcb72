"""Plain-torch definitions of what meets codes with scales: activations in 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference import quantize_e4m3

E4M3_MAX = 448.0


def quantize_activations(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """e4m3 codes of x [M, K] and their scales float32 [M, groups]: the largest magnitude of each group of K becomes
    448."""
    groups = -(-x.shape[1] // group)
    wide = torch.nn.functional.pad(x.to(torch.float32), (0, groups * group - x.shape[1])).reshape(len(x), groups, group)
    scales = wide.abs().amax(dim=2).clamp(min=1e-12) / E4M3_MAX
    codes = quantize_e4m3(wide / scales[..., None]).flatten(1)[:, : x.shape[1]]
    return codes.contiguous(), scales


def dequantize_activations(codes: Tensor, scales: Tensor, group: int) -> Tensor:
    """float32 [M, K]."""
    return codes.to(torch.float32) * scales.repeat_interleave(group, dim=1)[:, : codes.shape[1]]
