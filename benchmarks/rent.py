"""How long a rental takes, alone and among many: authentication, validation, placement, claims, price, desired state
and JSON, all of it but the socket.

    python -m benchmarks.rent [--rents 160] [--rate 3] [--seconds 6]

Clients rent machines with one GPU from servers: processes of their own, each with the management API in it and as many
threads as it has clients, on one database: SQLite, and PostgreSQL where its binaries are. The machines are on as many
nodes with 8 GPUs and 128 threads as all clients of all rows need, none is given back, and nodes that are full stay in
the way. In a row without a pace every client asks again as soon as it is answered, and together they make `--rents`
rentals. With a pace each begins that many a second on average, at random times and whether it is answered or not; one
that had to wait for the one before is counted from when it should have begun. The limits of callers, which admit one a
second, are switched off.

"cpu ms" is the processor time of the servers for each rental, without that of PostgreSQL's own processes.

How long somebody who rents waits is shown by clients with a pace; the target is about 8 of them. Clients that never
pause show what the machine can do when it does nothing else: there the time of one is their number divided by what all
of them do in a second. Several servers at once show that nothing is claimed twice, whoever is faster.

After each row no slice of a GPU, no thread and no port may have two owners, and at the end the audit must find nothing.
Exit status 1 when there is any of that, when anything was refused, or when the target is missed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

import orjson
from sqlalchemy import func, select

from benchmarks.ledger import postgres
from benchmarks.rig import results
from marketplace.accounts import service as accounts
from marketplace.agent.inventory_wire import Cpu, Disk, Gpu, Inventory, NumaNode, Thread
from marketplace.agent.wire import Capabilities, Register
from marketplace.catalog import service as catalog
from marketplace.catalog.service import InstanceType, Variant
from marketplace.events.transitions import SYSTEM, Scene
from marketplace.http.dispatch import Desk, Incoming
from marketplace.http.limits import Buckets, Rate, Verdict
from marketplace.http.operation import Context
from marketplace.instances.operations import OPERATIONS
from marketplace.keys import service as keys
from marketplace.ledger.audit import audit
from marketplace.ledger.money import NANO
from marketplace.networks.tables import port_lease
from marketplace.nodes import talk
from marketplace.nodes.tables import node
from marketplace.placement.tables import cpu_claim, gpu_slice_claim
from marketplace.providers import service as providers
from marketplace.store.db import Database, ReadUnit
from marketplace.store.vault import Vault
from marketplace.users import service as users

TARGETS_MS = {"sqlite": 5.0, "postgresql": 25.0}
CLIENTS = 8
SWITCH_S = 0.0005
"""How long a thread may keep the interpreter while others wait, as where the gateway serves."""
GIB = 1 << 30
PEPPER = b"p" * 32
RENT = next(row for row in OPERATIONS if row.name == "instances.rent")
BODY = orjson.dumps(
    {
        "selector": {"ByInstanceTypeAndLocation": {"instance_type": "bench.1"}},
        "config": {"VirtualMachine": {"image_url": "https://images.example/ubuntu.qcow2", "ports": ["8000"]}},
    }
)


def now() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1000


def inventory(number: int) -> Inventory:
    """A machine with 8 GPUs and 64 cores on two sockets."""
    return Inventory(
        hostname=f"bench{number}",
        ip=f"10.0.{number // 256}.{number % 256}",
        cpu=Cpu(
            brand="bench",
            architecture="x86_64",
            threads=[Thread(core + half * 64, core, 0, core // 32) for core in range(64) for half in (0, 1)],
        ),
        memory_bytes=1024 * GIB,
        numa=[NumaNode(node=0, memory_bytes=512 * GIB), NumaNode(node=1, memory_bytes=512 * GIB)],
        gpus=[
            Gpu(pci_slot=f"0000:{slot:02x}:00.0", vendor_id=0x10DE, device_id=1, numa=slot // 4, vram_bytes=80 * GIB)
            for slot in range(8)
        ],
        disk=Disk(path="/data", total_bytes=1 << 43, free_bytes=1 << 43),
    )


def furnish(database: Database, nodes: int) -> str:
    """Make a provider, its nodes, a variant and a customer; returns the customer's key."""
    with database.write() as unit:
        owner = providers.create(unit, name="bench", now=now(), random=os.urandom)
        catalog.add_type(unit, InstanceType(name="bench", brand_short="B", cost_per_hour=NANO), now())
        shape = Variant(
            name="bench.1",
            type_name="bench",
            gpu_count=1,
            vcpu=4,
            dram=32 * GIB,
            disk=100 * GIB,
            cost_per_hour=NANO,
        )
        catalog.add_variant(unit, shape, now())
        user = users.create(
            unit, email="b@example.com", role="user", password_hash=None, now=now(), random=os.urandom, verified=True
        )
        accounts.top_up(unit, user.account_id, 10**6 * NANO, key="bench", now=now(), random=os.urandom)
        _, secret = keys.create(
            unit,
            kind="user",
            owner_id=user.id,
            account_id=user.account_id,
            name="bench",
            pepper=PEPPER,
            now=now(),
            random=os.urandom,
        )
        for number in range(nodes):
            asked = Register(
                machine_id=f"m{number}",
                boot_id="b",
                agent_version="0",
                inventory=inventory(number),
                capabilities=Capabilities(vm=True, container=True),
            )
            talk.register(unit, Vault(PEPPER), owner.id, asked, Scene(SYSTEM, now(), os.urandom))
        unit.execute(node.update().values(instance_type="bench", last_seen=now() + 10**12))
    return secret.text


