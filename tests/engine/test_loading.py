"""From a configuration to a warm engine."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine.batch import ForwardBatch
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.sampling_params import SamplingParams
from engine.weights.errors import WeightsError
from engine.wire import Submit, pack_tokens, unpack_tokens


def test_the_default_model_loads_warm_and_answers(model_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="engine.core"):
        core = EngineCore.load(EngineConfig(model=str(model_path), device="cpu", threads=1, kv_memory_mib=64))
    assert (core.max_context, core.vocab_size) == (2912, 49152)
    assert core.kv_tokens == 2912
    assert (core.snapshot().steps, core.snapshot().kv_pages_cached) == (0, 0)
    for part in ("weights", "KV cache 6", "context 2912", "start-up took", "warm-up"):
        assert part in caplog.text
    prompt = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    core.submit(Submit(request_id="a", prompt=pack_tokens(prompt), params=SamplingParams(max_tokens=8, temperature=0)))
    tokens: list[int] = []
    while core.has_work():
        for progress in core.step():
            tokens += unpack_tokens(progress.tokens)
    assert 0 < len(tokens) <= 8


def test_a_model_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"missing\.gguf"):
        EngineCore.load(EngineConfig(model=str(tmp_path / "missing.gguf"), device="cpu"))


def test_a_context_that_does_not_fit_is_refused_with_the_numbers(model_path: Path) -> None:
    config = EngineConfig(model=str(model_path), device="cpu", threads=1, kv_memory_mib=8, max_context=4096)
    with pytest.raises(ValueError, match=r"max_context 4096 .* needs kv_memory_mib 90"):
        EngineCore.load(config)


def test_a_model_that_does_not_run_is_an_error_at_start(make_bench: object, caplog: pytest.LogCaptureFixture) -> None:
    from engine.loading import warm_up

    bench = make_bench()  # type: ignore[operator]

    def fail(batch: ForwardBatch) -> None:
        raise RuntimeError("illegal instruction")

    bench.model.before = fail
    with pytest.raises(ValueError, match=r"the model does not run: .*illegal instruction"):
        warm_up(EngineConfig(), bench.model, None)
    assert "failed" in caplog.text
