"""The 8-bit floats of KV pages: e4m3 without infinities, read and written by integer arithmetic on every architecture.

Ampere has no instruction for e4m3, and the byte spread over a half-precision number is already the value over 256
(exponent biases 7 and 15), so decoding is two shifts and the 256 goes into a scale that is applied anyway. Values,
subnormal ones included, are exact. Encoding rounds to nearest even and saturates at 448, as
`kernels.reference.quantize_e4m3` does, bit for bit.
"""

import triton
import triton.language as tl

E4M3_BIAS = tl.constexpr(256.0)
"""What `decode_e4m3` leaves out."""


@triton.jit
def decode_e4m3(byte):
    """float16 of value / 256 for a tile of bytes. The two NaN patterns, which `encode_e4m3` never writes, give ±480 /
    256."""
    wide = byte.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def encode_e4m3(value):
    """Bytes of a float32 tile; |value| > 448 becomes ±448, NaN becomes 448."""
    magnitude = tl.minimum(tl.abs(value), 448.0)
    bits = magnitude.to(tl.uint32, bitcast=True)
    # A normal number keeps 3 of 23 mantissa bits, rounded to nearest even; the exponent's bias goes from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2⁻⁶ the step is 2⁻⁹, which is one unit in the last place of 2¹⁴: adding 2¹⁴ rounds to it.
    small = (magnitude + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    byte = tl.where(magnitude < 0.015625, small, normal)
    sign = value.to(tl.uint32, bitcast=True) >> 31
    return (byte | (sign << 7)).to(tl.uint8)