class Unlimited(Buckets):
    """How often one may rent is not measured here."""

    def take(self, name: str, rate: Rate, now: int) -> Verdict:
        """Admit everything."""
        return Verdict(True, rate.burst, rate.burst, 0, 0)


class Load(NamedTuple):
    """What one client does: so many rentals without a pause, or for so long at a pace."""

    rents: int
    rate: float
    seconds: float

    def dues(self, seed: int) -> Iterator[float | None]:
        """When each rental is due, in seconds from the beginning; None is at once."""
        if not self.rate:
            yield from [None] * self.rents
            return
        numbers, due = random.Random(seed), 0.0
        while (due := due + numbers.expovariate(self.rate)) < self.seconds:
            yield due


class Row(NamedTuple):
    """A row of the table."""

    servers: int
    clients: int
    load: Load


class Told(NamedTuple):
    """What a server tells at its end, in seconds."""

    took: list[float]
    refused: int
    seconds: float
    busy: float


def serve(url: str, key: str, load: Load, seeds: Sequence[int], begin: Any, told: Any) -> None:
    """Be a server, and its clients; tells how long each rental took, how many were refused, how long all took, and how
    much of that its processor was busy."""
    sys.setswitchinterval(SWITCH_S)
    database = Database(url)
    limits = Unlimited()
    desk = Desk(
        Context(database=database, pepper=PEPPER, vault=Vault(PEPPER), clock=now, random=os.urandom, limits=limits)
    )
    asked = Incoming(headers={"authorization": f"Bearer {key}"}, body=BODY)
    desk.serve(RENT, asked)  # what a server does once is not timed
    took: list[float] = []
    refused: list[int] = []
    begin.wait()
    began, busy = time.perf_counter(), time.process_time()

    def client(seed: int) -> None:
        for due in load.dues(seed):
            late = due is not None and time.perf_counter() > began + due
            if due is not None and not late:
                time.sleep(max(0.0, began + due - time.perf_counter()))
            started = began + due if late and due is not None else time.perf_counter()
            status = desk.serve(RENT, asked).status
            took.append(time.perf_counter() - started)
            if status != 201:
                refused.append(status)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told.put(Told(took, len(refused), time.perf_counter() - began, time.process_time() - busy))
    database.close()


