"""Result files: JSON with its provenance, and the table that is printed beside it."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.rig import machine

RESULTS = Path(__file__).resolve().parent.parent / "results"

Cell = str | int | float | None
Row = Mapping[str, Cell]


def provenance() -> dict[str, object]:
    """Return when, where, from which commit and under what load a result was measured."""
    one, five, fifteen = os.getloadavg()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", _module_name(), *sys.argv[1:]]),
        "commit": _git("rev-parse", "--short=12", "HEAD") or None,
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "cpu": machine.cpu_model(),
        "cores": os.cpu_count(),
        "memory_mib": machine.memory_mib(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": [round(one, 2), round(five, 2), round(fifteen, 2)],
    }


_NUMBERS = re.compile(rb"\[\n[-+.\deE,\s]+\]")
"""A list of numbers alone: samples, which need no line each. (No string of JSON has a line break in it.)"""


def write(name: str, result: Mapping[str, object], folder: Path = RESULTS) -> Path:
    """Write `result` with its provenance as folder/NAME.json, replacing it whole, and return the path."""
    import orjson  # what else is here works on a machine that has Python alone

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    part = path.with_suffix(".json.part")
    document = {"benchmark": name, "provenance": provenance(), **result}
    text = orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_DATACLASS)
    part.write_bytes(_NUMBERS.sub(lambda found: b"".join(found[0].split()), text) + b"\n")
    part.replace(path)
    return path


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text in columns; the first row's keys are the heading, numbers stand to the right."""
    if not rows:
        return "(no rows)"
    columns = list(rows[0])
    cells = [[_text(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]
    numeric = [all(not isinstance(row.get(column), str) for row in rows) for column in columns]

    def line(texts: Sequence[str]) -> str:
        padded = (
            text.rjust(width) if right else text.ljust(width) for text, width, right in zip(texts, widths, numeric)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(columns), line(["-" * width for width in widths]), *map(line, cells)])


def report(name: str, rows: Sequence[Row], result: Mapping[str, object], folder: Path = RESULTS) -> Path:
    """Print the table, write the JSON, say where it is, and return its path."""
    print(table(rows), flush=True)
    path = write(name, result, folder)
    print(f"written: {path}", flush=True)
    return path


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0..1) of the values lie, by linear interpolation; NaN for none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        if cell != cell:
            return "-"
        return f"{cell:,.1f}" if abs(cell) >= 10 else f"{cell:.3g}"
    return str(cell)


def _module_name() -> str:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name if spec is not None else Path(sys.argv[0]).stem


def _git(*arguments: str) -> str:
    """Output of a git command in this checkout, empty where there is no git or no repository."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=False, timeout=10
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
