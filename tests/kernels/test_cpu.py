"""Products, norms and activations of the native implementation against the reference; every build variant."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.cpu import CpuOps
from kernels.interface import BlockQuantized, WeightPart
from kernels.reference import ReferenceOps

DENSE = ["float32", "bfloat16", "float16"]
PACKED = ["q4_0", "q4_1", "q8_0"]
MakeWeight = Callable[..., WeightPart]


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-20))


def rounding_bound(x: torch.Tensor, matrix: torch.Tensor, bits: int) -> torch.Tensor:
    """Most that rounding the inputs can change: half a step, largest / 127 of the block, times |w|.

    With 16 bits a step is 256 times finer; where the second plane has no room for 128 the error is one and a half.
    """
    step = x.reshape(x.shape[0], -1, 32).abs().amax(dim=2) / 127
    return (step / 2 if bits == 8 else step / 256 * 1.5) @ matrix.abs().reshape(matrix.shape[0], -1, 32).sum(dim=2).T


@pytest.mark.parametrize(("kind", "bits"), [(kind, 16) for kind in DENSE + PACKED] + [(kind, 8) for kind in PACKED])
@pytest.mark.parametrize("variant", ["native", "portable", "portable16"])
def test_linear_and_embed_agree_with_the_reference(
    variant: str,
    kind: str,
    bits: int,
    build_variant: Callable[..., CpuOps],
    reference: ReferenceOps,
    random_weight: MakeWeight,
) -> None:
    ops = build_variant(variant, bits)
    for rows, inputs, tokens in [(1, 32, 1), (8, 32, 2), (17, 96, 3), (40, 64, 4), (33, 160, 7), (100, 576, 19)]:
        part, x = random_weight(rows, inputs, kind), torch.randn(tokens, inputs)
        packed, plain = ops.pack([part]), reference.pack([part])
        actual, expected = ops.linear(x, packed), reference.linear(x, plain)
        if kind in DENSE:
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-5)
        else:
            assert bool(((actual - expected).abs() <= rounding_bound(x, plain.matrix, bits) + 1e-4).all())
            assert tokens * rows < 100 or error(actual, expected) < (1e-2 if bits == 8 else 5e-5)
        ids = torch.randint(rows, (5,), dtype=torch.int32)
        assert torch.equal(ops.embed(ids, packed), reference.embed(ids, plain))
        assert (packed.in_features, packed.out_features) == (inputs, rows)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("kind", PACKED)
def test_inputs_that_int8_can_hold_are_multiplied_without_error(
    kind: str, bits: int, build_variant: Callable[..., CpuOps], reference: ReferenceOps, random_weight: MakeWeight
) -> None:
    cpu = build_variant("native", bits)
    part, x = random_weight(24, 128, kind), torch.randint(-126, 127, (6, 128)).float()
    x[:, ::32] = 127.0
    assert error(cpu.linear(x, cpu.pack([part])), reference.linear(x, reference.pack([part]))) < 1e-6


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("variant", ["native", "portable", "portable16"])
def test_extreme_quants_do_not_overflow(variant: str, bits: int, build_variant: Callable[..., CpuOps]) -> None:
    ops, one = build_variant(variant, bits), torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)
    x = torch.cat([torch.full((1, 64), 127.0), torch.full((1, 64), -127.0)])
    least = torch.full((16, 68), 0x80, dtype=torch.uint8)
    most = torch.full((16, 36), 0xFF, dtype=torch.uint8)
    for at in (0, 34):
        least[:, at : at + 2] = one
    for at in (0, 18):
        most[:, at : at + 2] = one
    bytes_out = ops.linear(x, ops.pack([BlockQuantized(least, "q8_0", 64)]))
    nibbles_out = ops.linear(x, ops.pack([BlockQuantized(most, "q4_0", 64)]))
    assert bytes_out[:, 0].tolist() == [-128.0 * 127 * 64, 128.0 * 127 * 64]
    assert nibbles_out[:, 0].tolist() == [7.0 * 127 * 64, -7.0 * 127 * 64]


def test_parts_of_different_formats_are_concatenated_in_order(
    cpu: CpuOps, reference: ReferenceOps, random_weight: MakeWeight
) -> None:
    formats = ["q4_1", "q4_1", "float32", "q8_0", "bfloat16", "q4_0"]
    parts = [random_weight(5 + 3 * i, 64, kind, seed=i) for i, kind in enumerate(formats)]
    bias = torch.randn(sum(5 + 3 * i for i in range(len(formats))))
    x, ids = torch.randn(9, 64), torch.arange(len(bias), dtype=torch.int32)
    packed, plain = cpu.pack(parts, bias), reference.pack(parts, bias)
    assert error(cpu.linear(x, packed), reference.linear(x, plain)) < 1e-2
    assert torch.equal(cpu.embed(ids, packed), plain.matrix)


def test_only_8_and_16_bits_are_offered(kernel_cache: Path) -> None:
    with pytest.raises(ValueError, match="activation_bits must be 8 or 16, not 12"):
        CpuOps(1, kernel_cache, activation_bits=12)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(DENSE + PACKED),
    rows=st.integers(1, 70),
    blocks=st.integers(1, 6),
    tokens=st.integers(1, 40),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_a_row_has_the_same_bits_whatever_else_is_in_the_call(
    kind: str,
    rows: int,
    blocks: int,
    tokens: int,
    seed: int,
    data: st.DataObject,
    cpu: CpuOps,
    random_weight: MakeWeight,
) -> None:
    x = torch.randn(tokens, 32 * blocks, generator=torch.Generator().manual_seed(seed))
    weight = cpu.pack([random_weight(rows, 32 * blocks, kind, seed)], torch.ones(rows))
    whole = cpu.linear(x, weight)
    first = data.draw(st.integers(0, tokens - 1))
    last = data.draw(st.integers(first + 1, tokens))
    assert torch.equal(whole[first:last], cpu.linear(x[first:last].contiguous(), weight))


def test_the_number_of_threads_does_not_change_a_bit(
    cpu: CpuOps, kernel_cache: Path, random_weight: MakeWeight
) -> None:
    alone, part = CpuOps(1, kernel_cache, activation_bits=16), random_weight(300, 576, "q4_1")
    x = torch.randn(70, 576)
    assert torch.equal(cpu.linear(x, cpu.pack([part])), alone.linear(x, alone.pack([part])))


def test_callers_on_several_threads_do_not_disturb_each_other(cpu: CpuOps, random_weight: MakeWeight) -> None:
    weight = cpu.pack([random_weight(200, 576, "q4_1")])
    inputs = [torch.randn(tokens, 576) for tokens in (1, 5, 40, 90)]
    expected = [cpu.linear(x, weight) for x in inputs]
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda x: [cpu.linear(x, weight) for _ in range(25)], inputs))
    assert all(torch.equal(out, right) for outs, right in zip(results, expected, strict=True) for out in outs)


def test_zero_tiny_and_huge_inputs_stay_finite(cpu: CpuOps, random_weight: MakeWeight) -> None:
    weight = cpu.pack([random_weight(16, 64, "q4_1")])
    x = torch.stack([torch.zeros(64), torch.full((64,), 1e-42), torch.full((64,), 1e30)])
    out = cpu.linear(x, weight)
    assert torch.equal(out[0], torch.zeros(16))
    assert bool(torch.isfinite(out).all())


@pytest.mark.parametrize("width", [1, 7, 8, 31, 64, 576])
@pytest.mark.parametrize("variant", ["native", "portable", "portable16"])
def test_norm_and_gated_agree_with_the_reference(
    variant: str, width: int, build_variant: Callable[[str], CpuOps], reference: ReferenceOps
) -> None:
    ops = build_variant(variant)
    x, weight, residual = torch.randn(70, width), torch.rand(width) + 0.5, torch.randn(70, width)
    mine, theirs = residual.clone(), residual.clone()
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5, mine), reference.rms_norm(x, weight, 1e-5, theirs))
    assert torch.equal(mine, theirs)
    both = torch.randn(70, 2 * width) * 20
    for activation in ("silu", "gelu_tanh", "clamped_silu"):
        torch.testing.assert_close(ops.gated(both, activation), reference.gated(both, activation), atol=2e-5, rtol=2e-6)
        assert torch.equal(ops.gated(both, activation)[41:42], ops.gated(both[41:42].contiguous(), activation))


def test_norm_works_on_heads(cpu: CpuOps, reference: ReferenceOps) -> None:
    x, weight = torch.randn(5, 3, 64), torch.rand(64)
    torch.testing.assert_close(cpu.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


def test_saturated_gates_neither_overflow_nor_leak(cpu: CpuOps) -> None:
    gates = torch.tensor([-1e30, -1e4, -200.0, 0.0, 200.0, 1e4, 1e30])
    out = cpu.gated(torch.cat([gates, torch.full((7,), 2.0)]).reshape(1, -1))[0]
    assert out.tolist() == [0.0, 0.0, 0.0, 0.0, 400.0, 2e4, pytest.approx(2e30)]


def test_no_tokens_give_empty_results(cpu: CpuOps, random_weight: MakeWeight) -> None:
    weight = cpu.pack([random_weight(16, 64, "q4_1")])
    assert cpu.linear(torch.empty(0, 64), weight).shape == (0, 16)
    assert cpu.embed(torch.empty(0, dtype=torch.int32), weight).shape == (0, 64)
    assert cpu.rms_norm(torch.empty(0, 64), torch.ones(64), 1e-5).shape == (0, 64)
    assert cpu.gated(torch.empty(0, 64)).shape == (0, 32)


def test_bad_input_is_refused(cpu: CpuOps, random_weight: MakeWeight) -> None:
    weight = cpu.pack([random_weight(16, 64, "q4_1")])
    with pytest.raises(ValueError, match=r"\[T, 64\]"):
        cpu.linear(torch.zeros(1, 32), weight)
    with pytest.raises(ValueError, match="contiguous float32"):
        cpu.linear(torch.zeros(2, 128)[:, ::2], weight)
    with pytest.raises(ValueError, match="contiguous float32"):
        cpu.linear(torch.zeros(2, 64, dtype=torch.float64), weight)
    for bad in (-1, 16):
        with pytest.raises(IndexError, match="outside the embedding"):
            cpu.embed(torch.tensor([0, bad], dtype=torch.int32), weight)
    with pytest.raises(ValueError, match="int32"):
        cpu.embed(torch.tensor([0]), weight)
    with pytest.raises(ValueError, match="rms_norm"):
        cpu.rms_norm(torch.zeros(2, 64), torch.zeros(32), 1e-5)
    with pytest.raises(ValueError, match="unknown activation"):
        cpu.gated(torch.zeros(1, 4), "relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2·I"):
        cpu.gated(torch.zeros(1, 5))
    with pytest.raises(TypeError, match="another implementation"):
        cpu.linear(torch.zeros(1, 64), ReferenceOps().pack([torch.zeros(4, 64)]))
    with pytest.raises(ValueError, match="same number of inputs"):
        cpu.pack([torch.zeros(2, 8), torch.zeros(2, 9)])