def measure(url: str, key: str, row: Row) -> dict[str, Any]:
    """Let clients rent at once."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["marketplace.operations"])  # what it imports takes longer than a row
    begin, told = forks.Barrier(row.servers), forks.Queue()
    running = [
        forks.Process(target=serve, args=(url, key, row.load, range(first, row.clients, row.servers), begin, told))
        for first in range(row.servers)
    ]
    for process in running:
        process.start()
    answers = [_next(told) for _ in running]
    for process in running:
        process.join()
    took = sorted(one * 1000 for answer in answers for one in answer.took)
    return {
        "servers": row.servers,
        "clients": row.clients,
        "pace /s": row.load.rate,
        "rents": len(took),
        "rents/s": round(len(took) / max(answer.seconds for answer in answers), 1),
        "p50 ms": round(results.percentile(took, 0.5), 2),
        "p99 ms": round(results.percentile(took, 0.99), 2),
        "cpu ms": round(sum(answer.busy for answer in answers) * 1000 / len(took), 2),
        "refused": sum(answer.refused for answer in answers),
    }


def _next(told: Queue[Told]) -> Told:
    return told.get(timeout=300)


_TWICE = (
    (gpu_slice_claim, gpu_slice_claim.c.gpu_id, gpu_slice_claim.c.slice),
    (cpu_claim, cpu_claim.c.node_id, cpu_claim.c.thread),
    (port_lease, port_lease.c.gateway_ip, port_lease.c.host_port),
)


def double_claims(unit: ReadUnit) -> int:
    """How many things have two owners."""
    found = 0
    for table, place, number in _TWICE:
        live = select(place).where(table.c.released_at.is_(None)).group_by(place, number).having(func.count() > 1)
        found += len(unit.select(live).all())
    return found


def bench(url: str, asked: Sequence[Row]) -> tuple[list[dict[str, Any]], bool]:
    """Measure one database; returns a row of the table for each that was asked for, and whether all is well."""
    database = Database(url)
    database.migrate()
    wanted = sum(
        row.servers + max(row.load.rents, round(2 * row.load.rate * row.load.seconds)) * row.clients for row in asked
    )
    key = furnish(database, -(-wanted // 8))
    rows = []
    for row in asked:
        found = {"database": database.dialect, **measure(url, key, row)}
        with database.read() as unit:
            found["double claims"] = double_claims(unit)
        rows.append(found)
    with database.read() as unit:
        report = audit(unit)
    database.close()
    if not report.clean:
        print("\n".join(line for line in report.lines() if "ok" not in line))
    paced = [row["p50 ms"] for row in rows if row["pace /s"]]
    fast = max(paced) <= TARGETS_MS[database.dialect]
    return rows, report.clean and fast and not any(row["double claims"] or row["refused"] for row in rows)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rents", type=int, default=160)
    parser.add_argument("--rate", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=6.0)
    chosen = parser.parse_args()
    asked = [
        Row(1, 1, Load(chosen.rents, 0, 0)),
        Row(1, CLIENTS, Load(0, chosen.rate, chosen.seconds)),
        Row(1, CLIENTS, Load(chosen.rents // CLIENTS, 0, 0)),
        Row(CLIENTS, CLIENTS, Load(chosen.rents // CLIENTS, 0, 0)),
    ]
    rows: list[dict[str, Any]] = []
    well = True
    with tempfile.TemporaryDirectory() as folder, postgres() as server:
        for url in (f"sqlite:///{Path(folder) / 'rent.db'}", server):
            if url is not None:
                found, fine = bench(url, asked)
                rows, well = rows + found, well and fine
        results.report("rent", rows, {"rows": rows, "targets_ms": TARGETS_MS, "well": well})
    return 0 if well else 1


if __name__ == "__main__":
    raise SystemExit(main())
