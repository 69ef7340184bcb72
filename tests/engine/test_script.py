"""A scripted core follows its script to the token and the millisecond, on a clock that the test turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import wire
from engine.sampling_params import SamplingParams
from engine.script import Script, ScriptedCore


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def submit(request_id: str = "r", prompt: int = 3, **params: object) -> wire.Submit:
    ids = wire.pack_tokens(range(prompt))
    asked = SamplingParams(**{"max_tokens": 1000, **params})  # type: ignore[arg-type]
    return wire.Submit(request_id=request_id, prompt=ids, params=asked)


def run(core: ScriptedCore) -> list[wire.Progress]:
    said = []
    while core.has_work():
        said += core.step()
        core.check()
    return said


def ids(said: list[wire.Progress]) -> list[int]:
    return [token for p in said for token in wire.unpack_tokens(p.tokens)]


def test_an_answer_has_the_scripted_length_and_ends_with_stop_or_length() -> None:
    core = ScriptedCore(Script(tokens=5, eos=2, vocab_size=50), Clock())
    assert core.submit(submit("long")) is None
    assert core.submit(submit("cut", max_tokens=3)) is None
    assert core.submit(submit("exact", max_tokens=5)) is None
    assert core.submit(submit("on", max_tokens=7, ignore_eos=True)) is None
    said = run(core)
    by_id = {r: [p for p in said if p.request_id == r] for r in ("long", "cut", "exact", "on")}
    assert {r: (len(ids(p)), p[-1].finish_reason, p[-1].stop_token) for r, p in by_id.items()} == {
        "long": (5, "stop", 2),
        "cut": (3, "length", None),
        "exact": (5, "length", None),
        "on": (7, "length", None),
    }
    assert [p.counters.completion for p in by_id["long"]] == [1, 2, 3, 4, 5]
    assert core.usage(["long", "x"]) == {"long": wire.Usage(wire.Counters(3, 0, 5, True), "stop")}


def test_the_same_request_gets_the_same_tokens_and_another_one_others() -> None:
    answers = []
    for request_id in ("a", "a", "b"):
        core = ScriptedCore(Script(tokens=20, vocab_size=1000), Clock())
        core.submit(submit(request_id))
        answers.append(ids(run(core)))
    assert answers[0] == answers[1] != answers[2]
    assert all(0 <= token < 1000 for token in answers[0])


def test_a_reply_is_said_over_and_over_and_stop_token_ids_end_it() -> None:
    core = ScriptedCore(Script(tokens=5, reply=(7, 8)), Clock())
    core.submit(submit("plain"))
    core.submit(submit("stops", stop_token_ids=(8,), min_tokens=2))
    said = run(core)
    assert ids([p for p in said if p.request_id == "plain"]) == [7, 8, 7, 8, 7]
    stops = [p for p in said if p.request_id == "stops"]
    assert ids(stops) == [7, 8, 7, 8]
    assert (stops[-1].finish_reason, stops[-1].stop_token) == ("stop", 8)


def test_tokens_come_when_they_are_due_and_streams_share_a_step() -> None:
    clock = Clock()
    core = ScriptedCore(Script(tokens=3, first_token_ms=50, interval_ms=20, tick_ms=10), clock)
    core.submit(submit("a"))
    clock.now += 0.004
    core.submit(submit("b"))
    moments = []
    while (due := core.due_in()) is not None:
        assert due > 0
        assert not core.has_work()
        clock.now += due
        moments.append((round(clock.now, 3), [p.request_id for p in core.step()]))
    assert moments == [
        (100.05, ["a"]),
        (100.06, ["b"]),
        (100.07, ["a"]),
        (100.08, ["b"]),
        (100.09, ["a"]),
        (100.1, ["b"]),
    ]


def test_a_late_step_delays_one_token_and_not_those_after_it() -> None:
    clock = Clock()
    core = ScriptedCore(Script(tokens=4, first_token_ms=10, interval_ms=10), clock)
    core.submit(submit())
    clock.now += 0.035
    assert len(run(core)) == 3
    assert core.due_in() == pytest.approx(0.005)


def test_log_probabilities_are_made_up_when_asked_for() -> None:
    core = ScriptedCore(Script(tokens=2, vocab_size=10, reply=(9, 4)), Clock())
    core.submit(submit(logprobs=2))
    said = run(core)
    assert [p.logprobs for p in said] == [
        [wire.TokenLogprobs(-0.5, [(9, -0.5), (0, -1.5)])],
        [wire.TokenLogprobs(-0.5, [(4, -0.5), (5, -1.5)])],
    ]


@pytest.mark.parametrize(
    ("script", "prompt", "code", "message"),
    [
        (Script(refuse="draining"), 3, "draining", "script"),
        (Script(), 0, "invalid", "at least one"),
        (Script(max_context=8), 8, "too_long", "8 tokens are over the context of 8"),
        (Script(max_running=1, max_queued=0), 3, "queue_full", "wait"),
    ],
)
def test_refusals(script: Script, prompt: int, code: str, message: str) -> None:
    core = ScriptedCore(script, Clock())
    if code == "queue_full":
        core.submit(submit("first"))
    refused = core.submit(submit(prompt=prompt))
    assert refused is not None
    assert refused.code == code
    assert message in refused.message


def test_an_answer_never_leaves_the_context() -> None:
    core = ScriptedCore(Script(tokens=64, max_context=10), Clock())
    core.submit(submit(prompt=7))
    said = run(core)
    assert (len(ids(said)), said[-1].finish_reason) == (3, "length")


def test_streams_wait_their_turn_and_cost_nothing_when_aborted_in_the_queue() -> None:
    core = ScriptedCore(Script(tokens=2, max_running=1, cached=2), Clock())
    for request_id in ("a", "b", "c"):
        core.submit(submit(request_id))
    before = core.snapshot(1)
    assert (before.running, before.waiting, before.queued_tokens) == (1, 2, 6)
    core.abort("b")
    core.abort("never heard of")
    said = run(core)
    ends = {p.request_id: (p.finish_reason, p.counters) for p in said if p.finish_reason}
    assert ends == {
        "a": ("stop", wire.Counters(3, 2, 2, True)),
        "b": ("abort", wire.Counters(3)),
        "c": ("stop", wire.Counters(3, 2, 2, True)),
    }
    after = core.snapshot(2)
    assert (after.running, after.waiting, after.kv_pages_used, after.completion_tokens) == (0, 0, 0, 4)


def test_faults_strike_when_scripted() -> None:
    failing = ScriptedCore(Script(tokens=9, fail_token=2), Clock())
    failing.submit(submit())
    said = run(failing)
    assert (len(ids(said)), said[-1].finish_reason, said[-1].error) == (2, "error", "the script says so")

    dying = ScriptedCore(Script(tokens=9, die_after_tokens=3), Clock())
    dying.submit(submit())
    for _ in range(2):
        dying.step()
    early = dying.must_die
    dying.step()
    assert (early, dying.must_die) == (False, True)

    stalling = ScriptedCore(Script(tokens=9, stall_after_tokens=4), Clock())
    stalling.submit(submit())
    assert len(ids(run(stalling))) == 4
    assert not stalling.has_work()
    stalling.resume()
    assert len(ids(run(stalling))) == 5


@given(
    st.lists(
        st.tuples(st.sampled_from(["submit", "abort", "step"]), st.integers(0, 9), st.integers(0, 30)), max_size=60
    ),
    st.integers(1, 4),
)
def test_every_accepted_stream_ends_once_and_is_counted_once(events: list[tuple[str, int, int]], running: int) -> None:
    clock = Clock()
    core = ScriptedCore(Script(tokens=4, first_token_ms=5, interval_ms=3, max_running=running, max_queued=3), clock)
    accepted: set[str] = set()
    said: list[wire.Progress] = []
    for kind, which, wait in events:
        request_id = f"{which}"
        if kind == "submit" and request_id not in accepted:
            if core.submit(submit(request_id, max_tokens=2 + which)) is None:
                accepted.add(request_id)
        elif kind == "abort":
            core.abort(request_id)
        clock.now += wait / 1000
        said += core.step()
        core.check()
    while (due := core.due_in()) is not None:
        clock.now += due
        said += core.step()
    ends = [p.request_id for p in said if p.finish_reason]
    assert sorted(ends) == sorted(accepted)
    for request_id in accepted:
        mine = [p for p in said if p.request_id == request_id]
        assert len(ids(mine)) == mine[-1].counters.completion
    assert core.snapshot(0).completion_tokens == len(ids(said))
