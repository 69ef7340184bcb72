"""A ledger with something to sell, for tests of accounts, journal records and audits."""

from __future__ import annotations

from random import Random as RandomNumbers

from sqlalchemy import select

from marketplace.accounts import service as accounts
from marketplace.ledger import meters
from marketplace.ledger.apply import AppliedBatch, apply_batch
from marketplace.ledger.audit import AuditReport, audit
from marketplace.ledger.book import AccountState
from marketplace.ledger.ledger import Posted
from marketplace.ledger.money import Tokens
from marketplace.ledger.records import Checkpoint, Extend, Hold, JournalRecord, Settle, Void
from marketplace.ledger.rules import Outcome, judge
from marketplace.ledger.tables import account
from marketplace.store.db import Database
from marketplace.store.ids import Random, new_id
from marketplace.store.schema import metadata


class Shop:
    """A database with a model on offer, a clock that ticks by itself, and short ways to make customers and records."""

    MODEL = "tiny"

    def __init__(self, database: Database) -> None:
        self.database = database
        self.now = 1_700_000_000_000_000
        self.seq = 0
        self.random: Random = RandomNumbers(7).randbytes
        self.price_id = self.price(1_000_000, 500_000, 2_000_000)

    def tick(self) -> int:
        """Return a later time than ever before."""
        self.now += 1
        return self.now

    def new_id(self) -> str:
        return new_id(self.tick(), self.random)

    def price(self, prompt: int, cached: int, completion: int, model: str = MODEL) -> str:
        """Set a price in nano-units per million tokens; returns the id of its version."""
        with self.database.write() as unit:
            return meters.set_price(
                unit, model, prompt, cached, completion, version_id=self.new_id(), now=self.tick()
            ).id

    def customer(self, balance: int = 0, credit_limit: int = 0, unlimited: bool = False) -> str:
        """Open an account and put money on it; returns its id."""
        owner = self.new_id()
        with self.database.write() as unit:
            account_id = accounts.open_account(
                unit,
                owner_kind="user",
                owner_id=owner,
                now=self.tick(),
                random=self.random,
                credit_limit=credit_limit,
                unlimited=unlimited,
            )
        if balance:
            self.top_up(account_id, balance)
        return account_id

    def top_up(self, account_id: str, amount: int, key: str | None = None) -> Posted:
        with self.database.write() as unit:
            return accounts.top_up(
                unit, account_id, amount, key=key or self.new_id(), now=self.tick(), random=self.random
            )

    def _next(self) -> int:
        self.seq += 1
        return self.seq

    def hold(self, account_id: str, amount: int, request_id: str | None = None, price_id: str | None = None) -> Hold:
        return Hold(
            self._next(),
            request_id or self.new_id(),
            account_id,
            "key",
            self.MODEL,
            price_id or self.price_id,
            amount,
            prompt_tokens=10,
            max_completion=1024,
            at=self.tick(),
        )

    def extend(self, request_id: str, amount: int) -> Extend:
        return Extend(self._next(), request_id, amount, self.tick())

    def checkpoint(self, request_id: str, prompt: int, cached: int, completion: int) -> Checkpoint:
        return Checkpoint(self._next(), request_id, prompt, cached, completion, self.tick())

    def settle(
        self, request_id: str, prompt: int = 0, cached: int = 0, completion: int = 0, outcome: Outcome = "finished"
    ) -> Settle:
        verdict = judge(outcome, Tokens(prompt, cached, completion))
        return Settle(
            self._next(),
            request_id,
            prompt,
            cached,
            completion,
            outcome,
            verdict.billable,
            verdict.reason,
            "engine",
            "epoch",
            self.tick(),
            delivered=completion,
        )

    def void(self, request_id: str, reason: str = "refused") -> Void:
        return Void(self._next(), request_id, reason, self.tick())

    def apply(self, *records: JournalRecord, node: str = "gateway-1") -> AppliedBatch:
        with self.database.write() as unit:
            return apply_batch(unit, node, records)

    def state(self, account_id: str) -> AccountState:
        with self.database.read() as unit:
            return accounts.get(unit, account_id)

    def posted(self, account_id: str) -> int:
        """Balance of any account, the platform's too; 0 for one that does not exist."""
        with self.database.read() as unit:
            return int(unit.select(select(account.c.posted).where(account.c.id == account_id)).scalar() or 0)

    def audit(self) -> AuditReport:
        with self.database.read() as unit:
            return audit(unit, now=self.now)

    def dump(self, without: tuple[str, ...] = ()) -> dict[str, list[tuple[object, ...]]]:
        """Return every row of every table, but for columns of the names in `without`."""
        with self.database.read() as unit:
            return {
                table.name: sorted(
                    tuple(unit_row)
                    for unit_row in unit.select(
                        select(*(column for column in table.columns if column.name not in without))
                    )
                )
                for table in metadata.sorted_tables
            }
