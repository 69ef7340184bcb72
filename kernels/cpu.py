"""The CPU implementation: native operations (kernels/native) behind the `Ops` protocol, on tensors in main memory.

Block-quantised weights stay packed: activations are quantised to int8 per block of 32 and multiplied in integers. A
row's result is the same bits whatever else is in the call.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kernels.arena import Arena
from kernels.blocks import check_part, in_features
from kernels.decoder import DecoderProgram, DecoderSpec
from kernels.interface import Activation, BlockFormat, BlockQuantized, LinearWeight, ScaledWeight, WeightPart, rows_of
from kernels.moe import ExpertParts, ExpertWeights, Routing
from kernels.native_library import load
from kernels.native_structs import SIGNATURES, AttentionArgs, RopeArgs, Segment, WeightStruct
from kernels.reference import check_parts
from kernels.scaled_blocks import to_blocks

_FLOAT_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CACHE_KINDS = _FLOAT_KINDS | {torch.float8_e4m3fn: 6}
_BLOCK_KINDS: dict[BlockFormat, int] = {"q4_0": 3, "q4_1": 4, "q8_0": 5}
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "clamped_silu": 2}
"""hr_activation of headrace.h."""
_MAX_HEAD = 640
_ERRORS: dict[int, tuple[type[Exception], str]] = {
    1: (MemoryError, "no memory for scratch space"),
    2: (IndexError, "a token id is outside the embedding"),
    3: (IndexError, "a slot is outside the KV cache"),
    4: (IndexError, "a position is outside the rotary table"),
    5: (IndexError, "a page of the page table is outside the KV cache"),
    6: (ValueError, "query starts, KV lengths and the page table's width do not fit together"),
    7: (IndexError, "a row is outside the batch"),
    8: (IndexError, "an expert is outside the layer"),
}


class PackedWeight:
    """A weight matrix in the native layout: one segment per run of rows of the same format."""

    __slots__ = ("_bias", "_data", "_segments", "_struct", "address", "in_features", "nbytes", "out_features")

    def __init__(
        self, data: Sequence[tuple[int, int, Tensor]], in_features: int, bias: Tensor | None, planes: int
    ) -> None:
        """data: kind, rows and packed bytes of each segment. planes: int8 planes of the activations it meets."""
        self._data = [packed for _, _, packed in data]
        self._bias = bias
        self._segments = (Segment * len(data))(*(Segment(kind, rows, packed.data_ptr()) for kind, rows, packed in data))
        self.in_features = in_features
        self.out_features = sum(rows for _, rows, _ in data)
        self.nbytes = sum(packed.nbytes for packed in self._data) + (0 if bias is None else bias.nbytes)
        bias_address = None if bias is None else bias.data_ptr()
        self._struct = WeightStruct(in_features, self.out_features, len(data), planes, self._segments, bias_address)
        self.address = ctypes.addressof(self._struct)


class CpuOps:
    """Native operations with their own threads on float32 and int32 tensors in main memory; others raise ValueError."""

    name = "cpu"

    def __init__(
        self,
        threads: int = 0,
        cache_dir: Path | None = None,
        flags: tuple[str, ...] = ("-march=native",),
        activation_bits: int = 8,
    ) -> None:
        """threads: 0 for all cores this process may use. activation_bits: 8 or 16, of what meets packed weights.

        Raises BuildError when the native library cannot be built.
        """
        if activation_bits not in (8, 16):
            raise ValueError(f"activation_bits must be 8 or 16, not {activation_bits}")
        self._planes = activation_bits // 8
        library = load(cache_dir, flags)
        for function, (result, arguments) in SIGNATURES.items():
            getattr(library, function).restype = result
            getattr(library, function).argtypes = arguments
        self.threads = threads or len(os.sched_getaffinity(0))
        self.lanes = int(library.hr_lanes())
        self.library = library
        self._pool = library.hr_pool_new(self.threads)
        if not self._pool:
            raise MemoryError("no memory for the thread pool")
        weakref.finalize(self, library.hr_pool_free, self._pool)
        self._arena = Arena()
        self._lock = threading.Lock()

    def pack(self, parts: Sequence[WeightPart], bias: Tensor | None = None) -> LinearWeight:
        """Lay parts out in panels of rows, codes with scales as blocks; neighbours of the same format become one
        segment. Raises ValueError."""
        check_parts(parts, bias)
        segments = []
        runs: list[list[Tensor | BlockQuantized]] = []
        for given in parts:
            check_part(given)
            part = to_blocks(given) if isinstance(given, ScaledWeight) else given
            if runs and _kind(runs[-1][0]) == _kind(part):
                runs[-1].append(part)
            else:
                runs.append([part])
        width = in_features(parts[0])
        for run in runs:
            kind, rows = _kind(run[0]), sum(rows_of(part) for part in run)
            source = torch.cat([part.data.contiguous() for part in run])
            packed = self._arena.take(int(self.library.hr_packed_bytes(kind, rows, width)))
            self.library.hr_pack(kind, rows, width, source.data_ptr(), packed.data_ptr())
            segments.append((kind, rows, packed))
        return PackedWeight(
            segments, width, None if bias is None else bias.to(torch.float32).contiguous(), self._planes
        )

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """x [T, K] · weightᵀ + bias → [T, N]."""
        packed = packed_weight(weight)
        if x.dim() != 2 or x.shape[1] != packed.in_features:
            raise ValueError(f"linear needs x of [T, {packed.in_features}], not {list(x.shape)}")
        out = torch.empty(x.shape[0], packed.out_features)
        self.call(self.library.hr_linear, packed.address, float_address(x), x.shape[0], out.data_ptr())
        return out

    def embed(self, token_ids: Tensor, weight: LinearWeight) -> Tensor:
        """Dequantised rows [T, H]. Raises IndexError for an id outside the weight."""
        packed = packed_weight(weight)
        out = torch.empty(token_ids.shape[0], packed.in_features)
        ids = int_address(token_ids)
        self.call(self.library.hr_embed, packed.address, ids, token_ids.shape[0], out.data_ptr())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        """RMSNorm over the last dimension; with residual, residual += x in place first."""
        width = x.shape[-1]
        if weight.shape != (width,) or (residual is not None and residual.shape != x.shape):
            raise ValueError(f"rms_norm of {list(x.shape)} does not fit weight {list(weight.shape)} or the residual")
        out = torch.empty(x.shape)
        self.call(
            self.library.hr_rms_norm, float_address(x), None if residual is None else float_address(residual),
            float_address(weight), x.numel() // max(width, 1), width, eps, out.data_ptr(),
        )  # fmt: skip
        return out

    def rope_and_cache(
        self,
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
    ) -> Tensor:
        """Rotate q and k, write k and v, return q [T, Hq, D]. Raises IndexError before anything is written."""
        tokens = qkv.shape[0]
        pages, page_size, head_dim, kind = cache_shape(key_cache, value_cache, num_kv_heads)
        written = 1 if value_cache is key_cache else 2
        if qkv.shape != (tokens, (num_q_heads + written * num_kv_heads) * head_dim) or cos_sin.shape[1] != head_dim:
            raise ValueError(f"qkv {list(qkv.shape)} and angles {list(cos_sin.shape)} do not fit heads of {head_dim}")
        if positions.shape != (tokens,) or slots.shape != (tokens,):
            raise ValueError(f"positions and slots must be [{tokens}]")
        if any(norm is not None and norm.shape != (head_dim,) for norm in (q_norm, k_norm)):
            raise ValueError(f"q and k norms must be [{head_dim}]")
        q = torch.empty(tokens, num_q_heads, head_dim)
        args = RopeArgs(
            float_address(qkv), int_address(positions), int_address(slots), float_address(cos_sin),
            None if q_norm is None else float_address(q_norm), None if k_norm is None else float_address(k_norm),
            key_cache.data_ptr(), value_cache.data_ptr(), q.data_ptr(),
            tokens, cos_sin.shape[0], pages * page_size,
            num_q_heads, num_kv_heads, head_dim, page_size, kind, eps,
        )  # fmt: skip
        self.call(self.library.hr_rope_cache, ctypes.addressof(args))
        return q

    def paged_attention(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        q_starts: Tensor,
        kv_lens: Tensor,
        page_table: Tensor,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention over pages → [T, Hq·D]. Raises IndexError or ValueError before a foreign page is read."""
        tokens, num_q_heads, head_dim = q.shape
        pages, page_size, cache_dim, kind = cache_shape(key_cache, value_cache, key_cache.shape[1])
        seqs = kv_lens.shape[0]
        if cache_dim != head_dim or num_q_heads % key_cache.shape[1]:
            raise ValueError(f"q {list(q.shape)} does not fit a cache of {list(key_cache.shape)}")
        if q_starts.shape != (seqs + 1,) or page_table.dim() != 2 or page_table.shape[0] != seqs:
            raise ValueError(f"{seqs} sequences need q_starts [{seqs + 1}] and page_table [{seqs}, P]")
        if sinks is not None and sinks.shape != (num_q_heads,):
            raise ValueError(f"sinks must be [{num_q_heads}], not {list(sinks.shape)}")
        out = torch.empty(tokens, num_q_heads * head_dim)
        args = AttentionArgs(
            float_address(q), key_cache.data_ptr(), value_cache.data_ptr(), int_address(q_starts), int_address(kv_lens),
            int_address(page_table),
            out.data_ptr(), tokens, pages,
            seqs, page_table.shape[1], num_q_heads, key_cache.shape[1], head_dim, page_size, kind, window, scale,
            softcap, None if sinks is None else float_address(sinks),
        )  # fmt: skip
        self.call(self.library.hr_attention, ctypes.addressof(args))
        return out

    def gated(self, gate_up: Tensor, activation: Activation = "silu") -> Tensor:
        """activation(first half) · second half."""
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
        if gate_up.dim() != 2 or gate_up.shape[1] % 2:
            raise ValueError(f"gated needs [T, 2·I], not {list(gate_up.shape)}")
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width)
        kind = ACTIVATIONS[activation]
        self.call(self.library.hr_gated, float_address(gate_up), rows, width, kind, out.data_ptr())
        return out

    def pack_experts(self, parts: Iterable[ExpertParts], experts: int) -> ExpertWeights:
        """Each expert's matrices packed as `pack` does. Raises ValueError."""
        from kernels.cpu_moe import PackedExperts

        return PackedExperts(self, parts, experts)

    def route(self, logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Chosen experts int32 [T, K] and their weights [T, K]. Raises ValueError."""
        from kernels.cpu_moe import route

        return route(self, logits, routing, bias)

    def run_experts(
        self, x: Tensor, weights: ExpertWeights, ids: Tensor, scales: Tensor, activation: Activation = "silu"
    ) -> Tensor:
        """The chosen experts' weighted sum [T, H]. Raises IndexError or ValueError."""
        from kernels.cpu_moe import run_experts

        return run_experts(self, x, weights, ids, scales, activation)

    def decoder(self, spec: DecoderSpec) -> DecoderProgram:
        """The whole decoder as one native call. Raises TypeError or ValueError for weights that do not fit."""
        from kernels.cpu_decoder import NativeDecoder

        return NativeDecoder(self, spec)

    def call(self, function: Callable[..., int], *arguments: object) -> None:
        """Run a native operation on the pool; raise what its result stands for. Callers on other threads wait: the pool
        and its scratch memory serve one operation at a time."""
        with self._lock:
            code = function(self._pool, *arguments)
        if code:
            kind, message = _ERRORS[code]
            raise kind(message)


def _kind(part: Tensor | BlockQuantized) -> int:
    return _BLOCK_KINDS[part.format] if isinstance(part, BlockQuantized) else _FLOAT_KINDS[part.dtype]


def packed_weight(weight: LinearWeight) -> PackedWeight:
    """The weight, which must come from this implementation's `pack`. Raises TypeError."""
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"this weight was packed by another implementation: {type(weight).__name__}")
    return weight


