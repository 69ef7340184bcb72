"""The hash chain over everything posted: one link per batch, one chain per journal, so that it never serialises the
hot path.

A batch's hash is SHA-256 over the previous hash and the canonical msgpack of its usage records, transactions and
entries. Changing, adding or removing a row of any batch, in whatever way, breaks the chain from there on. The audit
recomputes it from the tables.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import msgspec
from sqlalchemy import insert, select, update

from marketplace.ledger import lines
from marketplace.ledger.tables import batch, chain, entry, ledger_tx, statement_line, usage_record
from marketplace.store.db import WriteUnit

DIRECT = "ledger"
"""Chain of transactions that no journal delivered: top-ups, corrections, rentals."""
GENESIS = bytes(32)

HEADER_COLUMNS = ("node", "number", "first_seq", "last_seq", "records", "at")
USAGE_COLUMNS = tuple(column.name for column in usage_record.columns)
TX_COLUMNS = tuple(column.name for column in ledger_tx.columns)
ENTRY_COLUMNS = tuple(column.name for column in entry.columns)

Row = dict[str, Any]
_usage_values = itemgetter(*USAGE_COLUMNS)
_tx_values = itemgetter(*TX_COLUMNS)
_entry_values = itemgetter(*ENTRY_COLUMNS)
_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class Head:
    """The end of a chain, locked by the unit that read it."""

    node: str
    applied_seq: int
    batches: int
    hash: bytes


@dataclass(slots=True)
class Posting:
    """Rows of one batch, complete but for `node` and `batch`."""

    usage: list[Row] = field(default_factory=list)
    txs: list[Row] = field(default_factory=list)
    entries: list[Row] = field(default_factory=list)
    customers: set[str] = field(default_factory=set)
    """accounts among those of the entries that have statements"""


def lock(unit: WriteUnit, node: str) -> Head:
    """Lock a chain until the unit ends and return its end; a new chain begins here.

    Always taken before accounts. Holds and batches of a node change only under this lock.
    """
    wanted = select(chain.c.applied_seq, chain.c.batches, chain.c.head).where(chain.c.node == node).with_for_update()
    row = unit.select(wanted).one_or_none()
    if row is None:
        unit.insert_missing(chain, [{"node": node, "applied_seq": 0, "batches": 0, "head": GENESIS}])
        row = unit.select(wanted).one()
    return Head(node, row.applied_seq, row.batches, row.head)


def batch_hash(
    previous: bytes,
    header: tuple[Any, ...],
    usage: Iterable[tuple[Any, ...]],
    txs: Iterable[tuple[Any, ...]],
    entries: Iterable[tuple[Any, ...]],
) -> bytes:
    """Return the hash of one batch. Rows are tuples in the order of the *_COLUMNS; their own order does not matter."""
    # Keys come first in every row and are unique, so sorting never compares further columns (some are None).
    digest = hashlib.sha256(previous)
    digest.update(_encode((header, sorted(usage), sorted(txs), sorted(entries))))
    return digest.digest()


def append(
    unit: WriteUnit, head: Head, posting: Posting, *, first_seq: int, last_seq: int, records: int, at: int
) -> None:
    """Write a batch behind the head and move the head. A batch that posts nothing only moves `applied_seq`."""
    if posting.usage or posting.txs:
        number = head.batches + 1
        for row in (*posting.usage, *posting.txs):
            row["node"], row["batch"] = head.node, number
        header = (head.node, number, first_seq, last_seq, records, at)
        new_hash = batch_hash(
            head.hash,
            header,
            map(_usage_values, posting.usage),
            map(_tx_values, posting.txs),
            map(_entry_values, posting.entries),
        )
        unit.execute(insert(batch).values(**dict(zip(HEADER_COLUMNS, header)), prev_hash=head.hash, hash=new_hash))
        unit.insert_rows(usage_record, posting.usage)
        unit.insert_rows(ledger_tx, posting.txs)
        unit.insert_rows(entry, posting.entries)
        written = [row for row in posting.entries if row["account_id"] in posting.customers]
        unit.insert_rows(statement_line, lines.sums(posting.usage, posting.txs, written))
        head.batches, head.hash = number, new_hash
    head.applied_seq = last_seq
    unit.execute(
        update(chain)
        .where(chain.c.node == head.node)
        .values(applied_seq=head.applied_seq, batches=head.batches, head=head.hash)
    )
