"""From the journal to the ledger: a batch of records becomes one transaction, exactly once.

The journal delivers at least once. `applied_seq` of its node is raised in the same transaction that applies the
records, so a record at or below it is known to be applied; and every request has one hold and one end, whose
fingerprints recognise the same event under another number. Replaying any part of a journal, any number of times, in
batches of any size, leaves the same tables.

Few statements whatever the size of the batch: read the holds, lock the accounts, compute in memory, write once per
table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
from sqlalchemy import select

from marketplace.ledger import book, chain, holds, ledger, meters
from marketplace.ledger.book import CUSTOMER, Account, AccountState
from marketplace.ledger.chain import Posting, Row
from marketplace.ledger.holds import Refused
from marketplace.ledger.meters import PriceVersion
from marketplace.ledger.money import MoneyError
from marketplace.ledger.records import Checkpoint, Extend, Hold, JournalRecord, Settle, encode
from marketplace.ledger.tables import chain as chains
from marketplace.ledger.tables import hold, quarantine
from marketplace.store.db import ReadUnit, WriteUnit

_CHANGING = ("asked", "amount", "state", "prompt", "cached", "completion", "closed_at", "closed_by", "close_reason")


class AppliedBatch(msgspec.Struct, frozen=True):
    """What a batch did. `accounts` are the customers' accounts that it touched, as they are once the unit commits."""

    applied_seq: int
    accounts: dict[str, AccountState]
    settled: int = 0
    voided: int = 0
    overruns: int = 0
    written_off: int = 0
    quarantined: int = 0
    """records that contradict the ledger: kept in the table of that name, reported by the audit, and not applied"""


@dataclass(slots=True)
class _Desk:
    """Everything that one batch works on."""

    node: str
    holds: dict[str, Row]
    accounts: dict[str, Account]
    prices: dict[str, PriceVersion]
    posting: Posting = field(default_factory=Posting)
    opened: dict[str, Row] = field(default_factory=dict)
    changed: dict[str, Row] = field(default_factory=dict)
    rejected: list[Row] = field(default_factory=list)
    settled: int = 0
    voided: int = 0
    overruns: int = 0
    written_off: int = 0


def apply_batch(unit: WriteUnit, node: str, records: Sequence[JournalRecord]) -> AppliedBatch:
    """Apply journal records, in the order of their numbers, and raise the node's `applied_seq`; known records change
    nothing.

    A record that contradicts the ledger (an end without a beginning, a second end, an unknown account or price)
    cannot be applied and must not stop the others: it is kept in `quarantine`. LedgerError when numbers do not rise
    strictly, or for the name that direct postings use.
    """
    if node == chain.DIRECT:
        raise book.LedgerError(f"{node!r} is the chain of direct postings, not a journal")
    if any(later.seq <= earlier.seq for earlier, later in pairwise(records)):
        raise book.LedgerError("journal records must come with strictly rising numbers")
    head = chain.lock(unit, node)
    fresh = [record for record in records if record.seq > head.applied_seq]
    if not fresh:
        return AppliedBatch(head.applied_seq, {})
    desk = _prepare(unit, node, fresh)
    for record in fresh:
        try:
            _step(desk, record)
        except (Refused, MoneyError) as why:
            desk.rejected.append(
                {
                    "node": node,
                    "seq": record.seq,
                    "request_id": record.request_id,
                    "body": encode(record),
                    "why": str(why),
                    "at": record.at,
                }
            )
    _write(unit, desk, head, fresh)
    return AppliedBatch(
        head.applied_seq,
        {item.id: item.state() for item in desk.accounts.values() if item.kind == CUSTOMER},
        settled=desk.settled,
        voided=desk.voided,
        overruns=desk.overruns,
        written_off=desk.written_off,
        quarantined=len(desk.rejected),
    )