def float_address(x: Tensor) -> int:
    """Address of a contiguous float32 tensor in main memory. Raises ValueError."""
    if x.dtype != torch.float32 or not x.is_contiguous() or not x.is_cpu:
        raise ValueError(f"a contiguous float32 tensor in main memory is needed, not {x.dtype} on {x.device}")
    return x.data_ptr()


def int_address(x: Tensor) -> int:
    """Address of a contiguous int32 tensor in main memory. Raises ValueError."""
    if x.dtype != torch.int32 or not x.is_contiguous() or not x.is_cpu:
        raise ValueError(f"a contiguous int32 tensor in main memory is needed, not {x.dtype} on {x.device}")
    return x.data_ptr()


def cache_shape(keys: Tensor, values: Tensor, kv_heads: int) -> tuple[int, int, int, int]:
    """Pages, page size, head size and kind of a cache. Raises ValueError where keys and values do not match."""
    if keys.shape != values.shape or keys.dtype != values.dtype or keys.dim() != 4 or keys.dtype not in _CACHE_KINDS:
        raise ValueError(
            f"caches must be equal in shape and type: {list(keys.shape)}, {list(values.shape)}, {keys.dtype}"
        )
    if not (keys.is_contiguous() and values.is_contiguous() and keys.is_cpu and values.is_cpu):
        raise ValueError("caches must be contiguous and in main memory")
    pages, heads, page_size, head_dim = keys.shape
    if heads != kv_heads or head_dim % 2 or head_dim > _MAX_HEAD:
        raise ValueError(f"a cache of {list(keys.shape)} is not {kv_heads} heads of an even size up to {_MAX_HEAD}")
    return pages, page_size, head_dim, _CACHE_KINDS[keys.dtype]
