"""Codes with scales: their values, their checks, and what becomes of them in blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.blocks import dequantize
from kernels.cpu import CpuOps
from kernels.interface import BlockQuantized, CodeFormat, ScaledWeight
from kernels.quantize import quantize_blocks, quantize_codes
from kernels.reference import ReferenceOps
from kernels.scaled import nibbles, pack_nibbles
from kernels.scaled_blocks import to_blocks


def random_part(
    kind: CodeFormat, rows: int, inputs: int, group: int, *, zeros: bool = False, order: bool = False, seed: int = 0
) -> ScaledWeight:
    g = torch.Generator().manual_seed(seed)
    groups = -(-inputs // group)
    packed = kind in ("int4", "mxfp4")
    codes = torch.randint(0, 256, (rows, inputs // 2 if packed else inputs), generator=g, dtype=torch.uint8)
    if kind == "fp8":
        codes = torch.where(codes & 0x7F == 0x7F, 0x30, codes).view(torch.float8_e4m3fn)
    scales = torch.rand(rows, groups, generator=g) * 0.01 + 0.001
    return ScaledWeight(
        codes.view(torch.int8) if kind == "int8" else codes,
        torch.randint(120, 131, (rows, groups), generator=g, dtype=torch.uint8) if kind == "mxfp4" else scales,
        kind,
        inputs,
        group,
        torch.randint(0, 16, (rows, groups), generator=g, dtype=torch.int8) if zeros else None,
        torch.randperm(inputs, generator=g) if order else None,
    )


def spelt_out(part: ScaledWeight) -> torch.Tensor:
    """Every value by itself, int8 and int4 alone."""
    out = torch.empty(part.out_features, part.in_features, dtype=torch.float64)
    for row in range(part.out_features):
        for at in range(part.in_features):
            code = int(part.codes[row, at // 2]) >> 4 * (at % 2) & 15 if part.format == "int4" else part.codes[row, at]
            plain = 8 if part.format == "int4" else 0
            zero = plain if part.zeros is None else int(part.zeros[row, at // part.group])
            place = at if part.order is None else int(part.order[at])
            out[row, place] = float(int(code) - zero) * float(part.scales[row, at // part.group])
    return out


@settings(max_examples=20)
@given(
    kind=st.sampled_from(["int8", "int4"]),
    inputs=st.sampled_from([6, 20, 33]),
    group=st.sampled_from([2, 8, 40]),
    zeros=st.booleans(),
    order=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_value_is_code_less_zero_times_scale(
    kind: CodeFormat, inputs: int, group: int, zeros: bool, order: bool, seed: int
) -> None:
    inputs -= inputs % 2 if kind == "int4" else 0
    part = random_part(kind, 3, inputs, group, zeros=zeros, order=order, seed=seed)
    assert torch.equal(dequantize(part), spelt_out(part).float())


EXACT: list[tuple[CodeFormat, int, bool, str]] = [
    ("int8", 96, False, "q8_0"),
    ("int8", 32, False, "q8_0"),
    ("int4", 32, False, "q4_0"),
    ("int4", 96, True, "q4_1"),
    ("mxfp4", 32, False, "q8_0"),
]


@pytest.mark.parametrize(("kind", "group", "zeros", "wanted"), EXACT)
def test_exact_but_for_the_rounding_of_scales(kind: CodeFormat, group: int, zeros: bool, wanted: str) -> None:
    part = random_part(kind, 5, 192, group, zeros=zeros)
    blocks, values = to_blocks(part), dequantize(part)
    assert isinstance(blocks, BlockQuantized) and blocks.format == wanted
    if kind == "mxfp4":
        assert torch.equal(dequantize(blocks), values)
    else:
        halves = replace(part, scales=part.scales.to(torch.float16))
        # A zero times a scale is rounded by itself
        torch.testing.assert_close(dequantize(blocks), dequantize(halves), rtol=1e-6, atol=1e-4 if zeros else 0.0)
        assert (dequantize(blocks) - values).abs().max() <= values.abs().max() * 2.0**-10


@pytest.mark.parametrize(
    "part",
    [
        random_part("fp8", 5, 96, 96),
        random_part("int8", 5, 96, 96, zeros=True),
        random_part("int4", 5, 96, 32, order=True),
        random_part("int4", 5, 96, 24),
    ],
    ids=["fp8", "int8-zeros", "order", "group"],
)
def test_others_are_requantised_closely(part: ScaledWeight) -> None:
    blocks, values = to_blocks(part), dequantize(part)
    assert isinstance(blocks, BlockQuantized) and blocks.format == "q8_0"
    largest = values.reshape(5, -1, 32).abs().amax(2, keepdim=True).expand(-1, -1, 32).reshape(5, -1)
    assert ((dequantize(blocks) - values).abs() <= largest * (1 / 254 + 2e-3)).all()


def test_what_blocks_cannot_hold_stays_exact() -> None:
    for part in (
        random_part("int8", 3, 40, 40),
        replace(random_part("int4", 3, 64, 32), scales=torch.full((3, 2), 1e5)),
    ):
        held = to_blocks(part)
        assert isinstance(held, torch.Tensor) and torch.equal(held, dequantize(part))


def test_operations_take_codes_beside_floats_and_blocks(cpu: CpuOps, reference: ReferenceOps) -> None:
    g = torch.Generator().manual_seed(3)
    parts = [
        random_part("int4", 7, 64, 32, zeros=True),
        random_part("int8", 9, 64, 64),
        torch.randn(4, 64, generator=g),
        random_part("mxfp4", 5, 64, 32),
        quantize_blocks(torch.randn(6, 64, generator=g), "q8_0"),
    ]
    x, bias = torch.randn(3, 64, generator=g), torch.randn(31, generator=g)
    wanted = x @ torch.cat([dequantize(part) for part in parts]).T + bias
    exact = reference.linear(x, reference.pack(parts, bias))
    torch.testing.assert_close(exact, wanted, rtol=1e-5, atol=1e-4)
    packed = cpu.pack(parts, bias)
    torch.testing.assert_close(cpu.linear(x, packed), wanted, rtol=2e-3, atol=2e-3)
    rows = cpu.embed(torch.tensor([0, 8, 17, 22, 30], dtype=torch.int32), packed)
    torch.testing.assert_close(
        rows, torch.cat([dequantize(p) for p in parts])[[0, 8, 17, 22, 30]], rtol=2e-3, atol=2e-4
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "int3"}, "unknown code format 'int3'"),
        ({"codes": torch.zeros(3, 63, dtype=torch.uint8)}, r"int4 codes of 64 inputs are torch.uint8 \[3, 32\]"),
        ({"codes": torch.zeros(3, 32, dtype=torch.int8)}, "not torch.int8"),
        ({"group": 31}, "even inputs and groups"),
        ({"scales": torch.ones(3, 3)}, r"scales are \[3, 2\]"),
        ({"zeros": torch.zeros(3, 2)}, r"zeros of int8 or int4 codes are int8 \[3, 2\]"),
        ({"order": torch.arange(63)}, r"the order of inputs is int64 \[64\]"),
        ({"format": "mxfp4"}, "scales are"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    part = replace(random_part("int4", 3, 64, 32), **change)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match=message):
        dequantize(part)


def test_nibbles_are_packed_low_half_first() -> None:
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert pack_nibbles(codes).tolist() == [[0x21, 0x0F]]
    assert torch.equal(nibbles(pack_nibbles(codes)), codes)


@settings(max_examples=15)
@given(seed=st.integers(0, 99), power=st.integers(-1, 3), shift=st.sampled_from([0.0, 1.0, -30.0]))
def test_quantised_matrices_stay_near(seed: int, power: int, shift: float) -> None:
    g = torch.Generator().manual_seed(seed)
    matrix = (torch.randn(4, 256, generator=g) + shift) * 10.0**power
    matrix[1] = 0.0
    matrix[2, 5] = 50 * 10.0**power
    groups = matrix.reshape(4, -1, 32)
    span = (groups.amax(2, keepdim=True).clamp(min=0) - groups.amin(2, keepdim=True).clamp(max=0)).expand(-1, -1, 32)
    for format, part in (("q8_0", 1 / 200), ("q4_1", 1 / 15), ("q4_0", 1 / 7)):
        error = (dequantize(quantize_blocks(matrix, format)) - matrix).abs()  # type: ignore[arg-type]
        assert (error.reshape(4, -1, 32) <= span * part + 1e-7).all(), format
    largest = matrix.abs().amax(1, keepdim=True)
    assert ((dequantize(quantize_codes(matrix, "int8")) - matrix).abs() <= largest / 253).all()
    assert ((dequantize(quantize_codes(matrix, "fp8")) - matrix).abs() <= matrix.abs() / 15 + largest / 2**18).all()
    wide = matrix.reshape(4, 2, 128)
    reach = (wide.amax(2, keepdim=True).clamp(min=0) - wide.amin(2, keepdim=True).clamp(max=0)).expand(-1, -1, 128)
    assert ((dequantize(quantize_codes(matrix, "int4")) - matrix).abs().reshape(4, 2, 128) <= reach / 10 + 1e-9).all()


def test_fitting_beats_the_range_alone() -> None:
    matrix = torch.randn(64, 256, generator=torch.Generator().manual_seed(5))
    blocks = matrix.reshape(64, -1, 32)
    least = blocks.amin(2, keepdim=True)
    scale = (blocks.amax(2, keepdim=True) - least) / 15
    plain = ((blocks - least) / scale).round() * scale + least
    fitted = dequantize(quantize_blocks(matrix, "q4_1"))
    assert ((fitted - matrix) ** 2).mean() < 0.97 * ((plain - blocks) ** 2).mean()


def test_what_cannot_be_quantised_says_why() -> None:
    with pytest.raises(ValueError, match="multiple of 32 inputs, not 40"):
        quantize_blocks(torch.zeros(2, 40), "q8_0")
    with pytest.raises(ValueError, match="multiple of 32 inputs, not 40"):
        quantize_codes(torch.zeros(2, 40), "int4")
    with pytest.raises(ValueError, match="'mxfp4'"):
        quantize_codes(torch.zeros(2, 64), "mxfp4")
