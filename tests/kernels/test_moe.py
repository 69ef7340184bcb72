"""Mixture of experts: the definition against its formulas, the native implementation against the definition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu import CpuOps
from kernels.fallback import TorchOps
from kernels.interface import Activation, BlockQuantized, WeightPart
from kernels.moe import ExpertParts, Routing
from kernels.reference import ReferenceOps

MakeWeight = Callable[..., WeightPart]
ROUTINGS = {
    "mixtral": Routing(experts=8, top_k=2, normalize=True),
    "qwen3": Routing(experts=60, top_k=8),
    "all": Routing(experts=3, top_k=3, scale=0.5),
    "deepseek": Routing(experts=32, top_k=6, scoring="sigmoid", normalize=True, groups=8, top_groups=3, scale=2.5),
    "sigmoid": Routing(experts=9, top_k=2, scoring="sigmoid"),
}


def expected(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """As transformers' routers compute it, for a whole batch."""
    scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
    by = scores if bias is None else scores + bias
    if routing.groups > 1:
        grouped = by.view(len(by), routing.groups, -1)
        best = grouped.topk(2).values.sum(-1).topk(routing.top_groups).indices
        kept = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter_(1, best, True)
        by = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    ids = by.topk(routing.top_k).indices
    weights = scores.gather(1, ids)
    if routing.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids.int(), weights * routing.scale


@pytest.mark.parametrize("name", ROUTINGS)
def test_experts_are_chosen_as_the_models_choose_them(name: str, reference: ReferenceOps, cpu: CpuOps) -> None:
    routing, draw = ROUTINGS[name], torch.Generator().manual_seed(5)
    logits = torch.randn(19, routing.experts, generator=draw) * 2
    bias = torch.randn(routing.experts, generator=draw) * 0.2 if routing.scoring == "sigmoid" else None
    ids, weights = reference.route(logits, routing, bias)
    wanted_ids, wanted = expected(logits, routing, bias)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-7)
    native_ids, native = cpu.route(logits, routing, bias)
    assert torch.equal(native_ids, ids)
    torch.testing.assert_close(native, weights, rtol=1e-5, atol=1e-7)
    assert torch.equal(cpu.route(logits[7:8], routing, bias)[1][0], native[7])


@settings(max_examples=25, deadline=None)
@given(values=st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=8, max_size=8), grouped=st.booleans())
def test_of_equal_scores_the_first_expert_is_chosen(values: list[float], grouped: bool, cpu: CpuOps) -> None:
    routing = Routing(experts=8, top_k=3, groups=2 if grouped else 1, normalize=True)
    logits = torch.tensor([values])
    ids, weights = ReferenceOps().route(logits, routing)
    mine, mine_weights = cpu.route(logits, routing)
    assert torch.equal(mine, ids)
    torch.testing.assert_close(mine_weights, weights)
    row = ids[0].tolist()
    open_experts = range(4) if grouped and sum(sorted(values[:4])[2:]) >= sum(sorted(values[4:])[2:]) else range(8)
    if grouped and open_experts == range(8):
        open_experts = range(4, 8)
    assert row == sorted(open_experts, key=lambda expert: (-values[expert], expert))[:3]


def parts(make: MakeWeight, kind: str, *, biased: bool, experts: int = 6, hidden: int = 64, inner: int = 32) -> list[
    ExpertParts
]:  # fmt: skip
    made = []
    for e in range(experts):
        draw = torch.Generator().manual_seed(e)
        made.append(
            ExpertParts(
                gate_up=[make(inner, hidden, kind, 3 * e), make(inner, hidden, kind, 3 * e + 1)],
                down=make(hidden, inner, kind, 3 * e + 2),
                gate_up_bias=torch.randn(2 * inner, generator=draw) if biased else None,
                down_bias=torch.randn(hidden, generator=draw) if biased else None,
            )
        )
    return made


