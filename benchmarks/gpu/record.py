"""What a section found, on disk from the moment it was found: a section that is killed has lost its last case at most.

A section's record is one JSON file in the suite's working folder, replaced whole after every addition. The suite merges
them into one result. JSON comes from Python's own library: nothing else needs to be installed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.rig import results

RUNNING, DONE, FAILED, TIMED_OUT, SKIPPED, NOT_REACHED = (
    "running", "done", "failed", "timed out", "skipped", "not reached",
)  # fmt: skip
BAD = (FAILED, TIMED_OUT, NOT_REACHED)
"""What makes the suite's exit status 1, beside a check that does not hold."""


@dataclass(slots=True)
class Record:
    """One section's findings."""

    section: str
    status: str = RUNNING
    reason: str = ""
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    """Name, such as "in process.ttft_128_ms" → number"""
    checks: list[dict[str, Any]] = field(default_factory=list)
    """What had to hold: name, ok, detail"""
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Rows to print, by title"""
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """What later sections are told, such as the folder of a checkpoint or the device's name"""

    @property
    def broken(self) -> list[dict[str, Any]]:
        """Checks that do not hold."""
        return [check for check in self.checks if not check["ok"]]


class Recorder:
    """Fills a record and keeps its file up to date. `say` prints a line as it happens."""

    def __init__(self, section: str, path: Path) -> None:
        self.record = Record(section)
        self._path = path
        self._began = time.monotonic()
        self._save()

    def figure(self, name: str, value: float) -> None:
        """A number that the final table may look for."""
        self.record.figures[name] = value
        self.say(f"{name} = {value:,.4g}")
        self._save()

    def check(self, name: str, ok: bool, detail: str = "") -> None:
        """Something that had to hold; a failure is printed, and makes the exit status 1."""
        self.record.checks.append({"name": name, "ok": ok, "detail": detail})
        if not ok:
            self.say(f"BROKEN {name}: {detail}")
        self._save()

    def row(self, table: str, row: Mapping[str, Any]) -> None:
        """A row of one of the section's tables."""
        self.record.tables.setdefault(table, []).append(dict(row))
        self._save()

    def fact(self, name: str, value: Any) -> None:
        """Something for later sections and for the result."""
        self.record.facts[name] = value
        self.say(f"{name}: {value}")
        self._save()

    def note(self, text: str) -> None:
        """Something that a reader of the figures must know."""
        self.record.notes.append(text)
        self.say(text)
        self._save()

    def end(self, status: str, reason: str = "") -> None:
        """How it ended."""
        self.record.status, self.record.reason = status, reason
        self._save()

    def say(self, text: str) -> None:
        """Print a line under the section's name."""
        print(f"  [{self.record.section}] {text}", flush=True)

    def _save(self) -> None:
        self.record.seconds = time.monotonic() - self._began
        save(self._path, asdict(self.record))


def save(path: Path, document: Mapping[str, Any]) -> None:
    """Replace a JSON file whole. A number that is none becomes null."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(_finite(document), indent=1, default=str) + "\n", "utf-8")
    part.replace(path)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def load(path: Path, section: str) -> Record:
    """The record of a section, empty where it never wrote one."""
    if not path.exists():
        return Record(section)
    return Record(**json.loads(path.read_text("utf-8")))


def merged(records: list[Record], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The suite's result so far: provenance, facts about device and run, and every section."""
    figures = {name: value for record in records for name, value in record.figures.items()}
    return {
        "benchmark": "gpu_suite",
        "provenance": results.provenance(),
        "facts": dict(facts),
        "failed": [record.section for record in records if record.status in BAD or record.broken],
        "figures": figures,
        "sections": [asdict(record) for record in records],
    }
