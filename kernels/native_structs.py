"""The native library's structs and signatures as ctypes sees them; the C side is kernels/native/headrace.h."""

from __future__ import annotations

import ctypes

_ptr, _i32, _i64, _f32 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float


class Segment(ctypes.Structure):
    """hr_segment of headrace.h."""

    _fields_ = (("kind", ctypes.c_int32), ("rows", ctypes.c_int32), ("data", _ptr))


class WeightStruct(ctypes.Structure):
    """hr_weight of headrace.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("in_features", "out_features", "segments", "planes")),
        ("segment", ctypes.POINTER(Segment)),
        ("bias", _ptr),
    )


class RopeArgs(ctypes.Structure):
    """hr_rope_args of headrace.h."""

    _fields_ = (
        *((name, _ptr) for name in ("qkv", "positions", "slots", "cos_sin", "q_norm", "k_norm", "keys", "values", "q")),
        *((name, _i64) for name in ("tokens", "max_positions", "num_slots")),
        *((name, ctypes.c_int32) for name in ("q_heads", "kv_heads", "head_dim", "page_size", "kv_kind")),
        ("eps", _f32),
    )


class AttentionArgs(ctypes.Structure):
    """hr_attention_args of headrace.h."""

    _fields_ = (
        *((name, _ptr) for name in ("q", "keys", "values", "q_starts", "kv_lens", "page_table", "out")),
        *((name, _i64) for name in ("tokens", "num_pages")),
        *((name, ctypes.c_int32) for name in ("seqs", "table_width", "q_heads", "kv_heads", "head_dim", "page_size")),
        *((name, ctypes.c_int32) for name in ("kv_kind", "window")),
        *((name, _f32) for name in ("scale", "softcap")),
        ("sinks", _ptr),
    )


class RouteArgs(ctypes.Structure):
    """hr_route_args of headrace.h."""

    _fields_ = (
        *((name, _ptr) for name in ("logits", "bias", "ids", "weights")),
        ("tokens", _i64),
        *((name, ctypes.c_int32) for name in ("experts", "top_k", "groups", "top_groups", "sigmoid", "normalize")),
        ("scale", _f32),
    )


class ExpertsArgs(ctypes.Structure):
    """hr_experts_args of headrace.h."""

    _fields_ = (
        *((name, _ptr) for name in ("x", "ids", "scales", "gate_up", "down", "out")),
        ("tokens", _i64),
        *((name, ctypes.c_int32) for name in ("top_k", "experts", "activation")),
    )


class LayerStruct(ctypes.Structure):
    """hr_layer of headrace.h."""

    _fields_ = (
        *((name, _ptr) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, _ptr) for name in ("qkv", "output", "gate_up", "down")),
        ("window", _i64),
    )


class DecoderStruct(ctypes.Structure):
    """hr_decoder of headrace.h."""

    _fields_ = (
        *((name, _ptr) for name in ("embedding", "head", "norm", "cos_sin")),
        ("layer", ctypes.POINTER(LayerStruct)),
        ("max_positions", _i64),
        *((name, ctypes.c_int32) for name in ("layers", "q_heads", "kv_heads", "head_dim", "gelu")),
        ("eps", _f32),
        ("scale", _f32),
    )


class StepStruct(ctypes.Structure):
    """hr_step of headrace.h."""

    _fields_ = (
        *((name, _ptr) for name in ("token_ids", "positions", "slots", "q_starts", "kv_lens", "page_table")),
        *((name, _ptr) for name in ("logit_rows", "keys", "values", "logits")),
        *((name, _i64) for name in ("tokens", "rows", "num_pages")),
        *((name, ctypes.c_int32) for name in ("seqs", "table_width", "page_size", "kv_kind")),
    )


SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "hr_lanes": (_i32, ()),
    "hr_pool_new": (_ptr, (_i32,)),
    "hr_pool_free": (None, (_ptr,)),
    "hr_packed_bytes": (_i64, (_i32, _i64, _i64)),
    "hr_pack": (None, (_i32, _i64, _i64, _ptr, _ptr)),
    "hr_linear": (_i32, (_ptr, _ptr, _ptr, _i64, _ptr)),
    "hr_embed": (_i32, (_ptr, _ptr, _ptr, _i64, _ptr)),
    "hr_rms_norm": (_i32, (_ptr, _ptr, _ptr, _ptr, _i64, _i64, _f32, _ptr)),
    "hr_gated": (_i32, (_ptr, _ptr, _i64, _i64, _i32, _ptr)),
    "hr_rope_cache": (_i32, (_ptr, _ptr)),
    "hr_attention": (_i32, (_ptr, _ptr)),
    "hr_route": (_i32, (_ptr, _ptr)),
    "hr_experts": (_i32, (_ptr, _ptr)),
    "hr_decoder_run": (_i32, (_ptr, _ptr, _ptr)),
}
"""Result and argument types of every function of the library."""
