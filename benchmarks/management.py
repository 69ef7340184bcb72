"""How fast the management API lists: 10,000 people and 1,000,000 requests on the ledger, in SQLite.

    python -m benchmarks.management [--requests 200] [--town FOLDER]

A list is asked for as its callers do: with a key or a session's token, without a limit (so with the page of 100 that
is the default; 20 people for a search), its first page, one in the middle and the last whole one. Pages are asked in
turn, so that a busy moment meets all of them. The first table is the API itself, authentication, rate limit and JSON
included, in this process; the second is the gateway's own server over a kept HTTP connection on the same machine.
This process's memory is settled as the gateway's is. `cpu` is the CPU time of the thread that answers, which a busy
machine does not inflate as much.

The history is built first, through the ledger's own `apply_batch`, in a temporary folder; that takes minutes. With
--town it is built there, and used again the next time. The audit must find nothing at the end.

Exit status 1 when a p50 is above the target, a last page takes longer than its first by more than it may, or the audit
finds something.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import orjson
import uvloop

from benchmarks.rig import results, town
from benchmarks.rig.headrace import MODEL, House
from benchmarks.rig.http import Connection
from benchmarks.rig.machine import LoadMeter, wait_until_quiet
from benchmarks.rig.town import Size, Town
from engine.script import Script
from gateway.bootstrap import write_private
from gateway.serve import settle_memory
from gateway.settings import Paths
from marketplace.http.dispatch import Desk, Incoming
from marketplace.http.limits import Buckets
from marketplace.http.operation import Context, Operation
from marketplace.keys.rules import PEPPER_BYTES
from marketplace.ledger.audit import audit
from marketplace.operations import TABLE
from marketplace.store.db import Database
from marketplace.store.vault import Vault

TARGET_P50_MS = 5.0
TARGET_FLAT = 1.5
"""How much longer than its first page the last whole page of a list may take."""
OPERATIONS: dict[str, Operation[Any]] = {operation.name: operation for operation in TABLE}


@dataclass(frozen=True, slots=True)
class Case:
    """One list and who asks for it."""

    name: str
    operation: str
    items: str
    """member of the answer that holds the page; empty for what is no list"""
    credential: str
    """"key": the busiest person's; "session": an admin's"""
    body: dict[str, Any] = field(default_factory=dict)
    pages: bool = True


CASES = (
    Case("account/info", "account.info", "", "key", pages=False),
    Case("transactions v1", "account.transactions_list", "transactions", "key"),
    Case("transactions v2, 30 days", "account.transactions_list_v2", "transactions", "key"),
    Case("users", "users.list", "users", "session"),
    Case("users, with accounts", "users.list", "users", "session", {"with_account_info": True}),
    Case("users, ByMinSpend: half", "users.list", "users", "session", {"selector": {"ByMinSpend": 0.54}}),
    Case("users, ByMinSpend: one", "users.list", "users", "session", {"selector": {"ByMinSpend": 100}}, pages=False),
    Case("users/search: many", "users.search", "results", "session", {"query": "user"}, pages=False),
    Case("users/search: nobody", "users.search", "results", "session", {"query": "no such one"}, pages=False),
    Case("teams: mine", "teams.list", "teams", "key"),
    Case("api-keys", "keys.list", "api_keys", "key"),
    Case("events: mine", "events.list", "events", "key"),
    Case("events: everybody's", "events.list", "events", "session", {"selector": "All"}),
)


@dataclass(slots=True)
class Page:
    """One request that is repeated, and how long it took."""

    case: Case
    place: str
    body: bytes
    items: int = 0
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    http: list[float] = field(default_factory=list)


class Counter:
    """The API without HTTP around it."""

    def __init__(self, database: Database, pepper: bytes, people: Town) -> None:
        self._people = people
        self._desk = Desk(
            Context(
                database=database,
                pepper=pepper,
                vault=Vault(pepper),
                clock=lambda: time.time_ns() // 1000,
                random=os.urandom,
                limits=Buckets(),
            )
        )

    def ask(self, case: Case, body: bytes) -> tuple[bytes, float, float]:
        """Ask once; returns the answer, the time and the CPU time of it."""
        credential = self._people.key if case.credential == "key" else self._people.session
        incoming = Incoming(headers={"authorization": f"Bearer {credential}"}, body=body, address="127.0.0.1")
        began, cpu_began = time.perf_counter(), time.thread_time()
        answer = self._desk.serve(OPERATIONS[case.operation], incoming)
        took, cpu = time.perf_counter() - began, time.thread_time() - cpu_began
        assert answer.status == 200, answer.body
        return answer.body, took, cpu


def pages(counter: Counter, case: Case) -> list[Page]:
    """Walk through a list to its end; returns its first page, one in the middle and the last whole one."""
    cursors: list[str | None] = [None]
    sizes: list[int] = []
    while True:
        body = case.body if cursors[-1] is None else {**case.body, "cursor": cursors[-1]}
        answer = orjson.loads(counter.ask(case, orjson.dumps(body))[0])
        sizes.append(len(answer[case.items]) if case.items else 1)
        following = answer.get("next_cursor") if case.pages else None
        if following is None:
            break
        cursors.append(following)
    whole = [number for number, size in enumerate(sizes) if size == sizes[0]]
    places = {"first": 0, f"{whole[-1] // 2 + 1} of {len(sizes)}": whole[-1] // 2, "last whole": whole[-1]}
    if len(whole) < 3:
        places = {"first": 0} if len(whole) < 2 else {"first": 0, "last whole": whole[-1]}
    return [
        Page(
            case,
            place,
            orjson.dumps(case.body if number == 0 else {**case.body, "cursor": cursors[number]}),
            sizes[number],
        )
        for place, number in places.items()
    ]


def at_the_desk(counter: Counter, asked: Sequence[Page], requests: int) -> None:
    """Ask for every page in turn."""
    for number in range(-requests // 10, requests):
        for page in asked:
            _, took, cpu = counter.ask(page.case, page.body)
            if number >= 0:
                page.seconds.append(took)
                page.cpu.append(cpu)


async def over_http(host: str, port: int, people: Town, asked: Sequence[Page], requests: int) -> None:
    """The same through the gateway."""
    connection = await Connection.open(host, port)
    for number in range(-requests // 10, requests):
        for page in asked:
            key = people.key if page.case.credential == "key" else people.session
            operation = OPERATIONS[page.case.operation]
            reply = await connection.request(operation.method, operation.path, page.body, key)
            if reply.status != 200:
                raise RuntimeError(reply.complaint)
            if number >= 0:
                page.http.append(reply.e2e)
    connection.close()


def rows(asked: Sequence[Page], times: Callable[[Page], Sequence[float]], cpu: bool) -> list[results.Row]:
    """A table in milliseconds: how long every page took, and how its list's last compares with its first."""
    first: dict[str, float] = {}
    table: list[results.Row] = []
    for page in asked:
        p50 = results.percentile(times(page), 0.5)
        begin = first.setdefault(page.case.name, p50)
        row: dict[str, results.Cell] = {
            "list": page.case.name,
            "page": page.place if page.case.pages else "",
            "items": page.items,
            "p50 ms": 1000 * p50,
            "p99 ms": 1000 * results.percentile(times(page), 0.99),
        }
        if cpu:
            row["cpu p50 ms"] = 1000 * results.percentile(page.cpu, 0.5)
        table.append({**row, "of the first": p50 / begin})
    return table


