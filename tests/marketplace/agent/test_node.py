"""The agent's conversation with a scripted server: sessions, reports, commands, silence."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from marketplace.agent.client import ServerClient
from marketplace.agent.credentials import Credentials
from marketplace.agent.disks import RetainedDisks
from marketplace.agent.drivers.base import DriverError
from marketplace.agent.drivers.fake import FakeDriver, Hypervisor
from marketplace.agent.inventory_wire import Cpu, Disk, Inventory
from marketplace.agent.keeper import Keeper
from marketplace.agent.leases import LeaseBook
from marketplace.agent.node import Agent, Surroundings
from marketplace.agent.reconcile import SECOND
from marketplace.agent.records import Records
from marketplace.agent.wire import (
    Accepted,
    Command,
    Desired,
    DesiredImage,
    DesiredInstance,
    Poll,
    Polled,
    Ready,
    Register,
    Registered,
    VmSpec,
)

INVENTORY = Inventory(
    hostname="h",
    cpu=Cpu(brand="", architecture="x86_64", threads=[]),
    memory_bytes=1,
    numa=[],
    disk=Disk(path="/", total_bytes=1, free_bytes=1),
)
SPEC = VmSpec(name="m", vcpu=1, dram_bytes=1, disk_bytes=1, readiness_token="token-a")


class Server:
    """Answers nodes as the real one does, from a desired state that the test changes."""

    def __init__(self) -> None:
        self.desired = Desired()
        self.rev = 1
        self.epoch = 0
        self.down = False
        self.stale = False
        self.ready_status = 200
        self.commands: list[Command] = []
        self.registered: list[Register] = []
        self.polls: list[Poll] = []
        self.readies: list[Ready] = []
        self.left = 0
        self.want_observed = False
        self.unknown: list[str] = []
        self.changed = asyncio.Event()
        self.news = asyncio.Event()
        """set whenever the node says something, or did something"""

    def want(self, *instances: DesiredInstance) -> None:
        self.desired, self.rev = Desired(instances=list(instances)), self.rev + 1
        self.changed.set()

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.news.set()
        if self.down:
            raise httpx2.ConnectError("down")
        content, name = request.content, request.url.path.rpartition("/")[2]
        if name == "register":
            self.registered.append(msgspec.json.decode(content, type=Register))
            self.epoch += 1
            self.stale = False
            session = Registered(
                node_id="n",
                session_id=f"s{self.epoch}",
                epoch=self.epoch,
                desired=self.desired,
                desired_rev=self.rev,
            )
            return httpx2.Response(200, content=msgspec.json.encode(session))
        if name == "poll":
            return await self.poll(msgspec.json.decode(content, type=Poll))
        if name == "ready":
            self.readies.append(msgspec.json.decode(content, type=Ready))
            return httpx2.Response(self.ready_status, content=msgspec.json.encode(Accepted()))
        self.left += name == "shutdown"
        return httpx2.Response(200, content=msgspec.json.encode(Accepted()))

    async def poll(self, told: Poll) -> httpx2.Response:
        self.polls.append(told)
        self.news.set()
        done = {result.id for result in told.command_results}
        self.commands = [command for command in self.commands if command.id not in done]
        while True:
            if self.stale or told.epoch != self.epoch:
                body = {"error": {"code": "StaleSession", "message": "register again"}}
                return httpx2.Response(409, content=msgspec.json.encode(body))
            unknown, self.unknown = self.unknown, []
            want, self.want_observed = self.want_observed, False
            fresh = told.applied_rev != self.rev
            sent = [one for one in self.commands if one.id not in told.commands]
            if fresh or sent or unknown or want:
                desired = self.desired if fresh else None
                answer = Polled(
                    desired_rev=self.rev,
                    desired=desired,
                    commands=sent,
                    unknown=unknown,
                    want_observed=want,
                )
                return httpx2.Response(200, content=msgspec.json.encode(answer))
            self.changed.clear()
            await self.changed.wait()

    def phase(self, id: str) -> str | None:
        """What was told last of an instance."""
        for told in reversed(self.polls):
            if told.observed is not None:
                return next((one.phase for one in told.observed.instances if one.id == id), None)
        return None


class Bench:
    """An agent, its hypervisor, its server and its clock."""

    def __init__(self, folder: Path) -> None:
        self.server, self.hypervisor, self.now = Server(), Hypervisor(), 1_000 * SECOND
        drivers: Any = {"VirtualMachine": FakeDriver(self.hypervisor)}
        self.keeper = Keeper(
            records=Records(folder / "instances", durable=False),
            disks=RetainedDisks(folder / "retained"),
            drivers=drivers,
            now=lambda: self.now,
            changed=self.poke,
        )
        around = Surroundings(
            machine_id="m",
            boot_id="b",
            inventory=lambda: INVENTORY,
            drivers=drivers,
            now=lambda: self.now,
            keep_images=self.keep_images,
        )
        self.images: list[list[DesiredImage]] = []
        self.slow: asyncio.Event | None = None
        """what fetching images waits for"""
        transport = httpx2.MockTransport(self.server)
        client = ServerClient("http://server", Credentials(api_key="k"), transport=transport)
        self.agent = Agent(client, self.keeper, LeaseBook(), around)

    async def keep_images(self, images: list[DesiredImage]) -> list[str]:
        self.images.append(images)
        self.server.news.set()
        if self.slow is not None:
            await self.slow.wait()
        return [f"{one.url}: gone" for one in images if "gone" in one.url]

    def poke(self) -> None:
        self.server.news.set()
        self.agent.poke()

    async def until(self, true: Callable[[], Any], within_s: float = 10) -> None:
        news = self.server.news
        async with asyncio.timeout(within_s):
            while not true():
                news.clear()
                await news.wait()
                await asyncio.sleep(0)  # whoever made them goes on to where it waits


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Bench]:
    bench = Bench(folder)
    task = asyncio.create_task(bench.agent.run())
    try:
        await bench.until(lambda: bench.server.polls)
        yield bench
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops that look by themselves look often."""
    monkeypatch.setattr("marketplace.agent.node.LOOK_S", 0.01)
    monkeypatch.setattr("marketplace.agent.node.ROUND_S", 0.05)
    monkeypatch.setattr("marketplace.agent.node._RETRY_S", (0.01,))


