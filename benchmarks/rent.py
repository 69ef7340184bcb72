"""How long a rental takes, alone and among many: placement, claims, price and desired state in one transaction.

    python -m benchmarks.rent [--seconds 6] [--nodes 16]

Clients are processes of their own, each with the management API in it, on one database: SQLite, and PostgreSQL where
its binaries are. Each rents a machine with one GPU (authentication, validation and JSON included) and gives it back;
the rentals are timed, the rest is not. The machines are `--nodes` nodes with 8 GPUs and 128 threads each. At the end
no slice of a GPU may have two owners, and the audit must find nothing.

Exit status 1 when the p50 of one client is above the target, or anything was claimed twice.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from queue import Queue
from typing import Any

import orjson
from sqlalchemy import select

from benchmarks.ledger import postgres
from benchmarks.rig import results
from marketplace.accounts import service as accounts
from marketplace.agent.inventory_wire import Cpu, Disk, Gpu, Inventory, NumaNode, Thread
from marketplace.agent.wire import Capabilities, Register
from marketplace.catalog import service as catalog
from marketplace.catalog.service import InstanceType, Variant
from marketplace.events.transitions import SYSTEM, Scene
from marketplace.http.dispatch import Desk, Incoming
from marketplace.http.limits import Buckets
from marketplace.http.operation import Context
from marketplace.instances import life
from marketplace.instances.operations import OPERATIONS
from marketplace.instances.tables import instance
from marketplace.keys import service as keys
from marketplace.ledger.audit import audit
from marketplace.ledger.money import NANO
from marketplace.nodes import talk
from marketplace.nodes.tables import node
from marketplace.providers import service as providers
from marketplace.store.db import Database
from marketplace.store.vault import Vault
from marketplace.users import service as users

TARGETS_MS = {"sqlite": 5.0, "postgresql": 25.0}
CLIENTS = (1, 2, 8)
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
        ip=f"10.0.0.{number + 1}",
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


def client(url: str, key: str, seconds: float, begin: Any, told: Any) -> None:
    """Rent and give back until the time is up; tells how long each rental took, and how many were refused."""
    database = Database(url)
    desk_of = Context(
        database=database, pepper=PEPPER, vault=Vault(PEPPER), clock=now, random=os.urandom, limits=Buckets()
    )
    took: list[float] = []
    refused = 0
    begin.wait()
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        desk = Desk(Context(**{**_fields(desk_of), "limits": Buckets()}))  # how often one may rent is not measured here
        started = time.perf_counter()
        answer = desk.serve(RENT, Incoming(headers={"authorization": f"Bearer {key}"}, body=BODY))
        elapsed = time.perf_counter() - started
        if answer.status != 201:
            refused += 1
            continue
        took.append(elapsed)
        (instance_id,) = orjson.loads(answer.body)["instance_ids"]
        give_back(database, instance_id)
    told.put((took, refused))
    database.close()


def _fields(context: Context) -> dict[str, Any]:
    return {name: getattr(context, name) for name in context.__dataclass_fields__}


def give_back(database: Database, instance_id: str) -> None:
    """End an instance whose node never saw it."""

    def work(unit: Any) -> None:
        scene = Scene(SYSTEM, now(), os.urandom)
        place = {instance_id: unit.select(_PLACE.where(_INSTANCE.c.id == instance_id)).scalar_one()}
        (row,) = life.lock(unit, place)
        life.end(unit, row, "terminate", scene)
        (row,) = life.lock(unit, place)
        life.finish(unit, row, scene)

    database.transact(work)


_INSTANCE = instance
_PLACE = select(_INSTANCE.c.node_id)


def measure(url: str, key: str, clients: int, seconds: float) -> dict[str, Any]:
    """Let so many clients rent at once."""
    spawn = multiprocessing.get_context("spawn")
    begin, told = spawn.Barrier(clients), spawn.Queue()
    running = [spawn.Process(target=client, args=(url, key, seconds, begin, told)) for _ in range(clients)]
    for process in running:
        process.start()
    answers = [_next(told) for _ in running]
    for process in running:
        process.join()
    took = sorted(one * 1000 for part, _ in answers for one in part)
    return {
        "clients": clients,
        "rents": len(took),
        "rents/s": round(len(took) / seconds, 1),
        "p50 ms": round(results.percentile(took, 0.5), 2),
        "p99 ms": round(results.percentile(took, 0.99), 2),
        "refused": sum(refused for _, refused in answers),
    }


def _next(told: Queue[tuple[list[float], int]]) -> tuple[list[float], int]:
    return told.get(timeout=300)


def bench(url: str, seconds: float, nodes: int) -> tuple[list[dict[str, Any]], bool]:
    """Measure one database; returns a row for every number of clients, and whether all is well."""
    database = Database(url)
    database.migrate()
    key = furnish(database, nodes)
    rows = [{"database": database.dialect, **measure(url, key, clients, seconds)} for clients in CLIENTS]
    with database.read() as unit:
        report = audit(unit)
    database.close()
    if not report.clean:
        print("\n".join(line for line in report.lines() if "ok" not in line))
    fast = rows[0]["p50 ms"] <= TARGETS_MS[database.dialect]
    return rows, report.clean and fast


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--nodes", type=int, default=16)
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    well = True
    with tempfile.TemporaryDirectory() as folder, postgres() as server:
        for url in (f"sqlite:///{Path(folder) / 'rent.db'}", server):
            if url is not None:
                found, fine = bench(url, chosen.seconds, chosen.nodes)
                rows, well = rows + found, well and fine
        results.report("rent", rows, {"rows": rows, "nodes": chosen.nodes, "seconds": chosen.seconds})
    return 0 if well else 1


if __name__ == "__main__":
    raise SystemExit(main())
