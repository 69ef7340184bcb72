"""The request record: its chain of lengths, its states."""

from __future__ import annotations

from array import array

import pytest

from engine.request import Request, RequestError, RequestState
from engine.sampling_params import SamplingParams
from engine.wire import Counters


def request(prompt: int = 5, **settings: object) -> Request:
    params = SamplingParams(max_tokens=4, **settings)  # type: ignore[arg-type]
    return Request("r", array("i", range(prompt)), params, limit=prompt + 4, arrival=3, priority=1, eos_ids=(9,))


def test_a_new_request_waits_with_nothing_computed() -> None:
    r = request()
    assert (r.state, r.rank, r.computed, r.generated) == (RequestState.WAITING, (1, 3), 0, 0)
    assert r.counters == Counters(prompt=5, cached=0, completion=0, started=False)


def test_stop_ids_are_the_models_and_the_requests() -> None:
    assert request(stop_token_ids=(4,)).stops == {4, 9}
    assert request(stop_token_ids=(4,), ignore_eos=True).stops == {4}


def test_admission_starts_from_the_cached_tokens_and_bills_only_the_first_ones() -> None:
    r = request(prompt=40)
    r.admit(2, [7, 8, 9], 1, 16, 5)
    assert (r.cached, r.computed, r.scheduled, r.prompt_cached, r.published) == (16, 16, 16, 16, 1)
    r.schedule(24)
    r.computed = r.scheduled
    r.tokens.append(1)
    epoch = r.epoch
    assert r.preempt() == [7, 8, 9]
    assert (r.state, r.row, r.pages, r.computed, r.epoch) == (RequestState.PREEMPTED, -1, [], 0, epoch + 1)
    r.admit(0, [1, 2, 3], 2, 32, 6)
    assert (r.computed, r.prompt_cached, r.generated) == (32, 16, 1)
    r.verify()


def test_more_than_is_known_cannot_be_scheduled() -> None:
    r = request()
    r.admit(0, [1], 0, 0, 0)
    with pytest.raises(RequestError, match="6 tokens scheduled of 5"):
        r.schedule(6)


def test_a_request_ends_once() -> None:
    r = request()
    r.finish("abort")
    assert (r.state, r.finish_reason) == (RequestState.FINISHED, "abort")
    with pytest.raises(RequestError, match="finished twice"):
        r.finish("stop")


def test_states_allow_only_their_own_moves() -> None:
    r = request()
    with pytest.raises(RequestError, match="preempted while waiting"):
        r.preempt()
    r.admit(0, [1], 0, 0, 0)
    with pytest.raises(RequestError, match="admitted while running"):
        r.admit(1, [2], 0, 0, 0)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("computed", 3, "broken"),
        ("cached", 1, "broken"),
        ("limit", 4, "broken"),
        ("row", 0, "row 0"),
        ("pages", [1], "1 pages"),
        ("prompt_cached", 5, "5 of 5 prompt tokens cached"),
        ("finish_reason", "stop", "finish reason"),
        ("prompt_len", 0, "prompt of 0"),
    ],
)
def test_verify_names_a_broken_invariant(field: str, value: object, message: str) -> None:
    r = request()
    setattr(r, field, value)
    with pytest.raises(RequestError, match=message):
        r.verify()
