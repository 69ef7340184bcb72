"""Lives of requests, with guesses and without: played in the same way, and compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from tests.engine.conftest import Bench

Job = tuple[int, int, int, str]
"""Tokens of the prompt, most tokens of the answer, steps until the next comes, and how it ends."""

jobs = st.lists(
    st.tuples(
        st.integers(1, 40), st.integers(1, 24), st.integers(0, 5), st.sampled_from(["", "", "abort", "stop", "min"])
    ),
    min_size=1,
    max_size=6,
)


def prompt(n: int, start: int = 0) -> list[int]:
    """One of so many tokens; those that start alike begin alike."""
    return [(start + 7 * i) % 50 for i in range(n)]


def play(bench: Bench, wanted: list[Job]) -> Any:
    """Have them arrive, some drawn and some stopped, and return what became of each by name."""
    for i, (length, most, steps, how) in enumerate(wanted):
        params: dict[str, Any] = {"max_tokens": most}
        if how == "stop":
            params["stop_token_ids"] = tuple(range(0, 60, 9))
        if how == "min":
            params |= {"stop_token_ids": tuple(range(0, 60, 4)), "min_tokens": most, "logprobs": 1}
        if i % 3 == 2:
            params |= {"temperature": 0.5, "seed": i}
        bench.submit(str(i), prompt(length, i % 2), **params)
        for _ in range(steps):
            bench.step()
            bench.core.check()
        if how == "abort":
            bench.core.abort(str(i))
            bench.core.check()
    return bench.drain()


def assert_the_same(plain: Mapping[str, Any], said: Mapping[str, Any]) -> None:
    """Every answer is as it is without guesses, as far as an abort let both come."""
    for name, one in plain.items():
        other = said[name]
        shorter = min(len(one.tokens), len(other.tokens))
        assert other.tokens[:shorter] == one.tokens[:shorter]
        assert other.logprobs[:shorter] == one.logprobs[:shorter]
        assert other.ends == one.ends or "abort" in (*other.ends, *one.ends)
        if other.ends == one.ends != ["abort"]:
            assert other.tokens == one.tokens
