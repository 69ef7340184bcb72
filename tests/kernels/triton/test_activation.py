"""Gated activations and row gathers in the interpreter against their definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.interface import Activation
from kernels.triton.activation import gated
from kernels.triton.embedding import embed
from kernels.triton.gather import gather_rows

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-6, torch.float16: 1e-3}


@settings(max_examples=15)
@given(
    seed=st.integers(0, 999),
    shape=st.tuples(st.integers(0, 4), st.sampled_from([0, 1, 2, 96, 1023, 1025])),
    dtype=st.sampled_from(list(TOLERANCE)),
    activation=st.sampled_from(["silu", "gelu_tanh", "gelu", "clamped_silu"]),
    scale=st.sampled_from([1.0, 30.0]),
)
def test_activations_are_as_defined(
    seed: int, shape: tuple[int, int], dtype: torch.dtype, activation: Activation, scale: float
) -> None:
    tokens, inner = shape
    generator = torch.Generator().manual_seed(seed)
    packed = (torch.randn(tokens, 2 * inner, generator=generator) * scale).to(dtype)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        gated(packed, activation), reference.gated(packed, activation), rtol=tolerance, atol=tolerance * scale
    )


def test_what_is_not_gate_and_up_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown activation"):
        gated(torch.zeros(1, 4), "relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="packed as"):
        gated(torch.zeros(1, 5))


@settings(max_examples=15)
@given(
    rows=st.lists(st.sampled_from([-(2**31), -1, 0, 1, 4, 6, 7, 2**31 - 1]), max_size=6),
    width=st.sampled_from([1, 40, 1024, 1030]),
    dtype=st.sampled_from(list(TOLERANCE)),
    index=st.sampled_from([torch.int32, torch.int64]),
)
def test_rows_are_gathered_and_padding_is_zero(
    rows: list[int], width: int, dtype: torch.dtype, index: torch.dtype
) -> None:
    source = torch.randn(7, width).to(dtype)
    wanted = reference.gather_rows(source, torch.tensor(rows, dtype=index))
    assert torch.equal(gather_rows(source, torch.tensor(rows, dtype=index)), wanted)
    assert torch.equal(embed(torch.tensor(rows, dtype=index), source), wanted)


def test_a_gather_into_given_memory_widens() -> None:
    source = torch.randn(4, 6).to(torch.bfloat16)
    out = torch.full((2, 6), 9.0)
    assert gather_rows(source, torch.tensor([3, -1]), out) is out
    assert torch.equal(out, torch.stack([source[3].float(), torch.zeros(6)]))
    with pytest.raises(ValueError, match="the result is"):
        gather_rows(source, torch.tensor([3]), out)
    with pytest.raises(ValueError, match="are gathered"):
        gather_rows(source.T, torch.tensor([3]))
