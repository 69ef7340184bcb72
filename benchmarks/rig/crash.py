"""kill -9 under load: real processes, real clients, and what the clients saw against the books afterwards.

The gateway, its engine or both are killed at moments drawn from a seed while clients stream, hang up and come back;
whatever was killed is started again; at the end everything stops in order and the ledger has to agree with every
client.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.rig.books import Books, Seen, differences, read_books, seen
from benchmarks.rig.cases import WORDS, chat_body
from benchmarks.rig.headrace import READY_PATH, House
from benchmarks.rig.http import CHAT_PATH, Connection, Endpoint, Reply
from benchmarks.rig.machine import is_running
from benchmarks.rig.processes import status

Target = Literal["gateway", "engine", "both"]
TARGETS: tuple[Target, ...] = ("gateway", "engine", "both")

READY_LIMIT_S = 60.0
CLIENT_LIMIT_S = 60.0
NOTICE_LIMIT_S = 5.0
"""Within this time an engine ends with its gateway, and a gateway sees that its engine is gone."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run does. A seed fixes requests, targets and pauses; the moments within them are real."""

    kills: int
    clients: int = 12
    most_tokens: int = 80
    hang_up_share: float = 0.15
    """Share of the requests whose client leaves in the middle."""
    pause_s: tuple[float, float] = (0.1, 1.5)
    """Load before each kill, drawn evenly."""
    seed: int = 1

    def targets(self) -> list[Target]:
        """Return what is killed, each target about equally often."""
        order = [TARGETS[i % len(TARGETS)] for i in range(self.kills)]
        random.Random(f"targets {self.seed}").shuffle(order)
        return order


@dataclass(slots=True)
class Outcome:
    """What a run saw and found."""

    sightings: list[Seen] = field(default_factory=list)
    sent: int = 0
    killed: Counter[str] = field(default_factory=Counter)
    down_s: list[float] = field(default_factory=list)
    """From each kill until the gateway was ready again."""
    findings: list[str] = field(default_factory=list)
    """Every promise that was broken."""
    books: Books = field(default_factory=Books)

    def finished(self) -> int:
        """Return the number of clients that were told their answer is complete."""
        return sum(one.finished for one in self.sightings)


class Traffic:
    """Clients that stream without pause, some of which hang up, until they are told to stop."""

    def __init__(self, endpoint: Endpoint, plan: Plan, outcome: Outcome) -> None:
        self._endpoint = endpoint
        self._plan = plan
        self._outcome = outcome
        self.stop = asyncio.Event()

    async def run(self) -> None:
        """Run every client until `stop` is set and the last answers have ended."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._plan.clients):
                group.create_task(self._client(random.Random(f"client {self._plan.seed}/{number}")))

    async def _client(self, draw: random.Random) -> None:
        while not self.stop.is_set():
            try:
                connection = await Connection.open(self._endpoint.host, self._endpoint.port)
            except OSError:
                await asyncio.sleep(0.05)  # nobody listens: ask again soon, not at once
                continue
            self._outcome.sent += 1
            try:
                async with asyncio.timeout(CLIENT_LIMIT_S):
                    reply = await self._ask(connection, draw)
            except TimeoutError:
                self._outcome.findings.append(f"a client had no end of its answer within {CLIENT_LIMIT_S:.0f} s")
                continue
            finally:
                connection.close()
            self._outcome.sightings.append(seen(reply))
            if reply.status != 200:
                await asyncio.sleep(0.05)

    async def _ask(self, connection: Connection, draw: random.Random) -> Reply:
        """Send one request; some clients leave after a few events, some after a moment whatever has come."""
        prompt = " ".join(draw.choices(WORDS, k=draw.randint(4, 40)))
        body = chat_body(self._endpoint.model, prompt, draw.randint(1, self._plan.most_tokens))
        leaves = draw.random() < self._plan.hang_up_share
        leave_after = draw.randint(0, 6) if leaves else None

        def watch(connection: Connection, reply: Reply) -> None:
            if leave_after is not None and reply.status == 200 and len(reply.contents) >= leave_after:
                connection.close("left in the middle")

        if draw.random() < self._plan.hang_up_share / 3:
            asyncio.get_running_loop().call_later(draw.uniform(0, 0.1), connection.close, "left early")
        return await connection.request("POST", CHAT_PATH, body, self._endpoint.key, watch)


class Victim:
    """A gateway with its engine, started anew whenever it was killed."""

    def __init__(self, house: House, outcome: Outcome) -> None:
        self._house = house
        self._outcome = outcome
        self.server = house.spawn()

    async def ready(self) -> None:
        """Wait until requests are answered."""
        await self.server.ready(self._house.endpoint(), READY_PATH, READY_LIMIT_S)

    def engines(self) -> list[int]:
        """Return the engine processes of this gateway."""
        return [pid for pid in self.server.descendants() if b"engine." in _command_line(pid)]

    async def kill(self, target: Target) -> None:
        """Kill the target, start again what does not start by itself, and return when the gateway is ready."""
        engines, struck = self.engines(), time.perf_counter()
        self._outcome.killed[target] += 1
        if target != "gateway":
            for pid in engines:
                _strike(pid)
        if target == "engine":
            await self._wait_until_noticed()
        else:
            self.server.kill()
            await self._wait_for_orphans(engines)
            self.server = self._house.spawn()
        await self.ready()
        self._outcome.down_s.append(time.perf_counter() - struck)

    async def _wait_until_noticed(self) -> None:
        """A gateway whose engine is dead has to say so on its readiness page."""
        until = time.monotonic() + NOTICE_LIMIT_S
        while await status(self._house.endpoint(), READY_PATH) == 200:
            if time.monotonic() > until:
                self._outcome.findings.append("the gateway called itself ready with its engine dead")
                return
            await asyncio.sleep(0.005)

    async def _wait_for_orphans(self, engines: Sequence[int]) -> None:
        """An engine ends with its gateway."""
        until = time.monotonic() + NOTICE_LIMIT_S
        while alive := [pid for pid in engines if is_running(pid)]:
            if time.monotonic() > until:
                self._outcome.findings.append(f"engine process {alive} outlived its gateway")
                for pid in alive:
                    _strike(pid)
                return
            await asyncio.sleep(0.01)


async def run(plan: Plan, house: House, say: Callable[[str], None]) -> Outcome:
    """Kill and restart by the plan, stop in order, compare the clients with the books and audit the books."""
    outcome = Outcome()
    draw = random.Random(f"pauses {plan.seed}")
    victim = Victim(house, outcome)
    try:
        await victim.ready()
        traffic = Traffic(house.endpoint(), plan, outcome)
        clients = asyncio.create_task(traffic.run())
        for number, target in enumerate(plan.targets(), 1):
            await asyncio.sleep(draw.uniform(*plan.pause_s))
            await victim.kill(target)
            say(f"kill {number}/{plan.kills}: {target}, ready again after {outcome.down_s[-1]:.2f} s")
        await asyncio.sleep(plan.pause_s[1])
        traffic.stop.set()
        await clients
    finally:
        code = await asyncio.to_thread(victim.server.stop, 30.0)
    if code != 0:
        outcome.findings.append(f"the gateway ended with {code} instead of 0\n{victim.server.tail()}")
    outcome.books = read_books(house.database)
    outcome.findings += differences(outcome.sightings, outcome.books, outcome.sent)
    audited, said = await asyncio.to_thread(house.audit)
    if audited != 0:
        outcome.findings.append(f"headrace audit ended with {audited}:\n{said}")
    return outcome


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _strike(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
