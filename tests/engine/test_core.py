"""EngineCore over the deterministic fake model: the life of requests, refusals, ends, counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import ForwardBatch
from engine.kv_cache import KVCacheError
from engine.request import RequestError
from engine.sampling_params import SamplingParams
from engine.wire import Counters, Submit, Usage

if TYPE_CHECKING:
    Alone = Callable[[Sequence[int], int], list[int]]
    Make = Callable[..., Any]

EOS = 60


def prompt(n: int, start: int = 0) -> list[int]:
    return [(start + 7 * i) % 50 for i in range(n)]


def test_one_request_from_submit_to_length(make_bench: Make, alone: Alone) -> None:
    bench = make_bench()
    assert not bench.core.has_work() and bench.core.step() == []
    assert bench.submit("a", prompt(20), max_tokens=30) is None
    assert bench.core.has_work()
    said = bench.drain()["a"]
    assert said.tokens == alone(prompt(20), 30)
    assert (said.ends, said.counters) == (["length"], Counters(20, 0, 30, True))
    assert bench.core.usage(["a", "b"]) == {"a": Usage(Counters(20, 0, 30, True), "length")}


def test_every_step_computes_at_most_its_budget(make_bench: Make, alone: Alone) -> None:
    bench = make_bench(step_tokens=16)
    for i in range(8):
        bench.submit(str(i), prompt(40, i), max_tokens=5)
    said = bench.drain()
    assert all(said[str(i)].tokens == alone(prompt(40, i), 5) for i in range(8))
    assert max(bench.model.sizes) == 16


@pytest.mark.parametrize(
    ("settings", "params"),
    [
        ({"prefix_cache": False}, {}),
        ({"step_tokens": 8}, {}),
        ({"step_tokens": 256}, {}),
        ({"pages": 9}, {}),
        ({"pages": 9, "prefix_cache": False}, {}),
        ({"page_size": 32}, {}),
        ({"max_running": 1}, {}),
    ],
)
def test_output_does_not_depend_on_how_it_was_scheduled(
    make_bench: Make, alone: Alone, settings: dict[str, Any], params: dict[str, Any]
) -> None:
    bench = make_bench(**settings)
    prompts = {str(i): prompt(20, i % 3) + prompt(i) for i in range(12)}
    for name, ids in prompts.items():
        assert bench.submit(name, ids, max_tokens=40, **params) is None
    said = bench.drain()
    for name, ids in prompts.items():
        assert said[name].tokens == alone(ids, 40), name
    assert (bench.core.snapshot().preemptions > 0) == (settings.get("pages") == 9)


def test_prefix_hits_are_counted_and_give_the_same_tokens(make_bench: Make, alone: Alone) -> None:
    bench = make_bench()
    bench.submit("cold", prompt(50), max_tokens=20)
    bench.drain()
    bench.submit("warm", prompt(50), max_tokens=20)
    bench.submit("longer", prompt(50) + alone(prompt(50), 20) + [1, 2], max_tokens=3)
    bench.submit("tenant", prompt(50), max_tokens=20, salt="other")
    said = bench.drain()
    assert said["warm"].tokens == said["cold"].tokens == said["tenant"].tokens
    assert [said[n].counters.cached for n in ("cold", "warm", "tenant", "longer")] == [0, 48, 0, 64]
    assert bench.core.metrics.cached_tokens == 48 + 64


def test_a_fully_cached_prompt_still_computes_its_last_token(make_bench: Make, alone: Alone) -> None:
    bench = make_bench()
    for name in ("cold", "warm"):
        bench.submit(name, prompt(32), max_tokens=1)
        bench.drain()
    assert bench.said["warm"].tokens == alone(prompt(32), 1)
    assert bench.said["warm"].counters.cached == 16


def test_a_repeated_submit_changes_nothing(make_bench: Make) -> None:
    bench = make_bench()
    bench.submit("a", prompt(5), max_tokens=3)
    assert bench.submit("a", prompt(9), max_tokens=9) is None
    bench.step()
    assert bench.submit("a", prompt(9), max_tokens=9) is None
    first = bench.drain()["a"].tokens
    assert len(first) == 3
    assert bench.submit("a", prompt(9), max_tokens=9) is None
    assert not bench.core.has_work()


def test_usage_is_forgotten_after_the_retention(make_bench: Make) -> None:
    now = 0.0
    bench = make_bench(clock=lambda: now, usage_retention_s=100)
    bench.submit("a", prompt(5), max_tokens=1)
    bench.drain()
    now = 99.0
    assert "a" in bench.core.usage(["a"])
    now = 100.0
    assert bench.core.usage(["a"]) == {}
    assert bench.submit("a", prompt(5), max_tokens=2) is None
    assert bench.core.has_work()


@pytest.mark.parametrize(
    ("ids", "params", "code", "message"),
    [
        ([], {}, "invalid", "prompt must be one or more"),
        ([61], {}, "invalid", "prompt token id 61 is outside the vocabulary of 61"),
        ([-1], {}, "invalid", "prompt token id -1"),
        ([1], {"temperature": 3.0}, "invalid", "temperature must be between 0 and 2"),
        ([1], {"temperature": float("nan")}, "invalid", "temperature must be"),
        ([1], {"logprobs": 21}, "invalid", "logprobs must be"),
        ([1], {"logit_bias": {99: 1.0}}, "invalid", "logit_bias token id 99"),
        ([1], {"stop_token_ids": (61,)}, "invalid", "stop_token_ids token id 61"),
        (
            prompt(64),
            {"max_tokens": 9},
            "too_long",
            "prompt of 64 tokens + max_tokens 9 is over the context of 64 tokens",
        ),
    ],
)
def test_refusals_name_what_is_wrong(
    make_bench: Make, ids: list[int], params: dict[str, Any], code: str, message: str
) -> None:
    bench = make_bench(pages=8, max_context=64)
    refused = bench.submit("a", ids, **params)
    assert refused.code == code
    assert message in refused.message
    assert not bench.core.has_work()
    assert bench.core.usage(["a"]) == {}
    assert bench.core.metrics.refused == {code: 1}


def test_a_prompt_of_odd_bytes_is_refused(make_bench: Make) -> None:
    bench = make_bench()
    refused = bench.core.submit(Submit(request_id="a", prompt=b"\0\0\0", params=SamplingParams()))
    assert refused is not None and refused.code == "invalid"


def test_the_longest_prompt_is_served_and_the_answer_cut_at_the_context(make_bench: Make, alone: Alone) -> None:
    bench = make_bench(pages=4, max_context=64)
    assert bench.submit("a", prompt(63), max_tokens=50) is None
    assert bench.submit("b", prompt(60), max_tokens=50) is None
    said = bench.drain()
    assert (said["a"].ends, said["a"].tokens) == (["length"], alone(prompt(63), 1))
    assert (said["b"].ends, said["b"].tokens) == (["length"], alone(prompt(60), 4))


def test_the_queue_is_bounded(make_bench: Make) -> None:
    bench = make_bench(max_running=2, max_queued=3)
    assert [bench.submit(str(i), prompt(4), max_tokens=4) for i in range(5)] == [None] * 5
    refused = bench.submit("x", prompt(4))
    assert (refused.code, "the queue holds 3" in refused.message) == ("queue_full", True)
    bench.core.abort("4")
    assert bench.submit("y", prompt(4), max_tokens=4) is None
    bench.drain()
    assert bench.submit("x", prompt(4), max_tokens=4) is None


def test_stop_tokens_end_a_sequence_and_are_reported(make_bench: Make, alone: Alone) -> None:
    bench = make_bench()
    expected = alone(prompt(5), 10)
    stop = expected[4]
    cut = expected[: expected.index(stop) + 1]
    bench.submit("a", prompt(5), max_tokens=10, stop_token_ids=(stop,))
    bench.submit("b", prompt(5), max_tokens=10, stop_token_ids=(stop,), ignore_eos=True)
    said = bench.drain()
    for name in "ab":
        assert (said[name].tokens, said[name].ends, said[name].stop_token) == (cut, ["stop"], stop)


def test_end_of_sequence_ends_unless_ignored_and_not_before_min_tokens(make_bench: Make) -> None:
    bench = make_bench()
    bias = {EOS: 100.0}
    bench.submit("eos", prompt(5), max_tokens=6, logit_bias=bias)
    bench.submit("ignore", prompt(5), max_tokens=6, logit_bias=bias, ignore_eos=True)
    bench.submit("min", prompt(5), max_tokens=6, logit_bias=bias, min_tokens=3)
    bench.submit("both", prompt(5), max_tokens=3, logit_bias=bias, min_tokens=2)
    said = bench.drain()
    assert (said["eos"].tokens, said["eos"].ends, said["eos"].stop_token) == ([EOS], ["stop"], EOS)
    assert (said["ignore"].tokens, said["ignore"].ends) == ([EOS] * 6, ["length"])
    assert said["min"].tokens[3:] == [EOS] and EOS not in said["min"].tokens[:3]
    # the last token that fits is a stop token: it stopped
    assert (len(said["both"].tokens), said["both"].ends) == (3, ["stop"])


def test_abort_in_every_state_frees_everything_and_answers_once(make_bench: Make) -> None:
    bench = make_bench(pages=9, max_running=4, step_tokens=16)
    for i in range(7):
        bench.submit(str(i), prompt(30, i), max_tokens=60)
    bench.core.abort("6")  # before any step
    assert bench.core.usage(["6"]) == {"6": Usage(Counters(30, 0, 0, False), "abort")}
    bench.step()
    bench.core.abort("0")  # in the middle of its prompt
    bench.core.check()
    bench.step()
    while bench.core.snapshot().preemptions == 0:
        bench.step()
    states = {r.request_id: r for r in bench.core._scheduler.waiting if r.state.value == "preempted"}
    assert states
    for name in states:
        generated = len(bench.said[name].tokens)
        bench.core.abort(name)
        bench.step()
        assert bench.said[name].ends == ["abort"]
        assert bench.said[name].counters == Counters(30, 0, generated, True)
    running = bench.core._scheduler.running[0].request_id
    bench.core.abort(running)
    bench.core.check()
    said = bench.drain()
    assert all(len(t.ends) == 1 for t in said.values()) and len(said) == 7
    assert said["6"].counters == Counters(30, 0, 0, False)


def test_abort_of_an_ended_or_unknown_request_is_answered_with_what_is_known(make_bench: Make) -> None:
    bench = make_bench()
    bench.submit("a", prompt(5), max_tokens=2)
    bench.drain()
    bench.core.abort("a")
    bench.core.abort("never seen")
    assert bench.core.has_work()
    answers = bench.core.step()
    assert [(p.request_id, p.finish_reason, p.counters) for p in answers] == [
        ("a", "abort", Counters(5, 0, 2, True)),
        ("never seen", "abort", Counters()),
    ]
    assert bench.core.usage(["a", "never seen"]) == {"a": Usage(Counters(5, 0, 2, True), "length")}


def test_an_abort_during_the_step_drops_its_result(make_bench: Make, alone: Alone) -> None:
    bench = make_bench()
    bench.submit("a", prompt(20), max_tokens=9)
    bench.submit("b", prompt(20, 1), max_tokens=9)
    bench.step()

    def abort(batch: ForwardBatch) -> None:
        bench.core.abort("a")
        bench.model.before = lambda batch: None

    bench.model.before = abort
    bench.step()
    bench.core.check()
    said = bench.drain()
    assert (said["a"].ends, said["a"].counters) == (["abort"], Counters(20, 0, 1, True))
    assert said["b"].tokens == alone(prompt(20, 1), 9)


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(
    make_bench: Make, alone: Alone, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make_bench(max_running=2)
    for i in range(3):
        bench.submit(str(i), prompt(20, i), max_tokens=9)
    bench.step()

    def fail(batch: ForwardBatch) -> None:
        bench.model.before = lambda batch: None
        raise RuntimeError("out of memory")

    bench.model.before = fail
    said = bench.drain()
    assert [said[str(i)].ends for i in range(3)] == [["error"], ["error"], ["length"]]
    assert said["0"].error == "the model failed: RuntimeError: out of memory"
    assert said["2"].tokens == alone(prompt(20, 2), 9)
    assert "a step of 2 requests failed" in caplog.text


def test_logits_that_are_not_finite_end_the_request_and_spoil_no_prefix(make_bench: Make, alone: Alone) -> None:
    bench = make_bench()
    forward = bench.model.forward
    bench.model.forward = lambda batch, kv: forward(batch, kv) * float("nan")
    bench.submit("a", prompt(40), max_tokens=9)
    bench.drain()
    bench.model.forward = forward
    bench.submit("b", prompt(40), max_tokens=9)
    said = bench.drain()
    assert (said["a"].ends, said["a"].error) == (["error"], "the model's logits are not finite")
    assert (said["b"].tokens, said["b"].counters.cached) == (alone(prompt(40), 9), 0)


def test_higher_priority_goes_first(make_bench: Make) -> None:
    bench = make_bench(max_running=1)
    order: list[str] = []
    for name, priority in (("low", 5), ("mid", 1), ("mid2", 1), ("high", -3)):
        bench.submit(name, prompt(5), max_tokens=2, priority=priority)
    while bench.core.has_work():
        order += [p.request_id for p in bench.step() if p.finish_reason]
    assert order == ["high", "mid", "mid2", "low"]


def test_snapshot_and_metrics_add_up(make_bench: Make) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.25
        return now

    bench = make_bench(max_running=2, step_tokens=16, clock=clock)
    for i in range(3):
        bench.submit(str(i), prompt(20, i), max_tokens=4)
    before = bench.core.snapshot(5)
    assert (before.query_id, before.running, before.waiting, before.queued_tokens) == (5, 0, 3, 60)
    bench.step()
    after = bench.core.snapshot()
    assert (after.running, after.waiting, after.queued_tokens, after.steps) == (1, 2, 44, 1)
    assert after.kv_pages_used == 2
    bench.drain()
    end = bench.core.snapshot()
    assert (end.prompt_tokens, end.cached_tokens, end.completion_tokens) == (60, 0, 12)
    assert (end.running, end.waiting, end.queued_tokens, end.kv_pages_used) == (0, 0, 0, 0)
    assert end.kv_pages_cached > 0 and end.last_step_ms == 250.0
    metrics = bench.core.metrics
    assert metrics.finished == {"length": 3}
    assert (metrics.first_token_seconds.count, metrics.queue_seconds.count) == (3, 3)
    assert metrics.computed_tokens == sum(bench.model.sizes) == 60 + 3 * 3


def test_check_sees_a_request_outside_its_queue(make_bench: Make) -> None:
    bench = make_bench()
    bench.submit("a", prompt(20), max_tokens=4)
    bench.core.check()
    bench.core._live["ghost"] = bench.core._live["a"]
    with pytest.raises(RequestError, match="ghost"):
        bench.core.check()
    del bench.core._live["ghost"]
    bench.step()
    bench.core._pool.allocate(1)
    with pytest.raises(KVCacheError):
        bench.core.check()


def test_epochs_differ_between_engines(make_bench: Make) -> None:
    assert make_bench().core.epoch != make_bench().core.epoch


scenarios = st.fixed_dictionaries(
    {
        "pages": st.integers(4, 20),
        "step_tokens": st.sampled_from([1, 7, 16, 64]),
        "max_running": st.integers(1, 6),
        "prefix_cache": st.booleans(),
        "requests": st.lists(
            st.tuples(
                st.integers(0, 12),  # step of arrival
                st.integers(1, 40),  # prompt tokens
                st.integers(0, 2),  # which prefix family
                st.integers(1, 20),  # max_tokens
                st.integers(0, 1),  # priority
                st.one_of(st.none(), st.integers(0, 25)),  # steps until an abort
                st.sampled_from([0.0, 0.0, 0.8]),  # temperature
            ),
            min_size=1,
            max_size=14,
        ),
    }
)


@settings(max_examples=100)
@given(scenario=scenarios)
def test_any_life_ends_once_with_the_tokens_of_a_run_alone(make_bench: Make, scenario: dict[str, Any]) -> None:
    requests = scenario.pop("requests")
    bench = make_bench(**scenario)
    solo = make_bench()
    aborts: dict[int, list[str]] = {}
    step = 0
    while step < 40 or bench.core.has_work():
        for i, (at, length, family, output, priority, abort, temperature) in enumerate(requests):
            if at == step:
                refused = bench.submit(
                    str(i),
                    prompt(length, family),
                    max_tokens=output,
                    priority=priority,
                    temperature=temperature,
                    seed=i,
                )
                assert refused is None or refused.code == "too_long"
                if refused is None and abort is not None:
                    aborts.setdefault(step + abort, []).append(str(i))
        for name in aborts.pop(step, []):
            if name in bench.core._live:
                bench.core.abort(name)
        bench.step()
        bench.core.check()
        step += 1
        assert step < 3000, "starved"
    for i, (_, length, family, output, _, _, temperature) in enumerate(requests):
        if str(i) not in bench.said:
            continue
        said = bench.said[str(i)]
        assert len(said.ends) == 1
        solo.submit(str(i), prompt(length, family), max_tokens=output, temperature=temperature, seed=i)
        alone = solo.drain()[str(i)].tokens
        if said.ends == ["abort"]:
            assert said.tokens == alone[: len(said.tokens)]
        else:
            limit = bench.core.max_context - length
            assert said.tokens == alone[:limit]
    assert bench.core.snapshot().kv_pages_used == 0
