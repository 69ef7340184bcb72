"""The CPU implementation of machines without a compiler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import kernels
from kernels.fallback import ROWS, TorchOps
from kernels.interface import WeightPart
from kernels.reference import ReferenceOps


def test_without_a_compiler_the_cpu_choice_warns_and_still_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        ops = kernels.table("cpu", "cpu", cache_dir=tmp_path)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no C compiler found" in caplog.text
    assert ops.name == "torch"
    x, weight, reference = torch.randn(37, 64), torch.randn(20, 64), ReferenceOps()
    expected = reference.linear(x, reference.pack([weight]))
    packed = ops.pack([weight])
    torch.testing.assert_close(ops.linear(x, packed), expected)
    assert torch.equal(ops.linear(x, packed)[20:21], ops.linear(x[20:21], packed))


@pytest.mark.parametrize("tokens", [1, ROWS - 1, ROWS, ROWS + 1, 5 * ROWS])
def test_linear_agrees_with_the_reference_for_any_number_of_rows(
    tokens: int, random_weight: Callable[..., WeightPart]
) -> None:
    ops, reference = TorchOps(), ReferenceOps()
    part, bias, x = random_weight(30, 64, "q4_1"), torch.randn(30), torch.randn(tokens, 64)
    out = ops.linear(x, ops.pack([part], bias))
    torch.testing.assert_close(out, reference.linear(x, reference.pack([part], bias)))


def test_bad_input_is_refused() -> None:
    ops = TorchOps()
    with pytest.raises(ValueError, match=r"\[T, 8\]"):
        ops.linear(torch.zeros(1, 9), ops.pack([torch.zeros(4, 8)]))
    with pytest.raises(TypeError, match="another implementation"):
        ops.linear(torch.zeros(1, 8), object())  # type: ignore[arg-type]
