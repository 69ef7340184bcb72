"""Figures of a load case: computed from replies with known times, and the ratios to a peer."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.rig.cases import CASES, Case, prompts, sweep_case
from benchmarks.rig.closed_loop import CaseResult, figures, ratios
from benchmarks.rig.http import Details, Reply, Usage
from benchmarks.rig.machine import Load

IDLE = Load(seconds=2.0, server_cpu_s=1.0, client_cpu_s=0.1, others_share=0.0, stolen_share=0.0, server_rss_mib=100.0)
CASE = Case("c2", 2, 2, 8, 3)


def reply(sent: float, contents: list[float], tokens: int, cached: int = 0) -> Reply:
    answer = Reply(sent=sent, status=200, done=True, contents=contents, ended=contents[-1] + 0.5 if contents else 0.0)
    answer.usage = Usage(
        prompt_tokens=10, completion_tokens=tokens, prompt_tokens_details=Details(cached_tokens=cached)
    )
    return answer


def measured(label: str, replies: list[Reply], duration: float = 2.0) -> CaseResult:
    return figures(label, CASE, 1, replies, duration, IDLE, 0.0)


def test_figures_of_two_streams() -> None:
    result = measured("ours", [reply(0.0, [0.1, 0.2, 0.3], 3, cached=4), reply(1.0, [1.3, 1.4, 1.7], 5)])
    assert result.completed == result.requests == 2 and result.failures == []
    assert result.output_tok_s == pytest.approx((3 + 5) / 2.0)
    assert result.ttft_p50_ms == pytest.approx((100 + 300) / 2)
    assert result.tpot_p50_ms == pytest.approx((200 / 2 + 400 / 4) / 2)
    assert result.itl_p50_ms == pytest.approx(100)
    assert result.tokens_per_event == pytest.approx(8 / 6)
    assert (result.prompt_tokens, result.cached_tokens) == (20, 4)


def test_a_failed_request_is_listed_and_counts_for_nothing() -> None:
    broken = reply(0.0, [0.5], 100)
    broken.done = False
    broken.failure = "connection lost: closed by the server"
    result = measured("ours", [reply(0.0, [0.1, 0.2], 2), broken])
    assert (result.completed, result.requests, result.output_tokens) == (1, 2, 2)
    assert result.failures == ["connection lost: closed by the server"]


def test_ratios_compare_medians_over_repetitions() -> None:
    def with_rate(label: str, rate: float) -> CaseResult:
        return dataclasses.replace(measured(label, [reply(0.0, [0.1, 0.2], 2)]), output_tok_s=rate)

    rows = ratios([*(with_rate("ours", x) for x in (30.0, 10.0, 20.0)), with_rate("peer", 10.0)], "ours")
    assert [(row["case"], row["ratio"], row["output_tok_s"]) for row in rows] == [("c2", "ours / peer", 2.0)]


def test_a_case_and_a_seed_give_the_same_prompts_everywhere() -> None:
    case = CASES["prefix4"]
    texts = prompts(case, seed=3)
    assert texts == prompts(case, seed=3)
    assert len(texts) == case.requests + 1
    assert not set(texts) & set(prompts(case, seed=4))


def test_prompts_of_a_group_share_exactly_their_prefix() -> None:
    case = CASES["prefix4"]
    texts = [text.split() for text in prompts(case, seed=1)[:-1]]
    assert all(len(text) == case.shared_words + case.own_words for text in texts)
    first, fellow, stranger = texts[0], texts[case.groups], texts[1]
    assert first[: case.shared_words] == fellow[: case.shared_words]
    assert first[case.shared_words :] != fellow[case.shared_words :]
    assert first[: case.shared_words] != stranger[: case.shared_words]


def test_the_sweep_repeats_the_cases_of_the_same_concurrency() -> None:
    assert sweep_case(16) == CASES["c16"]
    assert sweep_case(1) == CASES["c1"]
