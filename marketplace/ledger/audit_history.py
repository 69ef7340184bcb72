"""Checks of history: that it cannot be changed, that it was not, and that nothing is missing from it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

from sqlalchemy import Select, Text, column, select, table

from marketplace.ledger import chain as chains
from marketplace.ledger.audit_finding import Checked
from marketplace.ledger.rental_tables import APPEND_ONLY as RENTAL
from marketplace.ledger.tables import APPEND_ONLY, batch, chain, entry, ledger_tx, quarantine, usage_record
from marketplace.store.db import ReadUnit

_Key = tuple[str, int]


def guards_in_place(unit: ReadUnit) -> Checked:
    """The triggers that refuse changes of append-only tables exist and are switched on."""
    wanted = {f"{name}_refuse_{change}" for name in (*APPEND_ONLY, *RENTAL) for change in ("update", "delete")}
    if unit.dialect == "sqlite":
        found = select(column("name", Text)).select_from(table("sqlite_master")).where(column("type") == "trigger")
    else:
        wanted.add("entry_refuse_imbalance")
        on = column("tgenabled").in_(("O", "A"))
        found = select(column("tgname", Text)).select_from(table("pg_trigger")).where(on)
    present = {str(row[0]) for row in unit.select(found)}
    checked = Checked(len(wanted))
    for name in sorted(wanted - present):
        checked.wrong(f"trigger {name} is missing")
    return checked


def chain_whole(unit: ReadUnit) -> Checked:
    """Every batch follows the one before, its hash is that of its rows, and the chain's head is the last batch."""
    checked = Checked()
    heads = {row.node: row for row in unit.select(select(chain))}
    last: dict[str, tuple[int, bytes, int]] = dict.fromkeys(heads, (0, chains.GENESIS, 0))
    rows = [
        _Groups(unit, select(usage_record), usage_record.c.node, usage_record.c.batch),
        _Groups(unit, select(ledger_tx), ledger_tx.c.node, ledger_tx.c.batch),
        _Groups(
            unit, select(entry).join(ledger_tx, ledger_tx.c.id == entry.c.tx_id), ledger_tx.c.node, ledger_tx.c.batch
        ),
    ]
    for row in unit.stream(select(batch).order_by(batch.c.node, batch.c.number)):
        checked.count += 1
        number, previous, seq = last.get(row.node, (0, chains.GENESIS, 0))
        if row.number != number + 1 or row.prev_hash != previous:
            checked.wrong(f"batch {row.number} of {row.node} does not follow batch {number}")
        header = tuple(getattr(row, name) for name in chains.HEADER_COLUMNS)
        usage, txs, entries = (group.take((row.node, row.number)) for group in rows)
        if chains.batch_hash(row.prev_hash, header, usage, txs, entries) != row.hash:
            checked.wrong(f"batch {row.number} of {row.node} is not what was posted")
        last[row.node] = (row.number, row.hash, max(seq, row.last_seq))
    for node, (number, digest, seq) in sorted(last.items()):
        head = heads.get(node)
        if head is None or (head.batches, head.head) != (number, digest):
            checked.wrong(f"the chain of {node} does not end with its last batch, {number}")
        elif head.applied_seq < seq:
            checked.wrong(f"the chain of {node} has applied record {seq} but says {head.applied_seq}")
    for group in rows:
        for key in group.left_over():
            checked.wrong(f"rows belong to batch {key[1]} of {key[0]}, which is missing or out of order")
    return checked


class _Groups:
    """Rows of one table, batch by batch, in the database's own order of batches, without keeping more than one
    batch."""

    def __init__(self, unit: ReadUnit, rows: Select[*tuple[Any, ...]], node: Any, number: Any) -> None:
        width = len(rows.selected_columns)
        ordered = rows.add_columns(node.label("of_node"), number.label("of_batch")).order_by(node, number)
        self._width = width
        self._groups: Iterator[tuple[_Key, Iterator[Any]]] = groupby(unit.stream(ordered), key=itemgetter(-2, -1))
        self._next: tuple[_Key, Iterator[Any]] | None = None
        self._advance()

    def take(self, key: _Key) -> list[tuple[Any, ...]]:
        """Return the rows of a batch, which must be asked for in order; none when the next rows are another batch's."""
        if self._next is None or self._next[0] != key:
            return []
        rows = [tuple(row[: self._width]) for row in self._next[1]]
        self._advance()
        return rows

    def left_over(self) -> Iterator[_Key]:
        """Yield the batches whose rows nobody took."""
        while self._next is not None:
            yield self._next[0]
            self._advance()

    def _advance(self) -> None:
        self._next = next(self._groups, None)


def nothing_quarantined(unit: ReadUnit) -> Checked:
    """No journal record contradicted the ledger."""
    checked = Checked()
    for row in unit.select(select(quarantine).order_by(quarantine.c.node, quarantine.c.seq)):
        checked.count += 1
        checked.wrong(f"record {row.seq} of {row.node} (request {row.request_id}): {row.why}")
    return checked
