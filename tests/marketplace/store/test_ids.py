"""UUIDv7: its fields, and that ids sort by time."""

from __future__ import annotations

import os
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.store.ids import new_id

LAST = (1 << 48) * 1000 - 1


@given(st.integers(0, LAST), st.binary(min_size=8, max_size=8))
def test_fields_of_version_7(now: int, random: bytes) -> None:
    made = uuid.UUID(new_id(now, lambda size: random[:size]))
    assert made.version == 7
    assert made.variant == uuid.RFC_4122
    assert made.int >> 80 == now // 1000


@given(st.integers(0, LAST - 1), st.integers(1, 10**9))
def test_later_ids_sort_later(now: int, later: int) -> None:
    assert new_id(now, lambda size: b"\xff" * size) < new_id(min(now + later, LAST), lambda size: b"\0" * size)


def test_ids_of_one_moment_differ() -> None:
    assert len({new_id(1_700_000_000_000_000, os.urandom) for _ in range(1000)}) == 1000


@pytest.mark.parametrize("now", [-1, LAST + 1])
def test_times_that_do_not_fit(now: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        new_id(now, os.urandom)
