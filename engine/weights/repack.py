"""Super-block formats as simple blocks of 32, so that kernels that know three formats can run files that use five.

Q4_K → q4_1 keeps every 4-bit code; a sub-block's scale d·sc and minimum −dmin·m are rounded to fp16 (relative error
2⁻¹¹). Q6_K → q8_0 rounds 6-bit codes under two scales per 32 to 8-bit codes under one: at most 1/254 of the block's
largest value. Layouts: ggml-common.h, block_q4_K and block_q6_K.
"""

from __future__ import annotations

import gguf
import numpy as np
import torch
from torch import Tensor

from kernels.interface import BlockQuantized

_K = 256
_HALF_MAX = 65_504.0


def repack_k_quant(rows: Tensor, format: str, in_features: int) -> BlockQuantized:
    """Rows of Q4_K or Q6_K super-blocks, uint8 [N, bytes], → the same values as q4_1 or q8_0 blocks."""
    if format == "Q4_K":
        return BlockQuantized(_q4_k_to_q4_1(rows), "q4_1", in_features)
    return BlockQuantized(_q6_k_to_q8_0(rows), "q8_0", in_features)


def _q4_k_to_q4_1(rows: Tensor) -> Tensor:
    count = rows.shape[0]
    blocks = rows.numpy().reshape(count, -1, 144)
    d = blocks[..., 0:2].copy().view(np.float16).astype(np.float32)
    dmin = blocks[..., 2:4].copy().view(np.float16).astype(np.float32)
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    # Eight 6-bit scales and eight 6-bit minima in 12 bytes: the last four of each borrow the top bits of the first four
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=-1)
    # 32 bytes hold sub-block 2i in their low nibbles and 2i + 1 in their high ones; q4_1 pairs j with j + 16 of one
    # sub-block
    quants = blocks[..., 16:].reshape(count, -1, 4, 32)
    codes = np.stack([quants & 15, quants >> 4], axis=-2).reshape(count, -1, 8, 32)
    out = np.empty((*codes.shape[:-1], 20), dtype=np.uint8)
    out[..., 0:2] = _half(d * scales)
    out[..., 2:4] = _half(-dmin * minima)
    out[..., 4:] = codes[..., :16] | (codes[..., 16:] << 4)
    return torch.from_numpy(out.reshape(count, -1))


def _q6_k_to_q8_0(rows: Tensor) -> Tensor:
    count = rows.shape[0]
    values = gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType.Q6_K).astype(np.float32)
    blocks = values.reshape(count, -1, 32)
    scale = (np.abs(blocks).max(axis=-1, keepdims=True) / 127.0).astype(np.float16).astype(np.float32)
    codes = np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0)
    out = np.empty((*blocks.shape[:-1], 34), dtype=np.uint8)
    out[..., 0:2] = _half(scale[..., 0])
    out[..., 2:] = np.clip(np.rint(codes), -127, 127).astype(np.int8).view(np.uint8)
    return torch.from_numpy(out.reshape(count, -1))


def _half(values: np.ndarray) -> np.ndarray:
    """float32 [...] → its fp16 bytes, uint8 [..., 2]."""
    halves: np.ndarray = np.clip(values, -_HALF_MAX, _HALF_MAX).astype(np.float16)[..., None]
    return halves.view(np.uint8)
