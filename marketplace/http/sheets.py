"""Lines of CSV (RFC 4180) that spreadsheets only show: text that one of them would take for a formula is quoted.

Text of other people ends up in exports: a key may be called `=HYPERLINK(…)`. A cell of text that begins like a formula
gets an apostrophe in front of it, as spreadsheets themselves write text. Amounts and counters are ours and stay as
they are.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

MEDIA_TYPE = "text/csv; charset=utf-8"
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\0", "|", "%")


class Plain(str):
    """Text that this program made and that may be read as what it looks like: a number or a time."""

    __slots__ = ()


Cell = str | int | bool | None


def line(cells: Iterable[Cell]) -> str:
    """One line with its end."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow([_shown(cell) for cell in cells])
    return text.getvalue()


def _shown(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, int | Plain):
        return str(cell)
    # Spaces and the byte order mark in front of it do not keep a spreadsheet from reading a formula.
    return f"'{cell}" if cell.lstrip(" \u00a0\ufeff").startswith(_FORMULA) else cell
