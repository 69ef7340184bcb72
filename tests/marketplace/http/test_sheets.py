"""CSV that spreadsheets only show."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.http.sheets import Plain, line

_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


def read(text: str) -> list[str]:
    (row,) = csv.reader(io.StringIO(text, newline=""))
    return row


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", " =1", "\ufeff=1", "|cmd", "%x"])
def test_what_looks_like_a_formula_is_text(text: str) -> None:
    assert read(line([text])) == [f"'{text}"]


def test_ordinary_cells_stay_as_they_are() -> None:
    cells = ["laptop", 'a "b", c', "two\nlines", "", -5, True, None, Plain("-0.0417"), "1.5"]
    assert read(line(cells)) == ["laptop", 'a "b", c', "two\nlines", "", "-5", "true", "", "-0.0417", "1.5"]
    assert line(["a", "b"]) == "a,b\r\n"


@given(st.lists(_TEXT, min_size=2, max_size=5))
def test_every_text_comes_back_and_none_begins_a_formula(texts: list[str]) -> None:
    row = read(line(texts))
    assert [cell.removeprefix("'") if cell != text else cell for cell, text in zip(row, texts, strict=True)] == texts
    assert not any(cell.strip().startswith(("=", "+", "-", "@")) for cell in row)
