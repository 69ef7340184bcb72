"""Long prompts' attention by a library gives what paged attention gives."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.long_prefill import Library, LongPrefill, Spans, definition, gathered_bytes, library

DEFINED = Library("the definition", definition, softcap=True)


def paged(lengths: list[tuple[int, int]], seed: int, padding: int = 0) -> dict[str, Any]:
    """Caches in which sequences lie in shuffled pages, and queries for the last tokens of each."""
    generator = torch.Generator().manual_seed(seed)
    size, heads, kv_heads, dim = 16, 6, 2, 8
    need = [-(-keys // size) for _, keys in lengths]
    pages = torch.randperm(sum(need) + 3, generator=generator).to(torch.int32)
    table = torch.zeros(len(lengths), max(need), dtype=torch.int32)
    at = 0
    for row, count in enumerate(need):
        table[row, :count] = pages[at : at + count]
        at += count
    queries = [q for q, _ in lengths]
    cache = (sum(need) + 3, kv_heads, size, dim)
    return {
        "q": torch.randn(sum(queries) + padding, heads, dim, generator=generator),
        "keys": torch.randn(cache, generator=generator),
        "values": torch.randn(cache, generator=generator),
        "table": table,
        "starts": torch.tensor([0, *queries]).cumsum(0).to(torch.int32),
        "lens": torch.tensor([k for _, k in lengths], dtype=torch.int32),
    }


chunks = st.integers(1, 70).flatmap(lambda keys: st.tuples(st.integers(1, keys), st.just(keys)))


@settings(max_examples=25)
@given(st.lists(chunks, min_size=1, max_size=4), st.integers(0, 999), st.sampled_from([0.0, 3.0]), st.integers(0, 5))
def test_it_is_paged_attention(lengths: list[tuple[int, int]], seed: int, softcap: float, padding: int) -> None:
    case = paged(lengths, seed, padding)
    tokens = sum(q for q, _ in lengths)
    plan = LongPrefill(DEFINED, [q for q, _ in lengths], [k for _, k in lengths], case["table"], 16)
    assert plan.takes(case["q"], case["keys"], 0, softcap, None)
    mixed = plan.attend(case["q"], case["keys"], case["values"], 0.3, softcap)
    wanted = reference.paged_attention(
        case["q"][:tokens], case["keys"], case["values"], case["starts"], case["lens"], case["table"], 0.3,
        softcap=softcap,
    )  # fmt: skip
    torch.testing.assert_close(mixed[:tokens], wanted, atol=2e-6, rtol=2e-5)
    assert not mixed[tokens:].any(), "padding gives zeros"


def test_layers_that_the_library_cannot_do_are_not_given_to_it() -> None:
    case = paged([(4, 20)], 1)
    plain = Library("torch's", definition, softcap=False)
    plan = LongPrefill(plain, [4], [20], case["table"], 16)
    assert plan.takes(case["q"], case["keys"], 0, 0.0, None)
    assert not plan.takes(case["q"], case["keys"], 32, 0.0, None), "a window"
    assert not plan.takes(case["q"], case["keys"], 0, 30.0, None), "a soft-cap"
    assert not plan.takes(case["q"], case["keys"], 0, 0.0, torch.zeros(6)), "sinks"
    assert not plan.takes(case["q"], case["keys"].half(), 0, 0.0, None), "a cache of another type"


def test_flash_attn_is_asked_as_it_wants_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def flash(q: Tensor, k: Tensor, v: Tensor, *spans: Any, **named: Any) -> Tensor:
        asked.update(named)
        return definition(q, k, v, Spans(*spans), named["softmax_scale"], named["softcap"])

    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    found = library("cuda")
    assert found is not None and found.name == "flash-attn" and found.softcap
    assert found.types == (torch.float16, torch.bfloat16)
    case = paged([(3, 9)], 2)
    plan = LongPrefill(found, [3], [9], case["table"], 16)
    mixed = plan.attend(case["q"], case["keys"], case["values"], 0.25, 2.0)
    assert asked == {"softmax_scale": 0.25, "causal": True, "softcap": 2.0}
    assert torch.equal(mixed, LongPrefill(DEFINED, [3], [9], case["table"], 16).attend(
        case["q"], case["keys"], case["values"], 0.25, 2.0
    ))  # fmt: skip


def test_without_flash_attn_torch_s_own_is_taken_with_its_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.nn.attention.varlen as varlen

    asked: dict[str, Any] = {}

    def varlen_attn(q: Tensor, k: Tensor, v: Tensor, *spans: Any, **named: Any) -> Tensor:
        asked.update(named)
        return definition(q, k, v, Spans(*spans), named["scale"], 0.0)

    monkeypatch.setitem(sys.modules, "flash_attn", None)  # importing it fails, as where it is not installed
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    found = library("cuda")
    assert found is not None and not found.softcap and found.types == (torch.float16, torch.bfloat16)
    case = paged([(3, 9)], 2)
    LongPrefill(found, [3], [9], case["table"], 16).attend(case["q"], case["keys"], case["values"], 0.25, 0.0)
    assert asked == {"scale": 0.25, "window_size": (-1, 0), "enable_gqa": True}


def test_what_is_gathered_is_counted() -> None:
    case = paged([(3, 40)], 3)
    plan = LongPrefill(DEFINED, [3], [40], case["table"], 16)
    gathered = plan.gathered(case["keys"])
    assert gathered_bytes(40, case["keys"]) == 2 * gathered.nbytes and gathered.is_contiguous()
