"""What is asked of an engine, asked of a scripted one whose times are known; and how answers are compared."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.gpu import scenarios
from benchmarks.gpu.budget import Deadline
from benchmarks.gpu.equality import Answer, compare, prompts_of
from benchmarks.gpu.over_http import serve_options
from benchmarks.gpu.peer import overlap_rate
from benchmarks.gpu.record import Record, Recorder
from benchmarks.gpu.streams import Stream, StreamError
from benchmarks.gpu.switches import differences, variants
from benchmarks.gpu.workload import FULL, TINY_LOAD, known_settings
from engine.config import EngineConfig
from engine.wire import TokenLogprobs
from gateway.cli import make_parser, read_settings


class ScriptedPort:
    """Answers at once; on paper the first token takes a millisecond for each token of the prompt, later ones two."""

    place = "in process"

    def __init__(self, lost: int = -1, cached: int = 0) -> None:
        self.asked: list[tuple[list[int], int]] = []
        self.stopped = 0
        self._lost = lost
        self._cached = cached

    def start(self, prompt: Sequence[int], tokens: int) -> Stream:
        stream = Stream(sent=10.0)
        if len(self.asked) == self._lost:
            stream.failed("the engine has gone")
        self.asked.append((list(prompt), tokens))
        for n in range(tokens):
            stream.arrived(10.0 + len(prompt) / 1e3 + 2e-3 * n, 1)
        stream.ended(len(prompt), self._cached)
        return stream

    def stop(self, stream: Stream) -> None:
        self.stopped += 1


LOAD = dataclasses.replace(TINY_LOAD, prompts={128: (16, 3), 8192: (200, 2)}, answer=12, batches={256: 6})
ALL = (
    scenarios.first_tokens,
    scenarios.one_stream,
    scenarios.long_prompt_arrives,
    scenarios.chat_lengths,
    scenarios.saturated,
)


def measured(port: ScriptedPort, path: Path, *asked: scenarios.Scenario, seconds: float = 60) -> Record:
    recorder = Recorder("scripted", path / "scripted.json")
    asyncio.run(scenarios.measure(port, LOAD, recorder, Deadline(seconds), asked))
    return recorder.record


def test_figures_follow_from_arrivals(tmp_path: Path) -> None:
    port = ScriptedPort()
    found = measured(port, tmp_path, *ALL)
    assert [check["ok"] for check in found.checks] == [True] * 5, found.checks
    figures = {name.removeprefix("in process."): value for name, value in found.figures.items()}
    assert figures["ttft_128_ms"] == pytest.approx(16) and figures["ttft_8192_ms"] == pytest.approx(200)
    assert figures["tpot_1_ms"] == pytest.approx(2) and figures["gap_p99_ms"] == pytest.approx(2)
    assert figures["decode_256_tok_s"] == pytest.approx(6 / 2e-3)
    assert 4 <= figures["ttft_mixed_ms"] <= 32
    assert port.stopped >= len(port.asked), "nothing is left running"


def test_idle_prompts_are_new_and_saturated_ones_are_computed_once_before(tmp_path: Path) -> None:
    port = ScriptedPort()
    measured(port, tmp_path, scenarios.first_tokens)
    prompts = [tuple(prompt) for prompt, _ in port.asked]
    assert [len(prompt) for prompt in prompts] == [16] * 4 + [200] * 3, "one more of each, which is not counted"
    assert len(set(prompts)) == len(prompts)
    port = ScriptedPort()
    measured(port, tmp_path, scenarios.saturated)
    before, after = port.asked[:6], port.asked[6:]
    assert [tokens for _, tokens in port.asked] == [1] * 6 + [LOAD.window] * 6
    assert [prompt for prompt, _ in before] == [prompt for prompt, _ in after]


def test_what_fails_is_a_broken_check_and_the_rest_is_still_measured(tmp_path: Path) -> None:
    found = measured(ScriptedPort(lost=0), tmp_path, scenarios.one_stream, scenarios.saturated)
    assert [(check["name"], check["ok"], check["detail"]) for check in found.checks] == [
        ("in process: one stream", False, "the engine has gone"),
        ("in process: saturated", True, ""),
    ]
    found = measured(ScriptedPort(cached=16), tmp_path, scenarios.first_tokens)
    assert "16 of them cached" in found.checks[0]["detail"]
    found = measured(ScriptedPort(), tmp_path, scenarios.one_stream, seconds=0.2)
    assert found.checks[0]["detail"] == "no time was left for it" and not found.figures


def test_a_scenario_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(ScriptedPort):
        def start(self, prompt: Sequence[int], tokens: int) -> Stream:
            return Stream()

    monkeypatch.setattr(scenarios, "LEAST_S", 0.01)
    port = Silent()
    found = measured(port, tmp_path, scenarios.one_stream, seconds=0.1)
    assert found.checks[0]["detail"] == "did not end in time" and port.stopped == 1


def test_a_stream_knows_its_gaps_and_its_end() -> None:
    stream = Stream(sent=1.0)
    with pytest.raises(StreamError, match="no token was seen"):
        _ = stream.first
    for when, count in ((1.5, 1), (1.6, 2), (1.9, 1)):
        stream.arrived(when, count)
    assert (stream.ttft, stream.tokens) == (0.5, 4) and stream.tpot == pytest.approx(0.4 / 3)
    assert stream.gaps(1.55, 1.7) == pytest.approx([0.1]) and stream.tokens_in(1.5, 1.9) == 3
    stream.ended(7, 0)
    stream.failed("too late to fail")
    assert asyncio.run(stream.done()) is stream
    alone = Stream(sent=0.0)
    alone.arrived(1.0, 3)
    assert math.isnan(alone.tpot)


def test_the_full_workload_fits_its_cache_and_its_model() -> None:
    tokens = max(FULL.batches.values()) * (FULL.context + FULL.window)
    assert tokens * FULL.shape.kv_token_bytes < FULL.settings["kv_memory_mib"] << 20
    longest = max(FULL.long_prompt, *(length for length, _ in FULL.prompts.values()))
    assert longest + 1 < FULL.shape.max_position
    assert FULL.chat_prompt + 10 * FULL.answer < FULL.shape.max_position
    assert FULL.settings["max_running"] >= max(FULL.batches.values())
    assert FULL.prompts.keys() == TINY_LOAD.prompts.keys() and FULL.batches.keys() == TINY_LOAD.batches.keys()


def test_settings_that_the_engine_does_not_know_are_left_out() -> None:
    assert known_settings(("a", "b"), {"a": 1, "c": 2}, {"a": 3}) == {"a": 3}


def test_settings_become_the_options_of_serve() -> None:
    given = {"model": "m", "prefix_cache": False, "fused_steps": True, "kv_memory_mib": 32, "threads": 1}
    settings = read_settings(make_parser().parse_args(["serve", *serve_options(given)]))
    assert settings.engine == EngineConfig(**given)  # type: ignore[arg-type]


def test_rates_count_the_time_that_all_run() -> None:
    assert overlap_rate([[0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]]) == (pytest.approx(2.0), False)
    rate, whole = overlap_rate([[0.0, 1.0], [5.0, 6.0]])
    assert whole and rate == pytest.approx(3 / 6)


def answer(*tokens: int, gap: float = 1.0) -> Answer:
    return Answer(list(tokens), [TokenLogprobs(-0.1, [(token, -0.1), (99, -0.1 - gap)]) for token in tokens])


def test_only_near_ties_excuse_another_token() -> None:
    import torch

    logprobs = torch.full((3, 100), -0.1)
    logprobs[:, 99] = -1.1
    assert compare(answer(1, 2, 3), [1, 2, 3], [1.0] * 3, logprobs) == ("", pytest.approx(0, abs=1e-6))
    wrong, _ = compare(answer(1, 5, 3), [1, 2, 3], [1.0] * 3, logprobs)
    assert wrong == "token 1 is 5, should be 2 by 1"
    assert compare(answer(1, 5, 3), [1, 2, 3], [1.0, 1e-4, 1.0], logprobs)[0] == ""
    logprobs[2, 3] = -0.3
    assert compare(answer(1, 2, 3), [1, 2, 3], [1.0] * 3, logprobs)[1] == pytest.approx(0.2)
    assert compare(answer(1, 2), [1, 2, 3], [1.0] * 3, logprobs)[0] == "2 tokens and 2 log-probabilities"
    assert differences([answer(1)], [answer(1, 2)]) == "prompt 0: 1 tokens and 1 log-probabilities"
    assert differences([answer(1, 2)], [answer(1, 2)]) == ""
    assert differences([answer(1, 7)], [answer(1, 2)]) == "prompt 0: token 1 is 7, was 2"
    assert differences([answer(1, 7)], [answer(1, 2, gap=1e-5)]) == ""


def test_every_switch_of_the_engine_is_compared() -> None:
    found = variants(2, tiny=False)
    names = [variant.name for variant in found]
    assert names[0] == "as it is" and {"fused_steps off", "prefix_cache off", "chunks of 2048"} <= set(names)
    switches = {field for field in EngineConfig.__struct_fields__ if isinstance(getattr(EngineConfig(), field), bool)}
    assert switches <= {name.rpartition(" ")[0] for name in names if name.endswith((" on", " off"))}
    known = set(EngineConfig.__struct_fields__)
    assert len(set(names)) == len(names)
    if "graphs" in known:
        assert {"graphs on", "graphs off"} <= set(names)
    assert [variant.name for variant in found if variant.preempts] == ["too little memory"]
    assert prompts_of(510, (3, 5)) == prompts_of(510, (3, 5))
