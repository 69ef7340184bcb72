"""Mixture of experts: routing and the grouped product against their definitions, and what they are timed on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.cases import CLOSE, Case, close, draw
from kernels import reference_moe
from kernels.interface import Activation
from kernels.moe import ExpertParts, Routing
from kernels.triton.moe import ExpertMatrices, run_experts
from kernels.triton.moe_route import route

KERNELS = ("moe_route", "moe")
ROUTINGS = {
    "a softmax over the chosen": Routing(experts=8, top_k=2, normalize=True),
    "a softmax over all": Routing(experts=128, top_k=8),
    "sigmoids within groups": Routing(
        experts=256, top_k=8, scoring="sigmoid", normalize=True, groups=8, top_groups=4, scale=2.5
    ),
}
QWEN3_30B = (128, 8, 2048, 768)
TINY = (4, 2, 40, 24)
"""Experts, experts of a token, hidden and inner size"""


def cases(device: str, tiny: bool) -> Iterator[Case]:
    """Every kind of routing; experts of few tokens and of many, with biases and without."""
    for name, routing in list(ROUTINGS.items())[: 1 if tiny else None]:
        for rows in (3,) if tiny else (1, 300):
            yield Case("moe_route", f"{name}, {rows} rows", partial(_routing, device, routing, rows))
    activations: tuple[Activation, ...] = ("silu",) if tiny else ("silu", "clamped_silu")
    for dtype in (torch.bfloat16,) if tiny else CLOSE:
        for tokens in (5,) if tiny else (1, 40, 700, 5000):
            for activation in activations:
                label = f"{activation} {dtype} {tokens} tokens"
                yield Case("moe", label, partial(_experts, device, tokens, dtype, activation))


def _routing(device: str, routing: Routing, rows: int) -> None:
    logits = draw(1, rows, routing.experts)
    bias = draw(2, routing.experts, scale=0.1) if routing.scoring == "sigmoid" else None
    ids, weights = route(logits.to(device), routing, None if bias is None else bias.to(device))
    wanted, expected = reference_moe.route(logits, routing, bias)
    assert torch.equal(ids.cpu(), wanted), "other experts are chosen"
    close(weights, expected, 1e-5)


def _experts(device: str, tokens: int, dtype: torch.dtype, activation: Activation) -> None:
    """Sizes that no tile divides; results are of size 1."""
    experts, top_k, hidden, inner = TINY if device == "cpu" else (9, 3, 200, 104)
    parts = [
        ExpertParts(
            gate_up=[draw(10 * e + n, inner, hidden, dtype=dtype, scale=hidden**-0.5) for n in (0, 1)],
            down=draw(10 * e + 2, hidden, inner, dtype=dtype, scale=inner**-0.5),
            gate_up_bias=draw(10 * e + 3, 2 * inner, dtype=dtype),
            down_bias=draw(10 * e + 4, hidden, dtype=dtype),
        )
        for e in range(experts)
    ]
    x, routing = draw(5, tokens, hidden, dtype=dtype), Routing(experts=experts, top_k=top_k, normalize=True)
    ids, scales = reference_moe.route(draw(6, tokens, experts), routing)
    wanted = reference_moe.run_experts(x, reference_moe.pack_experts(parts, experts), ids, scales, activation)
    stacked = [
        torch.stack([torch.cat([rows for rows in part.gate_up if isinstance(rows, Tensor)]) for part in parts]),
        torch.stack([part.down for part in parts if isinstance(part.down, Tensor)]),
        torch.stack([part.gate_up_bias for part in parts if part.gate_up_bias is not None]),
        torch.stack([part.down_bias for part in parts if part.down_bias is not None]),
    ]
    weights = ExpertMatrices(*(tensor.to(device) for tensor in stacked))
    got = run_experts(x.to(device), weights, ids.to(device), scales.to(device), activation)
    close(got, wanted, 2 * CLOSE[dtype])


def timed(device: str, dtype: torch.dtype, tiny: bool) -> Iterator[tuple[str, str, Callable[[], object], float, float]]:
    """(kernel, shape, call, bytes that it has to move at least, operations) of Qwen3-30B's experts, any routing."""
    experts, top_k, hidden, inner = TINY if tiny else QWEN3_30B
    scale = hidden**-0.5
    weights = ExpertMatrices(
        torch.randn(experts, 2 * inner, hidden, device=device).mul_(scale).to(dtype),
        torch.randn(experts, hidden, inner, device=device).mul_(scale).to(dtype),
    )
    routing, expert_bytes = Routing(experts=experts, top_k=top_k, normalize=True), weights.nbytes / experts
    for tokens in (2,) if tiny else (1, 16, 256, 2048):
        x = torch.randn(tokens, hidden, device=device).to(dtype)
        logits = torch.randn(tokens, experts, device=device).to(dtype)
        ids, scales = route(logits, routing)
        met = len(set(ids.flatten().tolist()))
        moved = met * expert_bytes + tokens * (2 * hidden + top_k * (2 * inner + 2 * hidden)) * dtype.itemsize
        label = f"{tokens} tokens, {met} of {experts} experts"
        yield "routing", label, partial(route, logits, routing), logits.nbytes, 0.0
        call = partial(run_experts, x, weights, ids, scales)
        yield "experts", label, call, moved, 6.0 * tokens * top_k * hidden * inner
