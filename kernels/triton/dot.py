"""Matrix products and narrowing of tiles: what must mean the same in the interpreter as on a tensor core.

The interpreter keeps bfloat16 as bare bits: it would multiply those, and it cuts float32 off where a GPU rounds to
nearest even. Interpreted, these functions do what the GPU does; compiled, they are the one instruction they name.
"""

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a·b in float32; a and b are of one type. PRECISION says how float32 inputs are multiplied ("ieee", "tf32",
    "tf32x3"); products of 16-bit inputs are exact."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def narrow(x, TYPE: tl.constexpr):
    """x, float32, in TYPE, rounded to nearest even."""
    if _INTERPRETED and tl.bfloat16 == TYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(TYPE)
