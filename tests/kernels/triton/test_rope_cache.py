"""Rotation and cache writes against the reference, in the interpreter; every slot that nobody owns is a canary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.triton.attention_shape import HEAD_DIMS
from kernels.triton.rope_cache import rope_and_cache

FP8 = torch.float8_e4m3fn
TYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16),
         (torch.float32, torch.bfloat16), (torch.bfloat16, FP8)]  # fmt: skip
CANARY = 0xA5


def bits(cache: Tensor) -> Tensor:
    return cache.view(torch.uint8)


def check(
    tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    page: int,
    types: tuple[torch.dtype, torch.dtype],
    *,
    norms: bool = False,
    padding: int = 0,
    seed: int = 0,
) -> None:
    g = torch.Generator().manual_seed(seed)
    Hq, Hkv = heads
    dtype, kv_dtype = types
    pages = -(-tokens // page) + 2
    qkv = torch.randn(tokens + padding, (Hq + 2 * Hkv) * head_dim, generator=g).to(dtype)
    slots = torch.cat([torch.randperm(pages * page, generator=g)[:tokens].int(), torch.full((padding,), -1).int()])
    positions = torch.randint(0, 50, (tokens + padding,), generator=g).int()
    positions[tokens:] = 1 << 30
    angles = torch.randn(50, head_dim, generator=g)
    norm = [torch.rand(head_dim, generator=g).to(dtype) + 0.5 for _ in range(2)] if norms else [None, None]
    scales = {name: torch.rand(Hkv, generator=g) / 50 for name in ("k_scale", "v_scale")} if kv_dtype == FP8 else {}
    empty = torch.full((pages, Hkv, page, head_dim * kv_dtype.itemsize), CANARY, dtype=torch.uint8).view(kv_dtype)
    keys, values, keys_too, values_too = (empty.clone() for _ in range(4))
    q = rope_and_cache(qkv, Hq, Hkv, positions, slots, angles, keys, values, *norm, 1e-5, **scales)
    positions[tokens:] = 0
    expected = reference.rope_and_cache(
        qkv, Hq, Hkv, positions, slots, angles, keys_too, values_too, *norm, 1e-5, **scales
    )
    close = 1e-5 if dtype == torch.float32 else 2 * float(torch.finfo(dtype).eps)
    torch.testing.assert_close(q[:tokens], expected[:tokens], atol=close, rtol=close)
    # A value is copied, so it is the same bits; a key is computed, and one in many is rounded the other way
    assert torch.equal(bits(values), bits(values_too))
    written = torch.zeros(pages, Hkv, page, dtype=torch.bool)
    written[slots[:tokens].long() // page, :, slots[:tokens].long() % page] = True
    assert (bits(keys)[~written] == CANARY).all()
    eps = 2.0**-3 if kv_dtype == FP8 else float(torch.finfo(kv_dtype).eps)
    torch.testing.assert_close(keys.float()[written], keys_too.float()[written], atol=1e-5, rtol=2 * eps)
    assert (bits(keys) == bits(keys_too)).float().mean() > 0.9 or kv_dtype == torch.float32


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_agrees_and_writes_nowhere_else(types: tuple[torch.dtype, torch.dtype], head_dim: int) -> None:
    check(5, (6, 2), head_dim, 16, types, padding=3)
    check(3, (4, 4), head_dim, 32, types, norms=True)


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (5, 5), (28, 4), (71, 1)], ids=str)
def test_any_number_of_heads(heads: tuple[int, int]) -> None:
    check(3, heads, 64, 16, TYPES[1], norms=True, padding=1)


def test_large_steps_take_more_heads_a_program() -> None:
    check(60, (2, 1), 64, 16, TYPES[1], padding=5)


def test_8_bit_rounding_is_that_of_the_definition_for_every_kind_of_number() -> None:
    """Halfway cases, subnormal numbers, saturation and signs, each bit for bit."""
    all_bytes = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    finite = all_bytes[all_bytes.isfinite()].unique()
    halfway = (finite[1:] + finite[:-1]) / 2
    edges = [finite, halfway, halfway.nextafter(torch.tensor(1e9)), halfway.nextafter(torch.tensor(-1e9))]
    numbers = torch.cat([*edges, torch.tensor([449.0, 464.0, 465.0, 1e30, -1e30, float("inf"), 1e-30, -0.0])])
    head_dim, tokens = 64, -(-numbers.numel() // 64)
    v = torch.zeros(tokens * head_dim).index_copy_(0, torch.arange(numbers.numel()), numbers).reshape(tokens, head_dim)
    qkv = torch.cat([torch.zeros(tokens, 2 * head_dim), v], dim=1)
    slots, zeros = torch.arange(tokens).int(), torch.zeros(1, head_dim)
    keys = torch.zeros(2, 1, 16, head_dim).to(FP8)
    values, one = keys.clone(), torch.ones(1)
    rope_and_cache(qkv, 1, 1, torch.zeros_like(slots), slots, zeros, keys, values, k_scale=one, v_scale=one)
    assert torch.equal(bits(values.reshape(-1, head_dim)[:tokens]), bits(reference.quantize_e4m3(v)))


def test_all_padding_writes_nothing() -> None:
    check(0, (2, 1), 64, 16, TYPES[0], padding=4)
    q = rope_and_cache(
        torch.zeros(0, 256), 2, 1, torch.zeros(0).int(), torch.zeros(0).int(), torch.zeros(1, 64),
        torch.zeros(1, 1, 16, 64), torch.zeros(1, 1, 16, 64),
    )  # fmt: skip
    assert q.shape == (0, 2, 64)


def test_what_does_not_fit_is_refused() -> None:
    given = {
        "qkv": torch.zeros(2, 256),
        "q_heads": 2,
        "kv_heads": 1,
        "positions": torch.zeros(2).int(),
        "slots": torch.zeros(2).int(),
        "cos_sin": torch.zeros(4, 64),
        "keys": torch.zeros(1, 1, 16, 64),
        "values": torch.zeros(1, 1, 16, 64),
    }

    def rope(**changed: object) -> Tensor:
        return rope_and_cache(*(given | changed).values())

    assert rope().shape == (2, 2, 64)
    with pytest.raises(ValueError, match="equal in shape and type"):
        rope(values=torch.zeros(1, 1, 16, 64).half())
    with pytest.raises(ValueError, match="does not fit 2 key/value heads"):
        rope(kv_heads=2)
    with pytest.raises(ValueError, match="do not fit heads of 64"):
        rope(q_heads=3)
    with pytest.raises(ValueError, match="do not fit heads of 64"):
        rope(cos_sin=torch.zeros(4, 32))
    with pytest.raises(ValueError, match="must be float32"):
        rope(cos_sin=torch.zeros(4, 64).half())
    with pytest.raises(ValueError, match=r"slots must be \[2\]"):
        rope(slots=torch.zeros(3).int())
    with pytest.raises(ValueError, match="positions must be"):
        rope(positions=torch.zeros(2))
    with pytest.raises(ValueError, match="qkv must be contiguous"):
        rope(qkv=torch.zeros(256, 2).t())
    with pytest.raises(ValueError, match="needs k_scale"):
        rope(keys=torch.zeros(1, 1, 16, 64).to(FP8), values=torch.zeros(1, 1, 16, 64).to(FP8))
    with pytest.raises(ValueError, match=r"must be \[64\]"):
        rope(q_norm=torch.zeros(32))


@settings(max_examples=10)
@given(
    tokens=st.integers(0, 12),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (10, 5)]),
    head_dim=st.sampled_from([*HEAD_DIMS, 16, 34]),
    page=st.sampled_from([16, 32, 64]),
    types=st.sampled_from(TYPES),
    norms=st.booleans(),
    padding=st.integers(0, 4),
    seed=st.integers(0, 1000),
)
def test_random_steps_agree(
    tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    page: int,
    types: tuple[torch.dtype, torch.dtype],
    norms: bool,
    padding: int,
    seed: int,
) -> None:
    check(tokens, heads, head_dim, page, types, norms=norms, padding=padding, seed=seed)
