"""Which version serves a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.http.errors import Refusal
from marketplace.http.versions import ALL, NEWEST, canonical, resolve, since


def test_the_versions_in_force() -> None:
    assert ALL[0] == "v045" and ALL[-1] == NEWEST == "v062"
    assert since("v061") == ("v061", "v062")


@pytest.mark.parametrize(
    ("requested", "meant"),
    [
        ("~upcoming", "v062"),
        ("v045", "v045"),
        ("v070", "v070"),
        ("2026-09-08", "v062"),
        ("2026-09-07", "v061"),
        ("2026-08-04", "v060"),
        ("2026-06-24", "v059"),
        ("2026-05-26", "v058"),
        ("2026-05-14", "v057"),
        ("2026-03-31", "v056"),
        ("2026-03-06", "v055"),
        ("2026-03-05", "v045"),
        ("2031-01-01", "v062"),
        ("62", None),
        ("V062", None),
        ("v62", None),
        ("v٠٦٢", None),
        ("latest", None),
    ],
)
def test_names_aliases_and_dates(requested: str, meant: str | None) -> None:
    assert canonical(requested) == meant


@given(st.sets(st.sampled_from(ALL), min_size=1), st.integers(0, 999))
def test_the_newest_that_is_not_newer_than_the_pin(served: set[str], pin: int) -> None:
    order, requested = sorted(served), f"v{pin:03d}"
    fitting = [version for version in order if int(version[1:]) <= pin]
    if fitting:
        assert resolve(order, requested, "/x") == fitting[-1]
    else:
        with pytest.raises(Refusal) as caught:
            resolve(order, requested, "/x")
        assert caught.value.code.status == 400 and "unsupported version" in caught.value.message
        assert caught.value.details == {"endpoint": "/x", "requested": requested, "accepted": order}


def test_without_a_pin_the_newest() -> None:
    assert resolve(("v055", "v061"), None, "/x") == "v061"
    assert resolve(("v061",), "v062", "/x") == "v061"
