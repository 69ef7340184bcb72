"""A meter to be worked on, and what it wrote."""

from __future__ import annotations

import sqlite3
from typing import Any

from engine.wire import Counters
from gateway.metering import failpoints
from gateway.metering.charge import Charge
from gateway.metering.journal import Journal
from gateway.metering.meter import Meter
from gateway.metering.purse import Purses
from marketplace.ledger.book import AccountState
from marketplace.ledger.money import Price
from marketplace.ledger.records import JournalRecord
from tests.gateway.metering.journal_watch import JournalWatch

PRICE = Price(10**6, 10**5, 4 * 10**6)  # 1, 0.1 and 4 nano-units per token
FIRST = 10 + 4 * 1024


def used(completion: int, prompt: int = 10, cached: int = 0) -> Counters:
    return Counters(prompt, cached, completion, True)


class Bench:
    """A meter over a real journal and an account row held in memory."""

    def __init__(self, journal: Journal, clocks: Any, balance: int) -> None:
        self.journal = journal
        self.clocks = clocks
        self.purses = Purses()
        self.rows = {"a": AccountState(balance, 0, 0, False, 1)}
        self.purses.refresh(self.rows, 0)
        self.reloads: list[str] = []
        self.records: list[JournalRecord] = []
        self.trouble: str | None = None
        journal.on_commit = self.records.extend
        self.meter = Meter(
            journal,
            self.purses,
            clock=clocks.wall,
            monotonic=clocks.monotonic,
            reload=self._reload,
            trouble=lambda: self.trouble,
            settle_grace_s=0.05,
        )
        self.meter.closed_reason = None
        self._watch = JournalWatch(journal)
        self._number = 0

    async def _reload(self, account_id: str) -> None:
        self.reloads.append(account_id)
        self.purses.refresh(self.rows, 0)

    async def open(self, **changes: Any) -> Charge:
        self._number += 1
        asked: dict[str, Any] = {
            "request_id": f"r{self._number}",
            "account_id": "a",
            "key_id": "k",
            "model": "tiny",
            "price_id": "p",
            "price": PRICE,
            "prompt_tokens": 10,
            "max_completion": 5000,
        }
        return await self.meter.open(**(asked | changes))

    @property
    def available(self) -> int:
        purse = self.purses.get("a")
        assert purse is not None
        return purse.available

    def of(self, kind: type[Any]) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]

    def break_disk(self) -> None:
        """From the next commit on."""

        def fail() -> None:
            raise sqlite3.OperationalError("disk I/O error")

        failpoints.arm("journal.before_commit", fail)

    async def broken(self) -> None:
        """Return when the journal has met the broken disk."""
        await self._watch.failed.wait()
        assert self.journal.failure is not None

    async def mend_disk(self) -> None:
        """Return when the journal works again, and what waited for it is queued."""
        failpoints.disarm()
        await self._watch.recovered.wait()
        assert self.journal.failure is None
