"""Holds: money set aside for a running request. Pure steps on rows in memory, and the queries that recovery needs.

A hold begins open and ends once: settled (a usage record exists), voided (nothing ran) or expired (nobody came back
for it).

The gateway decides whether a request may run, from its own up-to-date view; by the time its record arrives here, a
rental or a refund may have taken the money. The ledger then sets aside only what the account still covers (`amount` <
`asked`): an account never goes below what it may, and what a request costs beyond that is written off.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from operator import itemgetter
from typing import Any

import msgspec
from sqlalchemy import func, select

from marketplace.ledger.book import Account
from marketplace.ledger.chain import Row
from marketplace.ledger.money import MAX_AMOUNT, Price, Tokens, check_tokens
from marketplace.ledger.records import HOLD_LIFETIME_US, Checkpoint, Extend, Hold, JournalRecord, Settle, Void, with_seq
from marketplace.ledger.rules import charge_nano
from marketplace.ledger.tables import hold as hold_table
from marketplace.store.db import ReadUnit

COLUMNS = tuple(column.name for column in hold_table.columns)
OPENING_COLUMNS = (
    "request_id",
    "node",
    "account_id",
    "key_id",
    "model",
    "price_id",
    "first_asked",
    "prompt_tokens",
    "max_completion",
    "client_call_id",
    "opened_at",
    "deadline",
)
_opening = itemgetter(*OPENING_COLUMNS)


class Refused(Exception):  # noqa: N818 - not an error of the program: a record that is set aside and shown by the audit
    """A journal record that contradicts what the ledger knows."""


class Charge(msgspec.Struct, frozen=True):
    """What a settlement moves: `cost` to revenue, paid by the customer except for `written_off`."""

    cost: int
    written_off: int
    overrun: bool

    @property
    def paid(self) -> int:
        """What the customer pays."""
        return self.cost - self.written_off


class OpenHold(msgspec.Struct, frozen=True):
    """A request that has not ended, as the ledger knows it. Counters are those of its last checkpoint."""

    request_id: str
    account_id: str
    key_id: str
    model: str
    price_id: str
    asked: int
    amount: int
    opened_at: int
    deadline: int
    counters: Tokens


def fingerprint(record: JournalRecord) -> bytes:
    """Return the hash of a record but for its number: the same event written twice has the same one."""
    return hashlib.sha256(msgspec.msgpack.encode(with_seq(record, 0))).digest()[:16]


def opening_fingerprint(row: Mapping[str, Any]) -> bytes:
    """Return the hash of what never changes in a hold: who pays whom at which price, and what was asked for at
    first."""
    return hashlib.sha256(msgspec.msgpack.encode(_opening(row))).digest()[:16]


def begin(record: Hold, node: str) -> Row:
    """Return the row of a new hold, nothing set aside yet."""
    row = {
        "request_id": record.request_id,
        "node": node,
        "account_id": record.account_id,
        "key_id": record.key_id,
        "model": record.model,
        "price_id": record.price_id,
        "first_asked": record.amount,
        "asked": 0,
        "amount": 0,
        "prompt_tokens": record.prompt_tokens,
        "max_completion": record.max_completion,
        "client_call_id": record.client_call_id,
        "opened_at": record.at,
        "deadline": record.deadline or record.at + HOLD_LIFETIME_US,
        "opened_by": b"",
        "state": "open",
        "prompt": 0,
        "cached": 0,
        "completion": 0,
        "closed_at": None,
        "closed_by": None,
        "close_reason": None,
    }
    row["opened_by"] = opening_fingerprint(row)
    return row


def set_aside(row: Row, amount: int, account: Account) -> None:
    """Set more aside for an open hold. Refused for an impossible amount."""
    if not 0 <= amount <= MAX_AMOUNT - max(account.held, row["asked"]):
        raise Refused(f"holds {amount} nano-units more")
    row["asked"] += amount
    row["amount"] += account.hold(amount)


def extend(row: Row, record: Extend, account: Account) -> None:
    """Set more aside for an open hold. Refused when it has ended or for an impossible amount."""
    if row["state"] != "open":
        raise Refused(f"extends a hold that was {row['state']}")
    set_aside(row, record.amount, account)


def checkpoint(row: Row, record: Checkpoint) -> None:
    """Remember counters; those of a hold that has ended say nothing new. MoneyError for impossible counters."""
    check_tokens(Tokens(record.prompt, record.cached, record.completion))
    if row["state"] == "open":
        row.update(prompt=record.prompt, cached=record.cached, completion=record.completion)


def already_ended(row: Row, record: Settle | Void) -> bool:
    """Say whether this very record ended the hold before. Refused when another one did."""
    if row["state"] == "open":
        return False
    if row["closed_by"] == fingerprint(record):
        return True
    raise Refused(f"ends a hold that was {row['state']} before")


def settle(row: Row, record: Settle, account: Account, price: Price) -> Charge:
    """End an open hold and return what is charged. MoneyError for impossible counters, before anything is changed."""
    metered = check_tokens(Tokens(record.prompt, record.cached, record.completion))
    cost = charge_nano(record.outcome, metered, record.billable, price)
    account.release(row["amount"])
    beyond = cost - max(0, account.available) if account.bounded else 0
    _end(row, "settled", record, record.outcome)
    return Charge(cost=cost, written_off=max(0, beyond), overrun=cost > row["amount"])


def void(row: Row, record: Void, account: Account) -> None:
    """End an open hold that nothing was metered under."""
    account.release(row["amount"])
    _end(row, "expired" if record.reason == "expired" else "voided", record, record.reason)


def _end(row: Row, state: str, record: Settle | Void, reason: str) -> None:
    row.update(state=state, closed_at=record.at, closed_by=fingerprint(record), close_reason=reason)


def usage_row(row: Row, record: Settle, charge: Charge) -> Row:
    """Return the usage record of a settled hold, complete but for its batch."""
    return {
        "request_id": record.request_id,
        "account_id": row["account_id"],
        "key_id": row["key_id"],
        "model": row["model"],
        "price_id": row["price_id"],
        "prompt": record.prompt,
        "cached": record.cached,
        "completion": record.completion,
        "delivered": record.delivered,
        "outcome": record.outcome,
        "billable": record.billable,
        "reason": record.reason,
        "cost": charge.cost,
        "overrun": charge.overrun,
        "written_off": charge.written_off,
        "source": record.source,
        "engine_epoch": record.engine_epoch,
        "queue_us": record.queue_us,
        "ttft_us": record.ttft_us,
        "duration_us": record.duration_us,
        "opened_at": row["opened_at"],
        "at": record.at,
    }


def load(unit: ReadUnit, request_ids: Collection[str]) -> dict[str, Row]:
    """Return the holds of these requests, as rows that the steps above change."""
    found = unit.select(select(hold_table).where(hold_table.c.request_id.in_(sorted(request_ids))))
    return {row.request_id: dict(zip(COLUMNS, row)) for row in found}


def count_open(unit: ReadUnit, account_id: str) -> int:
    """Return how many requests of an account have not ended."""
    mine = select(func.count()).where(hold_table.c.account_id == account_id, hold_table.c.state == "open")
    return int(unit.select(mine).scalar_one())


def open_holds(unit: ReadUnit, node: str | None = None) -> list[OpenHold]:
    """Return the requests that have not ended, of one journal or of all, oldest first."""
    wanted = select(hold_table).where(hold_table.c.state == "open")
    if node is not None:
        wanted = wanted.where(hold_table.c.node == node)
    return [
        OpenHold(
            row.request_id,
            row.account_id,
            row.key_id,
            row.model,
            row.price_id,
            row.asked,
            row.amount,
            row.opened_at,
            row.deadline,
            Tokens(row.prompt, row.cached, row.completion),
        )
        for row in unit.select(wanted.order_by(hold_table.c.opened_at, hold_table.c.request_id))
    ]
