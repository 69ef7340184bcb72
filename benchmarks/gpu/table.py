"""The one table at the end: every figure beside its floor, its target and what others reach; then what went wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu import anchors
from benchmarks.gpu.record import DONE, Record
from benchmarks.rig import results


def final_rows(figures: Mapping[str, float], facts: Mapping[str, Any]) -> list[results.Row]:
    """One row an anchor. Targets are judged only for the model and the GPU that they are for."""
    why_not = not_comparable(facts)
    rows: list[results.Row] = []
    for anchor in anchors.ANCHORS:
        found = anchors.place_of(anchor, figures)
        verdict = anchors.judge(anchor, found[anchor.judged])
        if found[anchor.judged] is None and found["in process"] is not None and anchor.target is not None:
            verdict = f"{anchors.judge(anchor, found['in process'])} (in process)"
        rows.append(
            {
                "what": anchor.what,
                "unit": anchor.unit,
                **found,
                "floor": anchor.floor,
                "target": anchor.target,
                "verdict": why_not or verdict,
                "others": anchor.known or "-",
            }
        )
    return rows


def not_comparable(facts: Mapping[str, Any]) -> str:
    """Why the targets say nothing about this run; empty where they do."""
    if facts.get("tiny"):
        return "tiny shape"
    name = str(facts.get("gpu") or "no GPU")
    return "" if anchors.DEVICE in name else f"on {name}"


def closing(records: Sequence[Record], facts: Mapping[str, Any]) -> str:
    """Everything that is printed at the end."""
    figures = {name: value for record in records for name, value in record.figures.items()}
    parts = []
    for record in records:
        for title, rows in record.tables.items():
            parts.append(f"{title}\n{results.table(rows)}")
    parts.append(f"Against the anchors (H200, 8B bf16)\n{results.table(final_rows(figures, facts))}")
    parts += [f"note ({record.section}): {note}" for record in records for note in record.notes]
    parts += [
        f"{record.section}: {record.status}{': ' * bool(record.reason)}{record.reason}"
        for record in records
        if record.status != DONE
    ]
    parts += [
        f"BROKEN {record.section}: {check['name']}: {check['detail']}" for record in records for check in record.broken
    ]
    checks = sum(len(record.checks) for record in records)
    parts.append(f"{checks} checks, {sum(len(record.broken) for record in records)} broken")
    return "\n\n".join(parts)
