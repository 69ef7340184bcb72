"""The reference against torch's own implementations and against itself row by row."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.reference import ReferenceOps, gated, paged_attention, quantize_e4m3, rms_norm, rope_and_cache


def test_linear_is_a_matrix_product_with_bias_over_stacked_parts() -> None:
    ops, x, bias = ReferenceOps(), torch.randn(5, 64), torch.randn(30)
    parts = [torch.randn(10, 64), torch.randn(20, 64)]
    torch.testing.assert_close(ops.linear(x, ops.pack(parts, bias)), functional.linear(x, torch.cat(parts), bias))


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    ops, x = ReferenceOps(), torch.randn(33, 96)
    weight = ops.pack([torch.randn(50, 96)])
    norm = torch.rand(96)
    assert torch.equal(ops.linear(x, weight)[17:18], ops.linear(x[17:18], weight))
    assert torch.equal(rms_norm(x, norm, 1e-5)[17:18], rms_norm(x[17:18], norm, 1e-5))
    assert torch.equal(gated(x)[17:18], gated(x[17:18]))


def test_rms_norm_equals_torch_and_updates_the_residual() -> None:
    x, residual, weight = torch.randn(4, 48), torch.randn(4, 48), torch.rand(48)
    expected = functional.rms_norm(x + residual, (48,), weight, 1e-5)
    total = x + residual
    torch.testing.assert_close(rms_norm(x, weight, 1e-5, residual), expected)
    assert torch.equal(residual, total)


def test_attention_equals_torch_with_grouped_heads() -> None:
    T, Hq, Hkv, D, page = 21, 6, 2, 32, 8
    qkv, angles = torch.randn(T, (Hq + 2 * Hkv) * D), torch.randn(64, D)
    positions, table = torch.arange(T, dtype=torch.int32), torch.tensor([[3, 0, 2]], dtype=torch.int32)
    slots = (table[0, (positions // page).long()] * page + positions % page).int()
    keys, values = torch.zeros(4, Hkv, page, D), torch.zeros(4, Hkv, page, D)
    q = rope_and_cache(qkv, Hq, Hkv, positions, slots, angles, keys, values)
    starts, lengths = torch.tensor([0, T], dtype=torch.int32), torch.tensor([T], dtype=torch.int32)
    out = paged_attention(q, keys, values, starts, lengths, table, D**-0.5)
    k = keys[table[0].long()].transpose(1, 2).reshape(-1, Hkv, D)[:T].transpose(0, 1).repeat_interleave(3, 0)
    v = qkv[:, (Hq + Hkv) * D :].reshape(T, Hkv, D).transpose(0, 1).repeat_interleave(3, 0)
    expected = functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True)
    torch.testing.assert_close(out, expected.transpose(0, 1).reshape(T, -1))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_equals_torch(activation: str) -> None:
    x = torch.randn(3, 40) * 4
    act = functional.silu(x[:, :20]) if activation == "silu" else functional.gelu(x[:, :20], approximate="tanh")
    torch.testing.assert_close(gated(x, activation), act * x[:, 20:])  # type: ignore[arg-type]


def test_bad_input_is_refused() -> None:
    ops = ReferenceOps()
    weight = ops.pack([torch.randn(4, 8)])
    with pytest.raises(ValueError, match="at least one part"):
        ops.pack([])
    with pytest.raises(ValueError, match="same number of inputs"):
        ops.pack([torch.zeros(2, 8), torch.zeros(2, 9)])
    with pytest.raises(ValueError, match=r"bias must be \[4\]"):
        ops.pack([torch.zeros(4, 8)], torch.zeros(3))
    with pytest.raises(ValueError, match=r"\[T, 8\]"):
        ops.linear(torch.zeros(1, 9), weight)
    with pytest.raises(IndexError, match=r"\[0, 4\)"):
        ops.embed(torch.tensor([4], dtype=torch.int32), weight)
    with pytest.raises(ValueError, match="unknown activation"):
        ops.gated(torch.zeros(1, 2), "relu")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="another implementation"):
        ops.linear(torch.zeros(1, 8), object())  # type: ignore[arg-type]


def test_soft_cap_and_scales_equal_the_arithmetic_written_out() -> None:
    T, D, page, cap = 5, 16, 16, 2.0
    q, keys, values = torch.randn(T, 2, D) * 3, torch.randn(1, 1, page, D), torch.randn(1, 1, page, D)
    starts, lengths = torch.tensor([0, T], dtype=torch.int32), torch.tensor([T], dtype=torch.int32)
    k8, v8 = quantize_e4m3(keys / 0.5), quantize_e4m3(values / 0.25)
    table = torch.zeros(1, 1, dtype=torch.int32)
    scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([0.25])}
    out = paged_attention(q, k8, v8, starts, lengths, table, 0.3, softcap=cap, **scales)
    k, v = k8.float()[0, 0, :T] * 0.5, v8.float()[0, 0, :T] * 0.25
    scores = cap * torch.tanh(q.transpose(0, 1) @ k.T * 0.3 / cap)
    scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(out, (scores.softmax(-1) @ v).transpose(0, 1).reshape(T, -1))


def test_8_bit_values_saturate_and_round_to_even() -> None:
    given = torch.tensor([1e9, -449.0, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10, -0.0])
    assert quantize_e4m3(given).float().tolist() == [448.0, -448.0, 16.0, 20.0, 0.0, 2.0**-8, 0.0]


def test_padding_is_not_written_and_answers_zero() -> None:
    keys = torch.full((2, 1, 16, 16), 7.0)
    values, slots = keys.clone(), torch.tensor([3, -1], dtype=torch.int32)
    positions = torch.zeros(2, dtype=torch.int32)
    rope_and_cache(torch.randn(2, 3 * 16), 1, 1, positions, slots, torch.randn(1, 16), keys, values)
    assert [(cache != 7.0).any(-1).nonzero().tolist() for cache in (keys, values)] == [[[0, 0, 3]]] * 2
    starts, lengths = torch.tensor([0, 1, 1], dtype=torch.int32), torch.tensor([4, 0], dtype=torch.int32)
    out = paged_attention(torch.randn(3, 1, 16), keys, values, starts, lengths, torch.zeros(2, 1).int(), 1.0)
    assert out[0].any()
    assert not out[1:].any()
