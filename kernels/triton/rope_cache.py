"""Rotary embedding fused with the write of keys and values into their pages, and with the norm of q and k where a model
has one: one launch between the projection and attention, one read of the projection.

A program takes one token and a few heads: either of q, which go to the result, or of k and v, which go to the cache.
Halves of a head are loaded apart, so that a rotation is arithmetic between two registers. Everything is computed in
float32 and rounded once. Source of the pairing: GPT-NeoX, element i with i + D/2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.attention_shape import LATENT, AttentionShape, compiled_shapes, power_of_two
from kernels.triton.configuration import POINTERS, Configuration
from kernels.triton.dot import narrow
from kernels.triton.fp8 import encode_e4m3


@triton.jit
def _normalised(first, second, norm, i, inside, eps, D: tl.constexpr):
    """Both halves of heads over their root mean square, times norm [D]."""
    mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D
    scale = tl.rsqrt(mean + eps)[:, None]
    first = first * scale * tl.load(norm + i, mask=inside, other=0).to(tl.float32)[None, :]
    second = second * scale * tl.load(norm + D // 2 + i, mask=inside, other=0).to(tl.float32)[None, :]
    return first, second


@triton.jit
def _write(
    cache, at, first, second, scale, head, live, KV_HEADS: tl.constexpr, D: tl.constexpr, FP8: tl.constexpr
):  # fmt: skip
    """Store both halves of heads, as they are or over their head's scale in 8 bits."""
    if FP8:
        scales = tl.load(scale + head, mask=head < KV_HEADS, other=1.0)[:, None]
        tl.store(cache + at, encode_e4m3(tl.div_rn(first, scales)), mask=live)
        tl.store(cache + at + D // 2, encode_e4m3(tl.div_rn(second, scales)), mask=live)
    else:
        tl.store(cache + at, narrow(first, cache.dtype.element_ty), mask=live)
        tl.store(cache + at + D // 2, narrow(second, cache.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots", "q_norm", "k_norm", "k_scale", "v_scale"])
def rotate_and_write(
    out, keys, values, qkv, positions, slots, cos_sin, q_norm, k_norm, k_scale, v_scale, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr, FP8: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Program (token, tile): HEADS heads of q, or of k and v when tile is past those of q."""
    Q_TILES: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0)
    tile = tl.program_id(1)
    slot = tl.load(slots + token)
    # A padding row's position may be anything
    position = tl.where(slot >= 0, tl.load(positions + token), 0)
    i = tl.arange(0, HALF)
    inside = i < D // 2
    cos = tl.load(cos_sin + position * D + i, mask=inside, other=0)[None, :]
    sin = tl.load(cos_sin + position * D + D // 2 + i, mask=inside, other=0)[None, :]
    lane = tl.arange(0, HEADS)
    row = qkv + token.to(tl.int64) * ((Q_HEADS + (1 if SHARED else 2) * KV_HEADS) * D)
    if tile < Q_TILES:
        head = tile * HEADS + lane
        live = (head < Q_HEADS)[:, None] & inside[None, :]
        at = head[:, None] * D + i[None, :]
        first = tl.load(row + at, mask=live, other=0).to(tl.float32)
        second = tl.load(row + at + D // 2, mask=live, other=0).to(tl.float32)
        if q_norm is not None:
            first, second = _normalised(first, second, q_norm, i, inside, eps, D)
        at = token.to(tl.int64) * (Q_HEADS * D) + at
        tl.store(out + at, narrow(first * cos - second * sin, out.dtype.element_ty), mask=live)
        tl.store(out + at + D // 2, narrow(second * cos + first * sin, out.dtype.element_ty), mask=live)
    elif slot >= 0:
        head = (tile - Q_TILES) * HEADS + lane
        live = (head < KV_HEADS)[:, None] & inside[None, :]
        k_row = row + Q_HEADS * D + head[:, None] * D + i[None, :]
        first = tl.load(k_row, mask=live, other=0).to(tl.float32)
        second = tl.load(k_row + D // 2, mask=live, other=0).to(tl.float32)
        if k_norm is not None:
            first, second = _normalised(first, second, k_norm, i, inside, eps, D)
        page = (slot // PAGE).to(tl.int64)
        at = (page * (KV_HEADS * PAGE) + slot % PAGE) * D + head[:, None] * (PAGE * D) + i[None, :]
        _write(keys, at, first * cos - second * sin, second * cos + first * sin, k_scale, head, live, KV_HEADS, D, FP8)
        if not SHARED:
            v_row = k_row + KV_HEADS * D
            first = tl.load(v_row, mask=live, other=0).to(tl.float32)
            second = tl.load(v_row + D // 2, mask=live, other=0).to(tl.float32)
            _write(values, at, first, second, v_scale, head, live, KV_HEADS, D, FP8)


def rope_and_cache(
    qkv: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Rotate q and k, write k and v into their pages, as `kernels.interface.Ops.rope_and_cache` says; returns q.

    qkv [T, (Hq + 2·Hkv)·D] float32, bfloat16 or float16; positions, slots int32 [T]; cos_sin float32 [positions, D];
    caches [pages, Hkv, page_size, D] of those types or float8_e4m3fn, then with k_scale, v_scale float32 [Hkv]: what is
    written is value / scale, saturated. q_norm, k_norm [D] of any float type. All contiguous. A slot below 0 is
    padding: nothing is written for it and its position is not looked at. Where value_cache is key_cache, qkv has no v.
    Slots of a call are distinct. Raises ValueError for shapes and types that do not fit; what index tensors hold is not
    looked at.
    """
    _check(qkv, num_q_heads, num_kv_heads, positions, slots, cos_sin, key_cache, value_cache, k_scale, v_scale)
    tokens, head_dim = qkv.shape[0], key_cache.shape[3]
    for norm in (q_norm, k_norm):
        if norm is not None and tuple(norm.shape) != (head_dim,):
            raise ValueError(f"q_norm and k_norm must be [{head_dim}], not {list(norm.shape)}")
    out = torch.empty(tokens, num_q_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return out
    is_fp8 = key_cache.dtype == torch.float8_e4m3fn
    heads = heads_of_program(tokens)
    rotate_and_write[(tokens, -(-num_q_heads // heads) - (-num_kv_heads // heads))](
        out,
        key_cache.view(torch.uint8) if is_fp8 else key_cache,
        value_cache.view(torch.uint8) if is_fp8 else value_cache,
        qkv,
        positions,
        slots,
        cos_sin,
        q_norm,
        k_norm,
        k_scale if is_fp8 else None,
        v_scale if is_fp8 else None,
        float(eps),
        **_constants(num_q_heads, num_kv_heads, head_dim, key_cache.shape[2], heads),
        FP8=is_fp8,
        SHARED=value_cache is key_cache,
        num_warps=_warps(head_dim, heads),
        num_stages=1,
    )
    return out


def heads_of_program(tokens: int) -> int:
    """Heads that one program rotates: few in small steps, where programs are fewer than a GPU has room for."""
    return 4 if tokens <= 64 else 8


def _constants(q_heads: int, kv_heads: int, head_dim: int, page_size: int, heads: int) -> dict[str, int]:
    half = power_of_two(head_dim // 2)
    return {"Q_HEADS": q_heads, "KV_HEADS": kv_heads, "D": head_dim, "PAGE": page_size, "HEADS": heads, "HALF": half}


def _warps(head_dim: int, heads: int) -> int:
    """8 pairs of a thread."""
    return max(1, heads * power_of_two(head_dim // 2) // 256)


def _check(
    qkv: Tensor,
    q_heads: int,
    kv_heads: int,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    if key_cache.shape != value_cache.shape or key_cache.dtype != value_cache.dtype:
        raise ValueError("key and value cache must be equal in shape and type")
    if key_cache.dim() != 4 or key_cache.shape[1] != kv_heads or key_cache.shape[3] % 2:
        raise ValueError(f"a cache of {list(key_cache.shape)} does not fit {kv_heads} key/value heads")
    tokens, head_dim = qkv.shape[0], key_cache.shape[3]
    written = 1 if value_cache is key_cache else 2
    if tuple(qkv.shape) != (tokens, (q_heads + written * kv_heads) * head_dim) or cos_sin.shape[1:] != (head_dim,):
        raise ValueError(f"qkv {list(qkv.shape)} or cos_sin {list(cos_sin.shape)} do not fit heads of {head_dim}")
    if cos_sin.dtype != torch.float32:
        raise ValueError("cos_sin must be float32")
    for name, tensor in (("positions", positions), ("slots", slots)):
        if tuple(tensor.shape) != (tokens,) or tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be [{tokens}] of contiguous int32")
    for name, tensor in (("qkv", qkv), ("cos_sin", cos_sin), ("key_cache", key_cache), ("value_cache", value_cache)):
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            raise ValueError(f"{name} must be contiguous and aligned to 16 bytes")
    if key_cache.dtype == torch.float8_e4m3fn:
        for scale in (k_scale, v_scale):
            if scale is None or tuple(scale.shape) != (kv_heads,) or scale.dtype != torch.float32:
                raise ValueError("an 8-bit cache needs k_scale and v_scale, float32 [Hkv]")


def configurations() -> Iterator[Configuration]:
    """What a launch compiles to, for every shape that is compiled ahead of time, with norms and without."""
    for shape in compiled_shapes():
        for tokens in (1, 1024):
            for normed in (False, True):
                if not normed or shape.head_dim == 128:
                    yield _configuration(shape, heads_of_program(tokens), normed)
    for tokens in (1, 1024):
        yield _configuration(LATENT, heads_of_program(tokens), False, shared=True)


def _configuration(shape: AttentionShape, heads: int, normed: bool, *, shared: bool = False) -> Configuration:
    is_fp8 = shape.kv_dtype == torch.float8_e4m3fn
    float_pointer = POINTERS[shape.q_dtype]
    signature = dict.fromkeys(("out", "qkv"), float_pointer) | dict.fromkeys(("positions", "slots"), "*i32")
    signature |= dict.fromkeys(("keys", "values"), "*u8" if is_fp8 else POINTERS[shape.kv_dtype])
    signature |= {"cos_sin": "*fp32", "eps": "fp32"}
    norms, scales = dict.fromkeys(("q_norm", "k_norm"), float_pointer), dict.fromkeys(("k_scale", "v_scale"), "*fp32")
    constants: dict[str, object] = {"FP8": is_fp8, "SHARED": shared}
    for given, arguments in ((normed, norms), (is_fp8, scales)):
        if given:
            signature |= arguments
        else:
            constants |= dict.fromkeys(arguments)
    constants |= _constants(shape.q_heads, shape.kv_heads, shape.head_dim, shape.page_size, heads)
    return Configuration(
        kernel=rotate_and_write,
        name=f"{shape.name} heads {heads}" + " normed" * normed,
        signature=signature,
        constants=constants,
        unaligned=("positions", "slots", "q_norm", "k_norm", "k_scale", "v_scale"),
        num_warps=_warps(shape.head_dim, heads),
        num_stages=1,
        hot=shape.name == "bfloat16 d128 32/8 p16",
    )
