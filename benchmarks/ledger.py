"""How fast the ledger takes records from a journal: apply_batch at several batch sizes, on SQLite and on PostgreSQL.

    python -m benchmarks.ledger [--records 8192] [--postgres URL]

One request is two records, a hold and its settlement; its settlement writes a usage record, a transaction and two
entries. Every batch is one committed transaction with everything durable (SQLite synchronous=FULL). `cpu_ms` is this
process' CPU time for a batch, which a busy machine does not inflate. Without
--postgres a throw-away server is started from the system's own binaries, where there are any, with its default
settings (fsync on). The audit runs at the end and must be clean; its time is reported, too. The folder is made where
TMPDIR says: a memory file system would flatter the figures.
"""

from __future__ import annotations

import argparse
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from benchmarks.rig import machine, results
from marketplace.ledger import ledger, meters
from marketplace.ledger.apply import apply_batch
from marketplace.ledger.audit import audit
from marketplace.ledger.records import Hold, JournalRecord, Settle
from marketplace.store.db import Database

BATCHES = (1, 64, 256)
CUSTOMERS = 50


def prepare(database: Database) -> list[str]:
    """Migrate, put one model on offer and open rich customers; returns their ids."""
    database.migrate()
    names = [f"customer-{number}" for number in range(CUSTOMERS)]
    with database.write() as unit:
        meters.set_price(unit, "model", 10**8, 5 * 10**7, 4 * 10**8, version_id="price", now=1)
        for name in names:
            ledger.open_account(unit, name, owner_kind="user", owner_id=name, now=1)
            entries = [(name, 10**15), (ledger.CLEARING, -(10**15))]
            ledger.post(unit, tx_id=f"topup-{name}", key=f"topup:{name}", kind="topup", entries=entries, now=1)
    return names


def journal(names: Sequence[str], first: int, requests: int) -> list[JournalRecord]:
    """Records of requests that end 64 requests after they began, as under load: holds and ends interleaved."""
    lag = 64
    seq = count(first)
    records: list[JournalRecord] = []
    for number in range(requests + lag):
        if number < requests:
            seq_number = next(seq)
            records.append(
                Hold(
                    seq_number,
                    f"{first}-{number}",
                    names[number % len(names)],
                    "key",
                    "model",
                    "price",
                    10**6,
                    200,
                    1024,
                    5,
                )
            )
        if number >= lag:
            request_id = f"{first}-{number - lag}"
            records.append(
                Settle(next(seq), request_id, 200, 64, 100, "finished", True, "completed", "engine", "epoch", 6, 100)
            )
    return records


def measure(database: Database, names: Sequence[str], first: int, total: int, batch: int) -> dict[str, results.Cell]:
    """Apply about `total` records in batches of `batch`; returns one row of the table."""
    records = journal(names, first, max(1, total // 2))
    times: list[float] = []
    cpu = 0.0
    for start in range(0, len(records), batch):
        piece = records[start : start + batch]
        began, cpu_began = time.perf_counter(), time.thread_time()
        with database.write() as unit:
            done = apply_batch(unit, "benchmark", piece)
        times.append(time.perf_counter() - began)
        cpu += time.thread_time() - cpu_began
        assert done.applied_seq == piece[-1].seq and done.quarantined == 0
    full = times[2 : len(records) // batch] or times
    return {
        "database": database.dialect,
        "batch": batch,
        "batches": len(times),
        "p50_ms": results.percentile(full, 0.5) * 1e3,
        "p95_ms": results.percentile(full, 0.95) * 1e3,
        "cpu_ms": cpu / len(times) * 1e3,
        "records_per_s": len(records) / sum(times),
        "requests_per_s": len(records) / 2 / sum(times),
    }


@contextmanager
def postgres() -> Iterator[str | None]:
    """Yield the URL of a throw-away PostgreSQL server; None where its binaries are not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if not found:
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    drop: dict[str, int] = {}
    if os.getuid() == 0:  # the server refuses to run as root
        user = pwd.getpwnam("postgres")
        os.chown(folder, user.pw_uid, user.pw_gid)
        drop = {"user": user.pw_uid, "group": user.pw_gid}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def run(program: str, *arguments: str) -> None:
        subprocess.run(
            [str(found[0] / program), "-D", str(folder / "data"), *arguments],
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
            **drop,  # type: ignore[call-overload]
        )

    try:
        run("initdb", "-U", "postgres", "-A", "trust", "--no-instructions")
        options = f"-c listen_addresses=127.0.0.1 -p {port} -k {folder}"
        run("pg_ctl", "-w", "-l", str(folder / "log"), "-o", options, "start")
        yield f"postgresql+psycopg://postgres@127.0.0.1:{port}/postgres"
    finally:
        run("pg_ctl", "-m", "immediate", "stop")
        shutil.rmtree(folder, ignore_errors=True)


def measure_database(url: str, records: int) -> tuple[list[dict[str, results.Cell]], dict[str, object]]:
    """Measure every batch size on one empty database, then audit it."""
    database = Database(url)
    try:
        names = prepare(database)
        rows = []
        first = 1
        for batch in BATCHES:
            # Single records are slow; a share of them measures as well.
            rows.append(measure(database, names, first, records if batch > 1 else records // 8, batch))
            first += 2 * records
        began = time.perf_counter()
        with database.read() as unit:
            report = audit(unit)
        assert report.clean, "\n".join(report.lines())
        checked = sum(result.checked for result in report.results)
        return rows, {"audit_s": round(time.perf_counter() - began, 3), "audit_checked": checked}
    finally:
        database.close()


def main() -> None:
    """Measure, print the table and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger", description=__doc__)
    parser.add_argument("--records", type=int, default=8192, help="records for each batch size")
    parser.add_argument("--postgres", help="URL of an empty PostgreSQL database to use instead of a throw-away one")
    parser.add_argument("--quiet-wait", type=float, default=0, help="wait up to this many seconds for a quiet machine")
    chosen = parser.parse_args()
    machine.wait_until_quiet(chosen.quiet_wait)
    rows: list[dict[str, results.Cell]] = []
    audits: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        found, audits["sqlite"] = measure_database(f"sqlite:///{folder}/ledger.db", chosen.records)
        rows += found
    with postgres() if chosen.postgres is None else _given(chosen.postgres) as url:
        if url is not None:
            found, audits["postgresql"] = measure_database(url, chosen.records)
            rows += found
    results.report("ledger", rows, {"rows": rows, "audits": audits})


@contextmanager
def _given(url: str) -> Iterator[str]:
    yield url


if __name__ == "__main__":
    main()
