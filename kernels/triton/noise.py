"""The noise of sampling on the device: the hash and the Gumbel values of `kernels.sampling`, bit for bit.

All integer arithmetic is that of the host (splitmix64 of seed and position, then two rounds of lowbias32 over the token
id); the float64 logarithms agree with it to the last bit or two.
"""

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def noise_key(seed_state, position):
    """(low, high) uint32 of a row: splitmix64 of its seed's state (int64) and the position of the token (int32)."""
    golden = tl.full((1,), _GOLDEN, tl.uint64)
    x = seed_state.to(tl.uint64) + position.to(tl.uint64) * golden + golden
    x = (x ^ (x >> 30)) * tl.full((1,), _FIRST, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((1,), _SECOND, tl.uint64)
    x = x ^ (x >> 31)
    return x.to(tl.uint32), (x >> 32).to(tl.uint32)


@triton.jit
def _mix(x, addend):
    x = x ^ (x >> 16)
    x = x * tl.full((1,), 0x7FEB352D, tl.uint32) + addend
    x = x ^ (x >> 15)
    x = x * tl.full((1,), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def noise_hash(ids, low, high):
    """uint32 noise of token ids (int32)."""
    return _mix(_mix(ids.to(tl.uint32), tl.full((1,), 0, tl.uint32)) ^ low, high)


@triton.jit
def gumbel(noise):
    """float64 Gumbel(0, 1) values of uint32 noise."""
    return -tl.log(-tl.log((noise.to(tl.float64) + 0.5) * 2.3283064365386963e-10))


@triton.jit
def gumbel_estimate(noise):
    """The same in float32, within 2·10⁻⁵: near 1 the logarithm of the uniform number comes from its distance to 1."""
    uniform = (noise.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((noise ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = rest * (1.0 + rest * (0.5 + rest * (0.33333334 + rest * 0.25)))
    exponential = tl.where(rest < 0.015625, series, -tl.log(tl.minimum(uniform, 0.99)))
    return -tl.log(exponential)
