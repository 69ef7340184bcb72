"""The whole-step decoder against the single operations: the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu import CpuOps
from kernels.decoder import DecoderOps, DecoderSpec, LayerSpec
from kernels.interface import WeightPart

HIDDEN, INNER, HQ, HKV, D, VOCAB, PAGE, LAYERS = 96, 160, 6, 2, 32, 70, 16, 3


@pytest.fixture
def spec(cpu: CpuOps, random_weight: Callable[..., WeightPart], kind: str, norms: bool) -> DecoderSpec:
    seeds: Iterator[int] = iter(range(100))

    def pack(rows: int, inputs: int, bias: bool = False) -> Any:
        part = random_weight(rows, inputs, kind, next(seeds))
        return cpu.pack([part], torch.randn(rows) if bias else None)

    def layer(index: int) -> LayerSpec:
        return LayerSpec(
            attention_norm=torch.rand(HIDDEN) * 0.3,
            qkv=pack((HQ + 2 * HKV) * D, HIDDEN, bias=norms),
            q_norm=torch.rand(D) if norms else None,
            k_norm=torch.rand(D) if norms else None,
            output=pack(HIDDEN, HQ * D),
            mlp_norm=torch.rand(HIDDEN) * 0.3,
            gate_up=pack(2 * INNER, HIDDEN),
            down=pack(HIDDEN, INNER),
            window=5 if index == 1 else 0,
        )

    embedding = pack(VOCAB, HIDDEN)
    return DecoderSpec(
        embedding=embedding,
        layers=[layer(index) for index in range(LAYERS)],
        norm=torch.rand(HIDDEN),
        head=embedding,
        cos_sin=torch.randn(128, D),
        num_q_heads=HQ,
        num_kv_heads=HKV,
        head_dim=D,
        eps=1e-5,
        scale=D**-0.5,
        activation="gelu_tanh" if norms else "silu",
    )


def one_by_one(ops: CpuOps, spec: DecoderSpec, step: dict[str, Any]) -> Tensor:
    residual, x = ops.embed(step["token_ids"], spec.embedding), None
    for index, layer in enumerate(spec.layers):
        keys, values = step["keys"][index], step["values"][index]
        norm = layer.attention_norm
        normed = ops.rms_norm(residual, norm, spec.eps) if x is None else ops.rms_norm(x, norm, spec.eps, residual)
        q = ops.rope_and_cache(
            ops.linear(normed, layer.qkv), HQ, HKV, step["positions"], step["slots"], spec.cos_sin, keys, values,
            layer.q_norm, layer.k_norm, spec.eps,
        )  # fmt: skip
        mixed = ops.paged_attention(
            q, keys, values, step["q_starts"], step["kv_lens"], step["page_table"], spec.scale, layer.window
        )
        normed = ops.rms_norm(ops.linear(mixed, layer.output), layer.mlp_norm, spec.eps, residual)
        x = ops.linear(ops.gated(ops.linear(normed, layer.gate_up), spec.activation), layer.down)
    assert x is not None
    return ops.linear(ops.rms_norm(x, spec.norm, spec.eps, residual)[step["logit_rows"]].contiguous(), spec.head)


def make_step(rows: list[int]) -> dict[str, Any]:
    """Sequences of 20 new tokens, 1 token after 19 others, and 3 after 30."""
    g, pages = torch.Generator().manual_seed(1), 12
    table = torch.tensor([[3, 7, 0], [1, 5, 0], [9, 2, 11]], dtype=torch.int32)
    positions = torch.cat([torch.arange(20), torch.arange(19, 20), torch.arange(30, 33)])
    owner = torch.tensor([0] * 20 + [1] + [2] * 3)
    caches = [torch.randn(pages, HKV, PAGE, D, generator=g).half() for _ in range(2 * LAYERS)]
    return {
        "token_ids": torch.randint(VOCAB, (24,), generator=g, dtype=torch.int32),
        "positions": positions.int(),
        "slots": (table[owner, positions // PAGE] * PAGE + positions % PAGE).int(),
        "q_starts": torch.tensor([0, 20, 21, 24], dtype=torch.int32),
        "kv_lens": torch.tensor([20, 20, 33], dtype=torch.int32),
        "page_table": table,
        "logit_rows": torch.tensor(rows, dtype=torch.int64),
        "keys": caches[:LAYERS],
        "values": caches[LAYERS:],
    }


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("kind", ["q4_1", "float32"])
@pytest.mark.parametrize("rows", [[19, 20, 23], [0, 5], list(range(24)), []], ids=str)
def test_a_step_equals_the_single_operations_bit_for_bit(cpu: CpuOps, spec: DecoderSpec, rows: list[int]) -> None:
    fused, single = make_step(rows), make_step(rows)
    logits = cpu.decoder(spec)(**fused)
    expected = one_by_one(cpu, spec, single)
    assert logits.shape == (len(rows), VOCAB)
    assert torch.equal(logits, expected)
    assert all(torch.equal(a, b) for a, b in zip(fused["keys"] + fused["values"], single["keys"] + single["values"]))


@pytest.mark.parametrize(("kind", "norms"), [("float32", False)])
def test_bad_steps_are_refused_before_a_cache_is_written(cpu: CpuOps, spec: DecoderSpec) -> None:
    program = cpu.decoder(spec)
    assert isinstance(cpu, DecoderOps)
    bad: list[tuple[str, Tensor, type[Exception], str]] = [
        ("token_ids", torch.full((24,), VOCAB, dtype=torch.int32), IndexError, "token id"),
        ("slots", torch.full((24,), 12 * PAGE, dtype=torch.int32), IndexError, "slot"),
        ("positions", torch.full((24,), 128, dtype=torch.int32), IndexError, "position"),
        ("page_table", torch.full((3, 3), 12, dtype=torch.int32), IndexError, "page"),
        ("logit_rows", torch.tensor([24]), IndexError, "row"),
        ("logit_rows", torch.tensor([3, 3]), IndexError, "row"),
        ("logit_rows", torch.tensor([3], dtype=torch.int32), ValueError, "int64"),
        ("kv_lens", torch.tensor([20, 20, 49], dtype=torch.int32), ValueError, "do not fit together"),
        ("q_starts", torch.tensor([0, 20, 24], dtype=torch.int32), ValueError, "q_starts"),
        ("positions", torch.zeros(3, dtype=torch.int32), ValueError, "must be"),
    ]
    for name, value, error, message in bad:
        step = make_step([3]) | {name: value}
        with pytest.raises(error, match=message):
            program(**step)
        assert all(
            torch.equal(a, b)
            for a, b in zip(step["keys"] + step["values"], make_step([3])["keys"] + make_step([3])["values"])
        )
    step = make_step([3])
    with pytest.raises(ValueError, match="3 layers need as many caches"):
        program(**step | {"keys": step["keys"][:2]})
    with pytest.raises(ValueError, match="one shape and type"):
        program(
            **step
            | {
                "values": [*step["values"][:2], step["values"][2].float()],
                "keys": [*step["keys"][:2], step["keys"][2].float()],
            }
        )


@pytest.mark.parametrize(("kind", "norms"), [("float32", False)])
def test_weights_that_do_not_fit_are_refused(cpu: CpuOps, spec: DecoderSpec) -> None:
    with pytest.raises(ValueError, match="should be"):
        cpu.decoder(replace(spec, num_q_heads=8))
    with pytest.raises(ValueError, match=r"norm of \[3\]"):
        cpu.decoder(replace(spec, norm=torch.ones(3)))
    with pytest.raises(ValueError, match="rotary table"):
        cpu.decoder(replace(spec, cos_sin=torch.zeros(4, D + 2)))
    with pytest.raises(ValueError, match="0 layers"):
        cpu.decoder(replace(spec, layers=[]))
    with pytest.raises(ValueError, match="unknown activation"):
        cpu.decoder(replace(spec, activation="relu"))  # type: ignore[arg-type]
