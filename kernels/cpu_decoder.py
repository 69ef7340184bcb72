"""The native whole-step decoder: one call per step instead of nine per layer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu import CpuOps, PackedWeight, cache_shape, float_address, int_address, packed_weight
from kernels.decoder import DecoderSpec
from kernels.interface import LinearWeight
from kernels.native_structs import DecoderStruct, LayerStruct, StepStruct


class NativeDecoder:
    """A decoder whose weights have been checked against each other once; a call checks only the step's own inputs."""

    def __init__(self, ops: CpuOps, spec: DecoderSpec) -> None:
        """Raises TypeError or ValueError for weights that do not fit together."""
        self._ops, self._spec = ops, spec
        if not spec.layers or spec.num_kv_heads <= 0 or spec.num_q_heads % spec.num_kv_heads:
            raise ValueError(f"{len(spec.layers)} layers of {spec.num_q_heads} over {spec.num_kv_heads} heads")
        if spec.activation not in ("silu", "gelu_tanh"):
            raise ValueError(f"unknown activation {spec.activation!r}; known: silu, gelu_tanh")
        embedding = packed_weight(spec.embedding)
        self._hidden = embedding.in_features
        self._vocabulary = packed_weight(spec.head).out_features
        self._layers = (LayerStruct * len(spec.layers))(*(self._layer(index) for index in range(len(spec.layers))))
        if spec.cos_sin.dim() != 2 or spec.cos_sin.shape[1] != spec.head_dim:
            raise ValueError(f"the rotary table must be [positions, {spec.head_dim}], not {list(spec.cos_sin.shape)}")
        self._struct = DecoderStruct(
            embedding.address, self._weight(spec.head, self._hidden, self._vocabulary).address,
            self._vector(spec.norm, self._hidden), float_address(spec.cos_sin), self._layers, spec.cos_sin.shape[0],
            len(spec.layers), spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.activation == "gelu_tanh",
            spec.eps, spec.scale,
        )  # fmt: skip
        self._pointers = ctypes.c_void_p * len(spec.layers)

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        q_starts: Tensor,
        kv_lens: Tensor,
        page_table: Tensor,
        logit_rows: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> Tensor:
        """See `kernels.decoder.DecoderProgram`."""
        spec, tokens, seqs, rows = self._spec, token_ids.shape[0], kv_lens.shape[0], logit_rows.shape[0]
        if positions.shape != (tokens,) or slots.shape != (tokens,):
            raise ValueError(f"positions and slots must be [{tokens}]")
        if q_starts.shape != (seqs + 1,) or page_table.dim() != 2 or page_table.shape[0] != seqs:
            raise ValueError(f"{seqs} sequences need q_starts [{seqs + 1}] and page_table [{seqs}, P]")
        if logit_rows.dtype != torch.int64 or not logit_rows.is_contiguous():
            raise ValueError(f"logit_rows must be a contiguous int64 tensor, not {logit_rows.dtype}")
        if len(keys) != len(spec.layers) or len(values) != len(spec.layers):
            raise ValueError(f"{len(spec.layers)} layers need as many caches, not {len(keys)} and {len(values)}")
        shape = cache_shape(keys[0], values[0], spec.num_kv_heads)
        for key, value in zip(keys, values, strict=True):
            if (key.shape, key.dtype) != (keys[0].shape, keys[0].dtype) or cache_shape(
                key, value, spec.num_kv_heads
            ) != shape:
                raise ValueError("the caches of all layers must have one shape and type")
        pages, page_size, head_dim, kind = shape
        if head_dim != spec.head_dim:
            raise ValueError(f"a cache of heads of {head_dim} does not fit heads of {spec.head_dim}")
        logits = torch.empty(rows, self._vocabulary)
        key_addresses = self._pointers(*(key.data_ptr() for key in keys))
        value_addresses = self._pointers(*(value.data_ptr() for value in values))
        step = StepStruct(
            int_address(token_ids), int_address(positions), int_address(slots), int_address(q_starts),
            int_address(kv_lens), int_address(page_table), logit_rows.data_ptr(), ctypes.addressof(key_addresses),
            ctypes.addressof(value_addresses), logits.data_ptr(), tokens, rows, pages, seqs, page_table.shape[1],
            page_size, kind,
        )  # fmt: skip
        self._ops.call(self._ops.library.hr_decoder_run, ctypes.addressof(self._struct), ctypes.addressof(step))
        return logits

    def _layer(self, index: int) -> LayerStruct:
        spec, layer = self._spec, self._spec.layers[index]
        heads, hidden = spec.num_q_heads * spec.head_dim, self._hidden
        inner = packed_weight(layer.down).in_features
        return LayerStruct(
            self._vector(layer.attention_norm, hidden), self._vector(layer.mlp_norm, hidden),
            None if layer.q_norm is None else self._vector(layer.q_norm, spec.head_dim),
            None if layer.k_norm is None else self._vector(layer.k_norm, spec.head_dim),
            self._weight(layer.qkv, hidden, heads + 2 * spec.num_kv_heads * spec.head_dim).address,
            self._weight(layer.output, heads, hidden).address,
            self._weight(layer.gate_up, hidden, 2 * inner).address,
            self._weight(layer.down, inner, hidden).address,
            layer.window,
        )  # fmt: skip

    @staticmethod
    def _weight(weight: LinearWeight, inputs: int, outputs: int) -> PackedWeight:
        packed = packed_weight(weight)
        if (packed.in_features, packed.out_features) != (inputs, outputs):
            raise ValueError(f"a weight {packed.in_features} → {packed.out_features} should be {inputs} → {outputs}")
        return packed

    @staticmethod
    def _vector(vector: Tensor, size: int) -> int:
        if vector.shape != (size,):
            raise ValueError(f"a norm of {list(vector.shape)} should be [{size}]")
        return float_address(vector)
