"""Routing, sorting by expert and the grouped GEMM in the interpreter, against their definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference_moe
from kernels.interface import Activation
from kernels.moe import ExpertParts, Routing
from kernels.triton.moe import ExpertMatrices, Tile, choose_tiles, pack_experts, run_experts
from kernels.triton.moe_route import route, sort_pairs

SMALL = (Tile(16, 32, 32, 4, 2), Tile(16, 32, 32, 4, 2))
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 4e-3}


@settings(max_examples=4, deadline=None)
@given(
    seed=st.integers(0, 99),
    routing=st.sampled_from(
        [
            Routing(experts=8, top_k=2, normalize=True),
            Routing(experts=6, top_k=4, scale=0.5),
            Routing(experts=24, top_k=5, scoring="sigmoid", normalize=True, groups=4, top_groups=2, scale=2.5),
        ]
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    equal=st.booleans(),
)
def test_experts_are_chosen_as_defined(seed: int, routing: Routing, dtype: torch.dtype, equal: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, routing.experts, generator=draw).to(dtype)
    if equal:  # many ties: the lowest number wins
        logits = logits.round()
    bias = torch.randn(routing.experts, generator=draw) * 0.2 if routing.scoring == "sigmoid" else None
    ids, weights = route(logits, routing, bias)
    wanted_ids, wanted = reference_moe.route(logits, routing, bias)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-6)


@settings(max_examples=4, deadline=None)
@given(
    ids=st.lists(st.integers(-1, 4), min_size=1, max_size=70),
    block_m=st.sampled_from([16, 32]),
)
def test_every_pair_lies_in_one_block_of_its_expert(ids: list[int], block_m: int) -> None:
    plan = sort_pairs(torch.tensor(ids, dtype=torch.int32), 5, block_m)
    assert plan.max_blocks == min(len(ids), len(ids) // block_m + 5)
    found: list[tuple[int, int]] = []
    lists = plan.blocks.tolist()
    used = sum(expert >= 0 for expert in lists[0])
    assert all(expert == -1 for expert in lists[0][used:])
    for expert, first, rows in list(zip(*lists, strict=True))[:used]:
        assert 0 < rows <= block_m
        found += [(expert, pair) for pair in plan.order[first : first + rows].tolist()]
    assert found == sorted((expert, pair) for pair, expert in enumerate(ids) if expert >= 0)


def layer(
    dtype: torch.dtype, *, biased: bool, experts: int = 5, hidden: int = 40, inner: int = 24
) -> list[ExpertParts]:
    draw = torch.Generator().manual_seed(2)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=draw) * scale).to(dtype)

    return [
        ExpertParts(
            gate_up=[random(inner, hidden, scale=0.2), random(inner, hidden, scale=0.2)],
            down=random(hidden, inner, scale=0.2),
            gate_up_bias=random(2 * inner) if biased else None,
            down_bias=random(hidden) if biased else None,
        )
        for _ in range(experts)
    ]


def batch(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and scales: expert 3 has most tokens, expert 4 none, and one place no expert."""
    draw = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(3, generator=draw)[:2] for _ in range(tokens)]).int()
    ids[:, 0] = 3
    ids[tokens // 2, 0] = -1
    return torch.randn(tokens, 40, generator=draw).to(dtype), ids, torch.rand(tokens, 2, generator=draw)


@pytest.mark.parametrize(
    ("dtype", "activation", "biased"),
    [(torch.float32, "silu", False), (torch.bfloat16, "clamped_silu", True), (torch.float16, "gelu_tanh", True)],
    ids=str,
)
def test_experts_run_as_defined(dtype: torch.dtype, activation: Activation, biased: bool) -> None:
    made = layer(dtype, biased=biased)
    x, ids, scales = batch(19, dtype)
    packed = pack_experts(iter(made), 5, lambda part: part if isinstance(part, Tensor) else torch.empty(0))
    got = run_experts(x, packed, ids, scales, activation, tiles=SMALL)
    wanted = reference_moe.run_experts(x, reference_moe.pack_experts(made, 5), ids, scales, activation)
    assert got.dtype == dtype and packed.nbytes == 5 * (3 * 40 * 24 + biased * (2 * 24 + 40)) * dtype.itemsize
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(got.float(), wanted.float(), rtol=bound, atol=bound * float(wanted.abs().max()))


@pytest.mark.usefixtures("exact_rows")
def test_a_row_is_the_same_bits_whatever_is_beside_it() -> None:
    made = layer(torch.float32, biased=True)
    packed = pack_experts(made, 5, lambda part: part if isinstance(part, Tensor) else torch.empty(0))
    x, ids, scales = batch(7, torch.float32)
    together = run_experts(x, packed, ids, scales, deterministic=True)
    for t in (0, 3):
        alone = run_experts(x[t : t + 1], packed, ids[t : t + 1], scales[t : t + 1], deterministic=True)
        assert torch.equal(alone[0], together[t])


def test_tiles_follow_the_tokens_of_an_expert_and_stand_still_where_bits_must() -> None:
    sizes = [choose_tiles(pairs, 128, torch.bfloat16)[0].m for pairs in (8, 2048, 4096, 8192, 65536)]
    assert sizes == [16, 16, 32, 64, 128]
    for dtype in (torch.bfloat16, torch.float32):
        fixed = {choose_tiles(pairs, 128, dtype, deterministic=True) for pairs in (8, 4096, 65536)}
        assert len(fixed) == 1
    assert all(first.m == second.m for first, second in (choose_tiles(n, 8, torch.float16) for n in (1, 200, 5000)))


def test_what_does_not_fit_is_refused() -> None:
    made = layer(torch.float32, biased=True)
    matrix = lambda part: part if isinstance(part, Tensor) else torch.empty(0)  # noqa: E731
    packed = pack_experts(made, 5, matrix)
    x, ids, scales = batch(2, torch.float32)
    assert isinstance(packed, ExpertMatrices) and packed.experts == 5
    assert run_experts(x[:0], packed, ids[:0], scales[:0]).shape == (0, 40)
    with pytest.raises(ValueError, match="5 experts are needed, not 4"):
        pack_experts(made[:4], 5, matrix)
    with pytest.raises(ValueError, match="4 experts are needed, not more"):
        pack_experts(made, 4, matrix)
    with pytest.raises(ValueError, match="equal in shape"):
        pack_experts([*made[:4], *layer(torch.float32, biased=True, experts=1, inner=32)], 5, matrix)
    with pytest.raises(ValueError, match="or none has"):
        pack_experts([*made[:4], *layer(torch.float32, biased=False, experts=1)], 5, matrix)
    with pytest.raises(ValueError, match="of one type"):
        run_experts(x.half(), packed, ids, scales)
    with pytest.raises(ValueError, match="routing needs logits"):
        route(torch.zeros(2, 5), Routing(experts=8, top_k=2))
    with pytest.raises(ValueError, match="bias of the choice"):
        route(torch.zeros(2, 8), Routing(experts=8, top_k=2), torch.zeros(7))