def batch(tokens: int, *, experts: int = 6, top_k: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and scales; one place has no expert."""
    draw = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(experts, generator=draw)[:top_k] for _ in range(tokens)]).int()
    ids[tokens // 2, 1] = -1
    x = torch.randn(tokens, 64, generator=draw) / 4
    return x, ids, torch.rand(tokens, top_k, generator=draw)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_silu"])
@pytest.mark.parametrize(("kind", "biased"), [("float32", False), ("bfloat16", True), ("q8_0", True)])
def test_experts_run_as_defined(
    kind: str, biased: bool, activation: Activation, cpu: CpuOps, reference: ReferenceOps, random_weight: MakeWeight
) -> None:
    made = parts(random_weight, kind, biased=biased)
    x, ids, scales = batch(13)
    plain = reference.pack_experts(made, 6)
    wanted = reference.run_experts(x, plain, ids, scales, activation)
    got = cpu.run_experts(x, cpu.pack_experts(made, 6), ids, scales, activation)
    torch.testing.assert_close(got, wanted, rtol=2e-3, atol=2e-3 * float(wanted.abs().max()))
    if kind == "float32":
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-4)
        torch_ops = TorchOps()
        theirs = torch_ops.run_experts(x, torch_ops.pack_experts(made, 6), ids, scales, activation)
        torch.testing.assert_close(theirs, wanted, rtol=1e-5, atol=1e-4)


def test_the_definition_is_the_formula(reference: ReferenceOps, random_weight: MakeWeight) -> None:
    made = parts(random_weight, "float32", biased=True)
    x, ids, scales = batch(4)
    got = reference.run_experts(x, reference.pack_experts(iter(made), 6), ids, scales, "clamped_silu")
    wanted = torch.zeros_like(x)
    for t in range(4):
        for k in range(3):
            if ids[t, k] >= 0:
                expert = made[int(ids[t, k])]
                assert isinstance(expert.down, Tensor) and expert.gate_up_bias is not None
                rows = torch.cat([part for part in expert.gate_up if isinstance(part, Tensor)])
                gate, up = (x[t] @ rows.T + expert.gate_up_bias).chunk(2)
                gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
                inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
                assert expert.down_bias is not None
                wanted[t] += scales[t, k] * (inner @ expert.down.T + expert.down_bias)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["float32", "q4_0"])
def test_a_token_s_result_does_not_depend_on_its_neighbours(kind: str, cpu: CpuOps, random_weight: MakeWeight) -> None:
    packed = cpu.pack_experts(parts(random_weight, kind, biased=True), 6)
    x, ids, scales = batch(40)
    together = cpu.run_experts(x, packed, ids, scales)
    for t in (0, 7, 20, 39):
        alone = cpu.run_experts(x[t : t + 1], packed, ids[t : t + 1].contiguous(), scales[t : t + 1].contiguous())
        assert torch.equal(alone[0], together[t])
    assert cpu.run_experts(x[:0], packed, ids[:0], scales[:0]).shape == (0, 64)


def test_what_does_not_fit_is_refused(cpu: CpuOps, reference: ReferenceOps, random_weight: MakeWeight) -> None:
    made = parts(random_weight, "float32", biased=False)
    x, ids, scales = batch(4)
    for ops in (cpu, reference):
        packed = ops.pack_experts(made, 6)
        assert packed.experts == 6 and packed.nbytes >= 6 * 3 * 64 * 32 * 4
        with pytest.raises(ValueError, match="6 experts are needed, not 5"):
            ops.pack_experts(made[:5], 6)
        with pytest.raises(ValueError, match="equal in shape"):
            ops.pack_experts([*made[:5], *parts(random_weight, "float32", biased=False, experts=1, inner=64)], 6)
        with pytest.raises(ValueError, match=r"x of \[T, 64\]"):
            ops.run_experts(torch.zeros(4, 63), packed, ids, scales)
        with pytest.raises(ValueError, match="do not fit 4 tokens"):
            ops.run_experts(x, packed, ids[:3], scales)
        with pytest.raises(IndexError):
            ops.run_experts(x, packed, ids + 6, scales)
        with pytest.raises(ValueError, match="routing needs logits"):
            ops.route(torch.zeros(2, 5), ROUTINGS["mixtral"])
        with pytest.raises(TypeError, match="another implementation"):
            ops.run_experts(x, object(), ids, scales)  # type: ignore[arg-type]
    assert isinstance(made[0].down, Tensor) and not isinstance(made[0].down, BlockQuantized)


@pytest.mark.parametrize(
    "numbers",
    [
        {"experts": 4, "top_k": 5},
        {"experts": 4, "top_k": 0},
        {"experts": 6, "top_k": 2, "groups": 4},
        {"experts": 8, "top_k": 5, "groups": 2, "top_groups": 1},
        {"experts": 8, "top_k": 2, "groups": 8, "top_groups": 2},
        {"experts": 8, "top_k": 2, "groups": 2, "top_groups": 3},
    ],
    ids=str,
)
def test_a_routing_that_cannot_be_is_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"experts|group"):
        Routing(**numbers)  # type: ignore[arg-type]
