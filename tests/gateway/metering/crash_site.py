"""A process to be killed: forks one victim per command line on stdin, says its pid, and how it ended.

Run as `python crash_site.py NEWS`. A victim is forked from this clean, single-threaded process, so that each costs
milliseconds instead of an interpreter's start. What a victim was told is durable it appends to the file `told` in its
folder with one write each: that file survives it, as a client's memory would. Then a byte goes into NEWS, the
descriptor of a pipe that does not block: whoever waits for more looks into the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy.exc
import sqlalchemy.pool  # noqa: F401

from engine.wire import Counters, UsageReply
from gateway.metering import failpoints
from gateway.metering.journal import Journal, JournalUnavailableError
from gateway.metering.metering import Metering
from marketplace.ledger.money import Price
from marketplace.ledger.records import Checkpoint
from marketplace.store.db import Database

Spec = dict[str, Any]
PRICE = Price(10**9, 10**8, 4 * 10**9)


class NoEngines:
    """Engines that died with their gateway."""

    async def usage(self, model: str, request_ids: Any) -> UsageReply | None:
        return UsageReply(0, "another-process", {})

    async def abort(self, model: str, request_id: str) -> None:
        return None


def wall() -> int:
    return time.time_ns() // 1000


def monotonic() -> int:
    return time.monotonic_ns() // 1000


def say(folder: Path) -> Callable[[str], None]:
    """Returns what appends a line to the folder's `told`, unbuffered, and lets it be known."""
    descriptor = os.open(folder / "told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    news = int(sys.argv[1])

    def tell(line: str) -> None:
        os.write(descriptor, f"{line}\n".encode())
        with contextlib.suppress(BlockingIOError):  # full: there is enough to wake up whoever waits
            os.write(news, b".")

    return tell


def arm(spec: Spec) -> None:
    """Die at the spec's failpoint when it is reached for the n-th time."""
    left = spec.get("hit", 1)

    def die() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os._exit(77)

    if spec.get("failpoint"):
        failpoints.arm(spec["failpoint"], die)


async def journal_victim(spec: Spec) -> None:
    """Append as fast as it goes, in bursts, and say each record whose future resolved."""
    folder = Path(spec["folder"])
    tell = say(folder)
    journal = Journal.open(folder / "journal.sqlite")
    if "max_bytes" in spec:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (spec["max_bytes"], resource.RLIM_INFINITY))
    journal.start(asyncio.get_running_loop())
    burst = 0
    while True:
        burst += 1
        waiting = []
        for _ in range(burst % 7 + 1):
            seq = journal.next_seq
            try:
                future = journal.append(Checkpoint(seq, f"r{seq}" * 20, seq, 0, seq, 1))
            except JournalUnavailableError:
                tell("refused")
                os._exit(0)
            future.add_done_callback(lambda done, seq=seq: tell(f"{seq}") if done.exception() is None else tell("lost"))
            waiting.append(future)
        await asyncio.wait(waiting)
        if burst % 50 == 0:
            journal.mark_applied(spec.get("applied", 0))


async def gateway_victim(spec: Spec) -> None:
    """Meter concurrent requests of one account until killed, or until spec["requests"] are done; then close."""
    folder = Path(spec["folder"])
    tell = say(folder)
    database = Database(f"sqlite:///{folder / 'headrace.sqlite'}")
    arm(spec)
    metering = await Metering.start(folder / "journal.sqlite", database, clock=wall, monotonic=monotonic)
    await metering.recover(NoEngines())
    numbers = iter(range(spec["requests"]))

    async def client() -> None:
        for number in numbers:
            name = f"{spec['run']}-{number}"
            charge = await metering.meter.open(
                request_id=name,
                account_id="customer",
                key_id="key",
                model="tiny",
                price_id="price-1",
                price=PRICE,
                prompt_tokens=10,
                max_completion=3000,
            )
            await charge.durable
            tell(f"held {name}")
            done = 0
            for _ in range(number % 4):
                done += 350
                charge.progress(Counters(10, 2, done, True))
                await asyncio.sleep(0)
            settlement = await charge.settle("finished", Counters(10, 2, done + 5, True), engine_epoch="engine")
            assert settlement is not None
            tell(f"settled {name} {settlement.cost}")

    await asyncio.gather(*(client() for _ in range(spec.get("clients", 8))))
    assert await metering.close()
    tell("closed")
    database.close()


VICTIMS = {"journal": journal_victim, "gateway": gateway_victim}


def main() -> None:
    """Fork a victim per line."""
    for line in sys.stdin:
        spec = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                asyncio.run(VICTIMS[spec["victim"]](spec))
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
