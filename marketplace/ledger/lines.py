"""Lines of statements: what a batch did to each customer's account, as its owner reads it.

Metered usage is summed per key and model; every other transaction is a line of its own. A batch is final, so its lines
are, too: they are written with it and never change. They repeat what entries and usage records say, and the audit
compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]


def sums(usage: Iterable[Row], txs: Iterable[Row], entries: Iterable[Row]) -> list[Row]:
    """Return the lines of one batch. `entries` are those of customers, in the order of their ordinals."""
    used = {row["request_id"]: row for row in usage}
    made = {row["id"]: row for row in txs}
    found: dict[tuple[str, ...], Row] = {}
    for entry in entries:
        tx = made[entry["tx_id"]]
        metered = used.get(tx["id"])
        account_id = entry["account_id"]
        if metered is None:
            name: tuple[str, ...] = (account_id, tx["id"])
        else:
            name = (account_id, metered["key_id"], metered["model"])
        line = found.get(name)
        if line is None:
            line = found[name] = _begin(account_id, tx, metered)
        _add(line, entry, tx, metered)
    return list(found.values())


def _begin(account_id: str, tx: Row, metered: Row | None) -> Row:
    return {
        "account_id": account_id,
        "at": tx["occurred_at"],
        "amount": 0,
        "requests": 0,
        "key_id": None if metered is None else metered["key_id"],
        "model": None if metered is None else metered["model"],
        "prompt": 0,
        "cached": 0,
        "completion": 0,
        "begin_at": None if metered is None else metered["opened_at"],
    }


def _add(line: Row, entry: Row, tx: Row, metered: Row | None) -> None:
    line["ordinal"], line["tx_id"], line["kind"], line["memo"] = entry["ordinal"], tx["id"], tx["kind"], tx["memo"]
    line["at"] = max(line["at"], tx["occurred_at"])
    line["amount"] += entry["amount"]
    if metered is not None:
        line["requests"] += 1
        line["prompt"] += metered["prompt"]
        line["cached"] += metered["cached"]
        line["completion"] += metered["completion"]
        line["begin_at"] = min(line["begin_at"], metered["opened_at"])
