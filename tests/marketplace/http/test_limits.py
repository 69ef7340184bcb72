"""Rate limits against a plain model of a token bucket."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from marketplace.http import limits
from marketplace.http.limits import RATES, SECOND, Buckets, Rate

if TYPE_CHECKING:
    import pytest

    from tests.marketplace.conftest import Office

RATE = Rate(3, 10)


@given(st.lists(st.integers(0, 40), max_size=60))
def test_it_is_a_token_bucket(pauses: list[int]) -> None:
    buckets, now, tokens = Buckets(), 0, Fraction(RATE.burst)
    for pause in pauses:
        now += pause
        tokens = min(Fraction(RATE.burst), tokens + Fraction(pause, RATE.interval_us))
        verdict = buckets.take("x", RATE, now)
        assert verdict.admitted == (tokens >= 1)
        tokens -= verdict.admitted
        assert verdict.remaining == int(tokens)


def test_a_refusal_says_when_to_come_back() -> None:
    buckets, rate = Buckets(), Rate(2, 12 * SECOND)
    assert [buckets.take("x", rate, 0).admitted for _ in range(3)] == [True, True, False]
    wait = buckets.take("x", rate, 0).retry_after_s
    assert wait == 12
    assert not buckets.take("x", rate, wait * SECOND - 1).admitted
    assert buckets.take("x", rate, wait * SECOND).admitted
    assert buckets.take("y", rate, 0).admitted


def test_full_buckets_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BUCKETS", 10)
    buckets = Buckets()
    for number in range(25):
        buckets.take(f"{number}", RATE, number * 5)
    assert len(buckets._full_at) <= 10
    for number in range(25):
        buckets.take(f"flood {number}", RATE, 200)
    assert len(buckets._full_at) <= 10


def test_every_answer_tells_the_limit_and_429_when_to_retry(office: Office) -> None:
    ada, eve = office.person(), office.person()
    burst = RATES["write"].burst
    answers = [office.ask("keys.delete", {"id": "x"}, ada) for _ in range(burst + 1)]
    assert [answer.status for answer in answers] == [404] * burst + [429]
    assert [int(answer.headers["RateLimit-Remaining"]) for answer in answers[:2]] == [burst - 1, burst - 2]
    assert answers[-1].code == "RateLimited" and answers[-1].headers["Retry-After"] == "1"
    assert office.ask("keys.delete", {"id": "x"}, eve).status == 404  # each caller has its own bucket
    assert office.ask("keys.list", {}, ada).status == 200  # and reads are counted apart from writes
    office.wait(1)
    assert office.ask("keys.delete", {"id": "x"}, ada).status == 404


def test_credentials_that_fail_count_against_their_address(office: Office) -> None:
    burst = RATES["read"].burst
    tried = [office.ask("auth.me", {}, f"guess{number}").status for number in range(burst + 1)]
    assert tried == [401] * burst + [429]
    assert office.ask("auth.me", {}, office.person()).status == 200
    assert office.ask("auth.me", {}, "guess", address="203.0.113.1").status == 401