def wish(id: str = "a", want: Any = "Running", gen: int = 1) -> DesiredInstance:
    return DesiredInstance(id=id, want=want, gen=gen, spec=SPEC)


def test_what_the_server_wants_is_made_told_and_ended(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as bench:
            bench.server.want(wish())
            await bench.until(lambda: bench.server.phase("a") == "Running")
            bench.hypervisor.machines["a"].ready = True
            await bench.until(lambda: bench.server.readies)
            assert bench.server.readies[0] == Ready(instance_id="a", token="token-a", via="ssh")
            bench.server.want(wish(want="Absent", gen=2))
            await bench.until(lambda: bench.server.phase("a") == "Absent")
            bench.server.want()
            await bench.until(lambda: bench.server.phase("a") is None)
        assert bench.server.left == 1
        assert len(bench.server.registered) == 1

    asyncio.run(run())


def test_readiness_is_told_until_the_server_takes_it_and_then_never_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as bench:
            bench.server.ready_status = 503
            bench.server.want(wish())
            await bench.until(lambda: "a" in bench.hypervisor.machines)
            bench.hypervisor.machines["a"].ready = True
            await bench.until(lambda: len(bench.server.readies) >= 2)
            bench.server.ready_status = 200
            await bench.until(lambda: (record := bench.keeper.records.get("a")) and record.ready_told)
            count = len(bench.server.readies)
            bench.server.want(wish(want="Paused", gen=2))
            await bench.until(lambda: bench.hypervisor.machines["a"].power == "Paused")
            assert len(bench.server.readies) == count

    asyncio.run(run())


def test_a_stale_session_is_begun_anew_with_all_that_is_there(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as bench:
            bench.server.want(wish())
            await bench.until(lambda: bench.server.phase("a") == "Running")
            bench.server.stale = True
            bench.server.changed.set()
            await bench.until(lambda: len(bench.server.registered) == 2)
            observed = bench.server.registered[1].observed
            assert observed is not None
            assert [one.id for one in observed.instances] == ["a"]
            await bench.until(lambda: bench.server.polls[-1].epoch == 2 and bench.server.polls[-1].observed is not None)
            assert bench.hypervisor.done == [("create", "a")]

    asyncio.run(run())


def test_a_server_that_is_gone_changes_nothing_and_nothing_new_begins(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as bench:
            bench.server.want(wish())
            await bench.until(lambda: bench.server.phase("a") == "Running")
            bench.server.down = True
            bench.server.stale = True
            bench.server.changed.set()
            bench.now += 61 * SECOND
            await bench.until(lambda: not bench.keeper.connected)
            assert bench.hypervisor.machines["a"].power == "Running"
            bench.server.desired = Desired(instances=[wish(), wish("b")])
            bench.server.rev += 1
            bench.server.down = False
            await bench.until(lambda: "b" in bench.hypervisor.machines)
            assert bench.keeper.connected

    asyncio.run(run())


def test_a_failed_listing_is_reported_as_not_known(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as bench:
            bench.server.want(wish())
            await bench.until(lambda: bench.server.phase("a") == "Running")
            bench.hypervisor.listing_fails = True
            await bench.until(lambda: bench.server.polls[-1].observed_digest == "")
            assert bench.server.polls[-1].observed is None
            bench.hypervisor.listing_fails = False
            await bench.until(lambda: bench.server.polls[-1].observed_digest)

    asyncio.run(run())


def test_a_report_is_sent_in_full_only_when_it_is_new_or_asked_for(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as bench:
            await bench.until(lambda: bench.server.polls[-1].observed is not None)
            bench.server.commands.append(Command(id="c1", kind="self_test"))
            bench.server.changed.set()
            await bench.until(lambda: bench.server.polls[-1].command_results)
            told = bench.server.polls[-1]
            assert (told.observed, bool(told.observed_digest), told.inventory) == (None, True, None)
            bench.server.want_observed = True
            bench.server.changed.set()
            await bench.until(lambda: bench.server.polls[-1].observed is not None)

    asyncio.run(run())


def test_a_command_is_obeyed_once_and_its_result_repeated_until_it_is_heard(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as bench:
            bench.server.want(wish())
            await bench.until(lambda: bench.server.phase("a") == "Running")
            bench.server.commands = [
                Command(id="c1", kind="collect_logs", args={"instance_id": "a"}),
                Command(id="c2", kind="collect_logs", args={"instance_id": "nobody"}),
            ]
            bench.server.changed.set()
            await bench.until(lambda: not bench.server.commands)
            results = {one.id: one for told in bench.server.polls for one in told.command_results}
            assert (results["c1"].ok, results["c1"].output) == (True, "create")
            assert (results["c2"].ok, "no machine nobody" in results["c2"].output) == (False, True)

    asyncio.run(run())


def test_an_engine_that_does_not_answer_is_no_end_of_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def silent(driver: FakeDriver, id: str, *args: object) -> Any:
        asked.append(id)
        raise DriverError("PlatformError", "The node's container engine does not answer.")

    monkeypatch.setattr("marketplace.agent.node.METRICS_S", 0.01)
    monkeypatch.setattr(FakeDriver, "metrics", silent)
    monkeypatch.setattr(FakeDriver, "tail_log", silent)

    async def run() -> None:
        async with running(tmp_path) as bench:
            bench.server.want(wish())
            await bench.until(lambda: bench.server.phase("a") == "Running" and len(asked) > 1)
            bench.server.commands = [Command(id="c1", kind="collect_logs", args={"instance_id": "a"})]
            bench.server.changed.set()
            await bench.until(lambda: not bench.server.commands)
            (result,) = {one.id: one for told in bench.server.polls for one in told.command_results}.values()
            assert (result.ok, result.output) == (False, "The node's container engine does not answer.")
            bench.server.want(wish(want="Absent", gen=2))
            await bench.until(lambda: bench.server.phase("a") == "Absent")

    asyncio.run(run())


def test_a_command_that_takes_its_time_is_told_of_so_that_it_is_not_sent_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as bench:
            bench.slow = asyncio.Event()
            bench.server.commands = [Command(id="c1", kind="sync_images")]
            bench.server.changed.set()
            await bench.until(lambda: bench.images)
            bench.agent._happened("Test", "something else is told meanwhile")
            await bench.until(lambda: bench.server.polls[-1].commands == ["c1"])
            assert not bench.server.polls[-1].command_results
            bench.slow.set()
            await bench.until(lambda: not bench.server.commands)
            assert bench.server.polls[-1].commands == [] and len(bench.images) == 1

    asyncio.run(run())


def test_a_stray_goes_only_on_the_servers_word(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as bench:
            bench.server.want(wish())
            await bench.until(lambda: bench.server.phase("a") == "Running")
            bench.server.want()
            bench.now += 601 * SECOND
            await bench.until(lambda: bench.server.polls[-1].applied_rev == bench.server.rev)
            assert "a" in bench.hypervisor.machines
            bench.server.unknown = ["a"]
            bench.server.changed.set()
            await bench.until(lambda: "a" not in bench.hypervisor.machines)

    asyncio.run(run())


def test_images_are_fetched_in_advance_and_again_when_the_server_asks(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as bench:
            wanted = [DesiredImage(url="http://a"), DesiredImage(url="http://gone")]
            bench.server.desired, bench.server.rev = Desired(images=wanted), 7
            bench.server.changed.set()
            await bench.until(lambda: bench.images == [wanted])
            await bench.until(lambda: any(told.events for told in bench.server.polls))
            (event,) = {event.id: event for told in bench.server.polls for event in told.events}.values()
            assert (event.kind, event.message) == ("ImageNotReady", "http://gone: gone")
            bench.server.commands = [Command(id="c1", kind="sync_images")]
            bench.server.changed.set()
            await bench.until(lambda: not bench.server.commands)
            assert bench.images == [wanted, wanted]

    asyncio.run(run())