def met(table: Sequence[results.Row]) -> bool:
    """Whether every list is as fast as it should be, to its last page."""
    fast = all(float(str(row["p50 ms"])) <= TARGET_P50_MS for row in table)
    return fast and all(float(str(row["of the first"])) <= TARGET_FLAT for row in table)


def open_town(data: Path, size: Size) -> tuple[Database, bytes, Town, float | None]:
    """Open the data folder of a gateway with a town in its database; builds it where there is none, and says how many
    seconds that took."""
    kept = data / "town.json"
    paths = Paths(data)
    database = Database(f"sqlite:///{data / 'headrace.db'}")
    if kept.exists():
        database.migrate()
        return database, paths.secret.read_bytes(), msgspec.json.decode(kept.read_bytes(), type=Town), None
    data.mkdir(parents=True, exist_ok=True)
    pepper = os.urandom(PEPPER_BYTES)
    write_private(paths.secret, pepper)
    began = time.perf_counter()
    people = town.build(database, pepper, size, time.time_ns() // 1000)
    write_private(kept, msgspec.json.encode(people))
    return database, pepper, people, time.perf_counter() - began


def checked(database: Database) -> dict[str, object]:
    """Audit the ledger; returns what it looked at and how long that took."""
    began = time.perf_counter()
    with database.read() as unit:
        report = audit(unit)
    if not report.clean:
        print("\n".join(report.lines()))
    return {
        "clean": report.clean,
        "checked": sum(result.checked for result in report.results),
        "seconds": round(time.perf_counter() - began, 1),
    }


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="headrace-management-") as made:
        yield Path(made) / "data"


def main(argv: Sequence[str] | None = None) -> int:
    """Build, measure, print the tables and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.management", description=__doc__)
    parser.add_argument("--people", type=int, default=10_000)
    parser.add_argument("--teams", type=int, default=500)
    parser.add_argument("--transactions", type=int, default=1_000_000, help="requests that were charged")
    parser.add_argument("--requests", type=int, default=200, help="how often each page is asked for")
    parser.add_argument("--quiet", type=float, default=0, help="wait at most this many seconds for a quiet machine")
    parser.add_argument("--town", type=Path, help="keep the database in this folder and use it again")
    options = parser.parse_args(argv)
    size = Size(options.people, options.teams, options.transactions)
    with _folder(options.town) as data:
        database, pepper, people, built = open_town(data, size)
        counter = Counter(database, pepper, people)
        asked = [page for case in CASES for page in pages(counter, case)]
        wait_until_quiet(options.quiet)
        settle_memory()
        meter = LoadMeter(None)
        at_the_desk(counter, asked, options.requests)
        load = meter.stop()
        house = House(data, MODEL, Script(tokens=1, reply=(1000,)))
        server, endpoint = house.start()
        with server:
            served = LoadMeter(server.pid)
            uvloop.run(over_http(endpoint.host, endpoint.port, people, asked, options.requests))
            http_load = served.stop()
        audited = checked(database)
        database.close()
    table = rows(asked, lambda page: page.seconds, cpu=True)
    http = rows(asked, lambda page: page.http, cpu=False)
    print(f"others used {100 * load.others_share:.0f} % and {100 * http_load.others_share:.0f} % of the machine")
    print(f"over HTTP\n{results.table(http)}\n\nthe API itself")
    done = {"api": met(table), "http": met(http), "audit": audited["clean"]}
    results.report(
        "management",
        table,
        {
            "size": size,
            "built_s": built,
            "targets": {"p50 ms": TARGET_P50_MS, "of the first": TARGET_FLAT, "met": done},
            "rows": table,
            "http": http,
            "load": {"api": load, "http": http_load},
            "audit": audited,
        },
    )
    return 0 if all(done.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