def applied_seq(unit: ReadUnit, node: str) -> int:
    """Return the number of a journal's last record that this snapshot contains; 0 for a new journal."""
    return int(unit.select(select(chains.c.applied_seq).where(chains.c.node == node)).scalar() or 0)


def _prepare(unit: WriteUnit, node: str, records: Sequence[JournalRecord]) -> _Desk:
    known = holds.load(unit, {record.request_id for record in records})
    opening = [record for record in records if isinstance(record, Hold)]
    account_ids = {row["account_id"] for row in known.values()} | {record.account_id for record in opening}
    price_ids = {row["price_id"] for row in known.values()} | {record.price_id for record in opening}
    prices = meters.prices(unit, price_ids)
    platform = {ledger.revenue_account(version.model) for version in prices.values()} | {ledger.WRITEOFF}
    accounts = ledger.lock_accounts(unit, account_ids | platform)
    if missing := platform - accounts.keys():
        ledger.ensure_platform(unit, missing, records[0].at)
        accounts = ledger.lock_accounts(unit, account_ids | platform)
    return _Desk(node, known, accounts, prices)


def _step(desk: _Desk, record: JournalRecord) -> None:
    if isinstance(record, Hold):
        _open(desk, record)
        return
    row = desk.holds.get(record.request_id)
    if row is None or row["node"] != desk.node:
        raise Refused("no hold of this journal has this request id")
    account = desk.accounts[row["account_id"]]
    if isinstance(record, Extend):
        holds.extend(row, record, account)
    elif isinstance(record, Checkpoint):
        holds.checkpoint(row, record)
    elif holds.already_ended(row, record):
        return
    elif isinstance(record, Settle):
        _settle(desk, row, record, account)
    else:
        holds.void(row, record, account)
        desk.voided += 1
    if record.request_id not in desk.opened:
        desk.changed[record.request_id] = row


def _open(desk: _Desk, record: Hold) -> None:
    row = holds.begin(record, desk.node)
    known = desk.holds.get(record.request_id)
    if known is not None:
        if known["opened_by"] != row["opened_by"]:
            raise Refused("the request id was used before")
        return
    account = desk.accounts.get(record.account_id)
    if account is None or account.kind != CUSTOMER:
        raise Refused("no such customer account")
    price = desk.prices.get(record.price_id)
    if price is None or price.model != record.model:
        raise Refused("no such price version of this model")
    holds.set_aside(row, record.amount, account)
    desk.holds[record.request_id] = desk.opened[record.request_id] = row


def _settle(desk: _Desk, row: Row, record: Settle, account: Account) -> None:
    charge = holds.settle(row, record, account, desk.prices[row["price_id"]].price)
    desk.posting.usage.append(holds.usage_row(row, record, charge))
    desk.settled += 1
    desk.overruns += charge.overrun
    desk.written_off += charge.written_off
    entries = [
        (account.id, -charge.paid),
        (ledger.WRITEOFF, -charge.written_off),
        (ledger.revenue_account(row["model"]), charge.cost),
    ]
    if charge.cost:
        book.post(
            desk.accounts,
            desk.posting,
            tx_id=record.request_id,
            key=f"usage:{record.request_id}",
            kind="usage",
            input_hash=row["closed_by"],
            occurred_at=record.at,
            entries=[(account_id, amount) for account_id, amount in entries if amount],
        )


def _write(unit: WriteUnit, desk: _Desk, head: chain.Head, records: Sequence[JournalRecord]) -> None:
    unit.insert_rows(hold, list(desk.opened.values()))
    unit.update_rows(hold, "request_id", _CHANGING, [row for _, row in sorted(desk.changed.items())])
    unit.insert_rows(quarantine, desk.rejected)
    chain.append(
        unit,
        head,
        desk.posting,
        first_seq=records[0].seq,
        last_seq=records[-1].seq,
        records=len(records),
        at=max(record.at for record in records),
    )
    ledger.save_accounts(unit, desk.accounts.values())
