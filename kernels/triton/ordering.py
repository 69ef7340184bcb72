"""float32 numbers as integers in the same order, alone or packed with a token id so that one maximum finds both."""

import triton
import triton.language as tl

LARGEST_KEY = tl.constexpr(0x7F800000)
"""Key of +∞, which NaN shares"""

SMALLEST_KEY = tl.constexpr(-2139095041)
"""Key of −∞"""


@triton.jit
def order_key(x):
    """int32 that orders as x does; both zeros are one, NaN is +∞."""
    bits = tl.where(x != x, float("inf"), tl.where(x == 0.0, 0.0, x)).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The float32 that an int32 key stands for."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pack(key, ids):
    """int64 whose maximum is the largest key, the lowest id among equals."""
    return (key.to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))


@triton.jit
def packed_key(packed):
    """int32 key of a packed number."""
    return (packed >> 32).to(tl.int32)


@triton.jit
def packed_id(packed):
    """int32 id of a packed number."""
    return (0xFFFFFFFF - (packed & 0xFFFFFFFF)).to(tl.int32)
