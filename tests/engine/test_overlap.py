"""The host a step ahead of a device that is as late as it may be: the same tokens, and nothing late does harm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import ForwardBatch
from engine.device import CpuDevice, DeviceLostError, ScriptedDevice
from engine.wire import Counters

Alone = Callable[[Sequence[int], int], list[int]]
Make = Callable[..., Any]


def prompt(n: int, start: int = 0) -> list[int]:
    return [(start + 7 * i) % 50 for i in range(n)]


def test_the_next_step_is_launched_before_the_last_one_has_run(make_bench: Make, alone: Alone) -> None:
    device = ScriptedDevice()
    bench = make_bench(device=device)
    bench.submit("a", prompt(5), max_tokens=3)
    assert bench.step() == [] and device.queued == 1
    first = bench.step()
    assert [p.counters for p in first] == [Counters(5, 0, 1, True)] and device.queued == 1
    assert bench.core.usage(["a"])["a"].counters.completion == 1
    assert bench.drain()["a"].tokens == alone(prompt(5), 3)
    # the last token is known to be the last: nothing is computed after it
    assert bench.model.sizes == [5, 1, 1]


def test_without_overlap_or_on_a_cpu_each_step_is_collected_at_once(make_bench: Make) -> None:
    for bench in (make_bench(device=ScriptedDevice(), overlap=False), make_bench(device=CpuDevice())):
        bench.submit("a", prompt(5), max_tokens=2)
        assert [p.counters.completion for p in bench.step()] == [1]
        assert [p.finish_reason for p in bench.step()] == ["length"]


def test_a_stop_token_makes_the_step_behind_it_void(make_bench: Make, alone: Alone) -> None:
    bench = make_bench(device=ScriptedDevice(), max_running=1, pages=4)
    expected = alone(prompt(20), 10)
    stop = expected[4]
    wanted = expected[: expected.index(stop) + 1]
    bench.submit("a", prompt(20), max_tokens=30, stop_token_ids=(stop,))
    bench.submit("b", prompt(40, 1), max_tokens=20)
    said = bench.drain()
    assert (said["a"].tokens, said["a"].ends) == (wanted, ["stop"])
    # b takes over row and pages while a's void step is still on its way
    assert said["b"].tokens == alone(prompt(40, 1), 20)
    assert sum(bench.model.sizes) == 20 + len(wanted) + 40 + 19


@pytest.mark.parametrize("when", ["launched", "behind"])
def test_an_abort_while_steps_are_on_their_way_drops_their_results(make_bench: Make, alone: Alone, when: str) -> None:
    bench = make_bench(device=ScriptedDevice())
    bench.submit("a", prompt(20), max_tokens=9)
    bench.submit("b", prompt(20, 1), max_tokens=9)
    for _ in range(1 if when == "launched" else 3):
        bench.step()
    known = len(bench.said["a"].tokens) if "a" in bench.said else 0
    bench.core.abort("a")
    bench.core.check()
    said = bench.drain()
    assert (said["a"].ends, said["a"].counters.completion) == (["abort"], known)
    assert said["b"].tokens == alone(prompt(20, 1), 9)


def test_a_step_that_fails_late_ends_its_requests_and_no_others(make_bench: Make, alone: Alone) -> None:
    bench = make_bench(device=ScriptedDevice(), max_running=2)
    for i in range(3):
        bench.submit(str(i), prompt(20, i), max_tokens=9)
    for _ in range(3):
        bench.step()

    def fail(batch: ForwardBatch) -> None:
        bench.model.before = lambda batch: None
        raise RuntimeError("out of memory")

    bench.model.before = fail
    said = bench.drain()
    assert [said[str(i)].ends for i in range(3)] == [["error"], ["error"], ["length"]]
    assert said["2"].tokens == alone(prompt(20, 2), 9)


def test_a_lost_device_ends_its_requests_and_then_the_engine(make_bench: Make) -> None:
    bench = make_bench(device=ScriptedDevice(), max_running=2)
    for i in range(3):
        bench.submit(str(i), prompt(20, i), max_tokens=9)

    def fault(batch: ForwardBatch) -> None:
        raise DeviceLostError("an illegal memory access was encountered")

    bench.model.before = fault
    while "0" not in bench.said:
        bench.step()
    assert [bench.said[str(i)].ends for i in range(2)] == [["error"], ["error"]]
    assert "illegal memory access" in (bench.said["0"].error or "")
    assert bench.core.has_work()
    for _ in range(2):
        with pytest.raises(DeviceLostError, match="the device is lost"):
            bench.step()


PENALTIES = {"presence_penalty": 1.0, "repetition_penalty": 1.3}

lives = st.fixed_dictionaries(
    {
        "pages": st.sampled_from([12, 20, 64]),
        "max_running": st.integers(1, 5),
        "step_tokens": st.sampled_from([8, 16, 64]),
        "prefix_cache": st.booleans(),
        "requests": st.lists(
            st.tuples(
                st.integers(0, 8), st.integers(1, 60), st.integers(0, 2), st.integers(1, 30),
                st.one_of(st.none(), st.integers(0, 12)), st.sampled_from([0.0, 1.0]),
                st.sampled_from([{}, PENALTIES, {"stop_token_ids": (7, 11)}]),
            ),
            min_size=1,
            max_size=7,
        ),
    }
)  # fmt: skip


@settings(max_examples=40)
@given(lives)
def test_any_life_is_the_same_with_overlap_and_without(make_bench: Make, life: dict[str, Any]) -> None:
    requests = life.pop("requests")
    said = []
    for device in (ScriptedDevice(), CpuDevice()):
        bench = make_bench(device=device, **life)
        step = 0
        while step < 12 or bench.core.has_work():
            for i, (at, length, family, output, _, temperature, params) in enumerate(requests):
                if at == step:
                    bench.submit(
                        str(i), prompt(length, family), max_tokens=output, seed=i, temperature=temperature, **params
                    )
            for i, request in enumerate(requests):
                if request[4] is not None and request[0] + request[4] == step and str(i) in bench.core._live:
                    bench.core.abort(str(i))
            bench.step()
            bench.core.check()
            step += 1
            assert step < 2000, "starved"
        assert bench.core.snapshot().kv_pages_used == 0
        said.append(bench.said)
    late, now = said
    for name in late.keys() | now.keys():
        assert len(late[name].ends) == len(now[name].ends) == 1
        if late[name].ends == now[name].ends != ["abort"]:
            assert late[name].tokens == now[name].tokens
        else:  # an abort met it at another token
            common = min(len(late[name].tokens), len(now[name].tokens))
            assert late[name].tokens[:common] == now[name].tokens[:common]
