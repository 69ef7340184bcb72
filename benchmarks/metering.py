"""What accounting costs the gateway: CPU per request in the event loop, time until durable, and what the ledger takes.

Everything is the real thing (journal file, SQLite ledger, settler thread) but the HTTP and the engine. Beside it, the
same requests written straight into the ledger, one transaction for the hold and one for the settlement: what a
gateway without a journal does.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from benchmarks.rig import results
from benchmarks.rig.machine import wait_until_quiet
from engine.wire import Counters, UsageReply
from gateway.metering import metering as assembly
from gateway.metering.metering import SWITCH_S, Metering
from marketplace.ledger import ledger, meters
from marketplace.ledger.apply import apply_batch
from marketplace.ledger.audit import audit
from marketplace.ledger.money import Price
from marketplace.ledger.records import Hold, JournalRecord, Settle
from marketplace.store.db import Database

PRICE = Price(10**7, 10**6, 4 * 10**7)
ACCOUNTS = 16


class NoEngines:
    """Nothing to recover here."""

    async def usage(self, model: str, request_ids: Sequence[str]) -> UsageReply | None:
        """No engine can be asked."""
        return None

    async def abort(self, model: str, request_id: str) -> None:
        """Nothing runs."""


def wall() -> int:
    """µs UTC."""
    return time.time_ns() // 1000


def monotonic() -> int:
    """µs that never jump."""
    return time.monotonic_ns() // 1000


def prepare(folder: Path) -> Database:
    """A ledger with a price and customers."""
    database = Database(f"sqlite:///{folder / 'ledger.sqlite'}")
    database.migrate()
    with database.write() as unit:
        meters.set_price(unit, "model", PRICE.prompt, PRICE.cached, PRICE.completion, version_id="price", now=wall())
        for index in range(ACCOUNTS):
            name = f"customer-{index}"
            ledger.open_account(unit, name, owner_kind="user", owner_id=name, now=wall())
            entries = [(name, 10**15), (ledger.CLEARING, -(10**15))]
            ledger.post(unit, tx_id=name, key=name, kind="topup", entries=entries, now=wall())
    return database


class Bench:
    """A running metering and a count of requests."""

    def __init__(self, metering: Metering) -> None:
        self.metering = metering
        self.count = 0
        self.durable: list[float] = []
        self.settled: list[float] = []

    async def request(self) -> None:
        """One answer of 60 tokens in four flushes; notes how long hold and settlement took to be durable."""
        self.count += 1
        began = time.perf_counter()
        charge = await self.metering.meter.open(
            request_id=f"request-{self.count:032d}",
            account_id=f"customer-{self.count % ACCOUNTS}",
            key_id="key",
            model="model",
            price_id="price",
            price=PRICE,
            prompt_tokens=200,
            max_completion=512,
        )
        await charge.durable
        self.durable.append(time.perf_counter() - began)
        for tokens in (1, 20, 40, 60):
            charge.progress(Counters(200, 0, tokens, True))
        began = time.perf_counter()
        await charge.settle("finished", Counters(200, 0, 60, True), engine_epoch="epoch")
        self.settled.append(time.perf_counter() - began)


async def run(database: Database, folder: Path, concurrency: int, requests: int) -> dict[str, results.Cell]:
    """`concurrency` clients share `requests` requests; every one is in the ledger at the end."""
    metering = await Metering.start(folder / f"journal-{concurrency}.sqlite", database, clock=wall, monotonic=monotonic)
    await metering.recover(NoEngines())
    bench = Bench(metering)
    bench.count = concurrency * 10_000_000
    left = iter(range(requests))

    async def client() -> None:
        for _ in left:
            await bench.request()

    began, cpu = time.perf_counter(), time.thread_time()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    wall_s, cpu_s = time.perf_counter() - began, time.thread_time() - cpu
    await metering.settler.reached(metering.journal.next_seq - 1)
    applied_s = time.perf_counter() - began
    commits = metering.journal.commits
    assert await metering.close()
    return {
        "concurrency": concurrency,
        "requests_per_s": round(requests / wall_s),
        "in_ledger_per_s": round(requests / applied_s),
        "loop_us_per_request": round(cpu_s / requests * 1e6, 1),
        "records_per_commit": round(2 * requests / commits, 1),
        "hold_p50_ms": round(results.percentile(bench.durable, 0.5) * 1e3, 3),
        "hold_p99_ms": round(results.percentile(bench.durable, 0.99) * 1e3, 3),
        "settle_p50_ms": round(results.percentile(bench.settled, 0.5) * 1e3, 3),
        "settle_p99_ms": round(results.percentile(bench.settled, 0.99) * 1e3, 3),
    }


def straight(database: Database, requests: int) -> dict[str, results.Cell]:
    """The same requests without a journal: two ledger transactions each, one after the other."""
    holds: list[float] = []
    settles: list[float] = []

    def write(record: JournalRecord, into: list[float]) -> None:
        began = time.perf_counter()
        with database.write() as unit:
            apply_batch(unit, "straight", [record])
        into.append(time.perf_counter() - began)

    cpu, began = time.thread_time(), time.perf_counter()
    for number in range(requests):
        name, seq, account = f"straight-{number:031d}", 2 * number + 1, f"customer-{number % ACCOUNTS}"
        write(Hold(seq, name, account, "key", "model", "price", 22_480_000, 200, 512, wall()), holds)
        settle = Settle(seq + 1, name, 200, 0, 60, "finished", True, "completed", "engine", "epoch", wall())
        write(settle, settles)
    wall_s, cpu_s = time.perf_counter() - began, time.thread_time() - cpu
    return {
        "concurrency": "no journal, 1",
        "requests_per_s": round(requests / wall_s),
        "in_ledger_per_s": round(requests / wall_s),
        "loop_us_per_request": round(cpu_s / requests * 1e6, 1),
        "records_per_commit": 1.0,
        "hold_p50_ms": round(results.percentile(holds, 0.5) * 1e3, 3),
        "hold_p99_ms": round(results.percentile(holds, 0.99) * 1e3, 3),
        "settle_p50_ms": round(results.percentile(settles, 0.5) * 1e3, 3),
        "settle_p99_ms": round(results.percentile(settles, 0.99) * 1e3, 3),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every case, print the table, write results/metering.json. Exits 1 when the audit finds anything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=4_000, help="requests per case")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 128, 1000])
    parser.add_argument("--quiet-s", type=float, default=60.0, help="wait at most this long for a quiet machine")
    parser.add_argument(
        "--switch-ms", type=float, default=SWITCH_S * 1e3, help="see gateway.metering.metering.SWITCH_S"
    )
    asked = parser.parse_args(arguments)
    assembly.SWITCH_S = asked.switch_ms / 1e3
    sys.setswitchinterval(assembly.SWITCH_S)
    busy = wait_until_quiet(asked.quiet_s)
    rows: list[dict[str, results.Cell]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        database = prepare(folder)
        for concurrency in asked.concurrency:
            rows.append(uvloop.run(run(database, folder, concurrency, asked.requests)))
        rows.append(straight(database, min(1_000, asked.requests)))
        with database.read() as unit:
            report = audit(unit, now=wall())
        database.close()
    results.report(
        "metering", rows, {"cases": rows, "busy_before": busy, "switch_ms": asked.switch_ms, "audit": report.lines()}
    )
    if not report.clean:
        print("\n".join(report.lines()))
        sys.exit(1)


if __name__ == "__main__":
    main()
