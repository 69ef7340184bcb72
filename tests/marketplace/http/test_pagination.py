"""Cursors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.http.errors import Refusal
from marketplace.http.pagination import next_cursor, read_cursor, write_cursor

numbers = st.integers(-(2**63) + 1, 2**63 - 1)


@given(numbers, st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=40))
def test_a_cursor_is_read_back(at: int, tie: str) -> None:
    assert read_cursor(write_cursor((at, tie)), str) == (at, tie)
    assert read_cursor(None, str) is None


@given(st.text(max_size=60) | st.builds(write_cursor, st.tuples(st.integers(), st.integers())))
def test_anything_else_is_refused_and_nothing_else_is_raised(text: str) -> None:
    try:
        position = read_cursor(text, int)
    except Refusal as refusal:
        assert refusal.param == "cursor"
    else:
        assert position is not None and all(abs(part) < 2**63 for part in position if isinstance(part, int))


def test_the_last_page_has_no_next() -> None:
    rows = [(3, "c"), (2, "b"), (1, "a")]
    assert next_cursor(rows, 3) is None and next_cursor(rows, 4) is None
    assert read_cursor(next_cursor(rows, 2), str) == (2, "b")
    with pytest.raises(Refusal):
        read_cursor(next_cursor(rows, 2), int)
